// Host cache: pool, sequences and radix tree against a plain model; traces.
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>

#include "07_paged/tests/cache_faults.h"
#include "07_paged/host/page_pool.h"
#include "07_paged/host/radix_tree.h"
#include "07_paged/tests/random_cache.h"
#include "07_paged/host/trace.h"
#include "attn/error.h"
#include "tests/catch.h"

using namespace attn::paged;

namespace {
std::string text_of(const std::string& file) {
  std::ifstream in(std::string(ATTN_SOURCE_DIR) + "/" + file);
  return {std::istreambuf_iterator<char>(in), {}};
}
}  // namespace

TEST_CASE("the cache agrees with a plain model", "[cache]") {
  for (const uint64_t seed : {1, 2, 3}) {
    const int page_size = seed == 1 ? 1 : seed == 2 ? 3 : 4, num_pages = 40;
    RandomCache cache(seed, num_pages, page_size);
    INFO("seed " << seed);
    CHECK_NOTHROW(cache.run(100'000));
    CHECK_NOTHROW(cache.end());
    CHECK(cache.operations_without_room() > 100);
    CHECK((cache.copies() > 100 || page_size == 1));
    CHECK(cache.evictions() > 1000);
  }
}

TEST_CASE("free pages form a FIFO queue", "[cache]") {
  PagePool pool(4);
  CHECK((pool.take() == 0 && pool.take() == 1 && pool.take() == 2));
  CachedSequence s{{0, 2}, 8};
  drop(pool, s);  // last page first
  CHECK((pool.take() == 3 && pool.take() == 2));
  CHECK(pool.revive(0));  // its contents are used again
  CHECK_FALSE(pool.revive(0));
  CHECK_THROWS_WITH(pool.take(), "out of pages: 1 wanted, 0 free");
}

TEST_CASE("a free page can be neither shared nor released", "[cache]") {
  PagePool pool(2);
  CHECK_THROWS_WITH(pool.share(1), "share: no owner of page 1");
  CHECK_THROWS_WITH(pool.release(0), "release: no owner of page 0");
  CHECK_THROWS(pool.share(2));
}

TEST_CASE("appending to a shared page copies it", "[cache]") {
  PagePool pool(4);
  CachedSequence a;
  CHECK(append(pool, 4, a, 6).slots == std::vector<int64_t>{0, 1, 2, 3, 4, 5});
  CachedSequence b = fork(pool, a);
  CHECK((pool.owners(0) == 2 && pool.owners(1) == 2));
  const Appended first = append(pool, 4, b, 1);
  CHECK(first.copy == PageCopy{1, 2, 2});
  CHECK(first.slots == std::vector<int64_t>{2 * 4 + 2});
  CHECK_FALSE(append(pool, 4, a, 1).copy);  // no other owner is left
  CHECK((pool.owners(0) == 2 && pool.owners(1) == 1 && pool.free_pages() == 1));
  // Two pages are needed and one is free: no effect.
  CHECK_THROWS_AS(append(pool, 4, a, 6), OutOfPages);
  CHECK((a.length == 7 && a.pages == std::vector<int>{0, 1} && pool.free_pages() == 1));
  // A full page stays shared.
  append(pool, 4, a, 1);
  CachedSequence c = fork(pool, a);
  CHECK_FALSE(append(pool, 4, c, 1).copy);
}

TEST_CASE("the answers of exercise b are those of the pool", "[cache]") {
  //! [answers]
  PagePool pool(8);
  std::map<std::string, CachedSequence> s;
  std::map<std::string, int64_t> is;
  const auto add = [&](const char* name, int64_t count) {
    const Appended to = append(pool, 4, s[name], count);
    if (to.copy) ++is["copies"], is["copied"] += to.copy->tokens;
    return to.copy.has_value();
  };
  add("A", 10);
  s["B"] = fork(pool, s["A"]), s["C"] = fork(pool, s["A"]);
  add("B", 1);
  is["owners_2"] = pool.owners(2);
  add("A", 3);
  is["owners_0"] = pool.owners(0);
  const bool copied = add("C", 1);
  drop(pool, s["B"]);
  s["D"] = fork(pool, s["C"]);
  add("D", 2);
  for (const char* name : {"A", "C", "D"})
    is["unshared"] += static_cast<int64_t>(s[name].pages.size());
  is["free"] = pool.free_pages();
  CHECK_THROWS_AS(add("C", 6), OutOfPages);
  is["refused"] = 9;
  drop(pool, s["A"]);
  add("C", 6);
  is["first"] = s["C"].pages[3], is["second"] = s["C"].pages[4];
  const std::string answers = text_of("07_paged/exercises/b.solution.txt");
  for (const auto& [name, value] : is) {
    INFO(name << " = " << value);
    CHECK(answers.find(name + " = " + std::to_string(value) + "\n") != std::string::npos);
  }
  CHECK(answers.find(copied ? "c_copies = yes" : "c_copies = no") != std::string::npos);
  //! [answers]
}

TEST_CASE("the radix tree splits where sequences diverge", "[cache]") {
  PagePool pool(8);
  for (int n = 0; n < 8; ++n) pool.take();  // of a sequence that owns them
  RadixTree tree(pool, 2);
  const std::vector<Token> a{1, 1, 2, 2, 3, 3, 4}, b{1, 1, 2, 2, 5, 5};
  CHECK(tree.insert("", a, std::vector{0, 1, 2, 7}) == 0);
  CHECK((tree.pages() == 3 && tree.nodes() == 1));  // a partly filled page is not inserted
  CHECK(tree.insert("", b, std::vector{3, 4, 5}) == 2);
  CHECK((tree.pages() == 4 && tree.nodes() == 3));
  CHECK(tree.match("", b).pages == std::vector{0, 1, 5});
  CHECK(tree.match("other", b).pages.empty());
  CHECK(tree.match("", std::vector<Token>{1, 1, 2}).pages == std::vector{0});
  CHECK(tree.nodes() == 4);  // a second split
  // The leaf of a is the least recently used; locked, it stays.
  const auto locked = tree.match("", std::vector<Token>{1, 1, 2, 2, 3, 3});
  tree.match("", b);
  tree.lock(locked.node);
  for (int n = 0; n < 8; ++n) pool.release(n);
  CHECK(tree.evict(1) == 1);
  CHECK(tree.match("", b).pages == std::vector{0, 1});
  CHECK(tree.evict(8) == 0);
  tree.unlock(locked.node);
  CHECK(tree.evict(8) == 3);
  CHECK_THROWS(tree.unlock(tree.match("", b).node));
}

TEST_CASE("planted faults in the cache are detected", "[cache]") {
  for (const CacheFault& fault : kCacheFaults) {
    std::string what;
    for (uint64_t seed = 1; seed <= 4 && what.empty(); ++seed)
      what = fault.disagreement(seed, 40, 3, 1000);
    INFO(fault.what);
    CHECK(what != "");
  }
  CHECK(disagreement(1, 40, 3, 1000) == "");
}

TEST_CASE("pages waste less than 4 % at 16 tokens", "[cache]") {
  const Trace trace = drawn_trace(kDrawnRequests, 1);
  const ReplayedRows rows = replay_all(trace);
  for (const auto& [division, r] : rows) {
    INFO(division.text());
    if (division.kind == Division::Kind::longest) CHECK((r.useful > 0.2 && r.useful < 0.38));
    if (division.kind == Division::Kind::pages && division.page_size <= 16) CHECK(r.useful > 0.96);
    if (division.kind == Division::Kind::pages && division.page_size == 1)
      CHECK((r.useful == 1 && r.copied == 0));
  }
  // The chapter's pages show what the program prints and draws.
  CHECK(text_of("07_paged/RESULTS.md").find(table(rows)) != std::string::npos);
  CHECK(text_of("docs/figures/07_trace.svg") == picture(rows));
}

// Steps without events are skipped, however many: these arrivals are a million years apart.
TEST_CASE("a trace may have any arrival times", "[cache]") {
  const Trace trace{{0, 5, 5, 1, 1, 0, 0}, {int64_t{1} << 53, 5, 5, 1, 1, 0, 0}};
  for (const auto& [division, r] : replay_all(trace)) CHECK(r.steps == (int64_t{1} << 53) + 5);
}

// Whatever the ids: tokens of a system prompt and of a request differ.
TEST_CASE("only equal system prompts hit the cache", "[cache]") {
  const auto hits = [](int64_t first, int64_t second) {
    const Trace trace{{0, 1000, 50, 1, 1, first, first == 0 ? 0 : 1000},
                      {10, 50, 50, 1, 1, second, 1000}};
    return replay(trace, {Division::Kind::pages, 16}, 1 << 16, 1).hit_rate;
  };
  CHECK(hits(7, 7) > 0.3);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [first, second] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 7}, {0, 1000}, {0, 1001}, {1, 1048577}, {kMost, kMost - 1}, {1, 2}})
    CHECK(hits(first, second) == 0);
}

TEST_CASE("a saved trace is read back and a bad line is named", "[cache]") {
  std::stringstream file;
  write_trace(file, drawn_trace(50, 7));
  CHECK(table(replay_all(read_trace(file, "f"))) == table(replay_all(drawn_trace(50, 7))));
  const auto why = [](const std::string& text) -> std::string {
    std::stringstream in(text);
    try {
      read_trace(in, "f.csv");
    } catch (const attn::InputError& e) {
      return e.what();
    }
    return "";
  };
  const std::string header = "arrival,prompt,output,samples,beams,system,system_tokens\n";
  CHECK(why("prompt\n").starts_with("f.csv: the first line must be arrival,prompt"));
  CHECK(why(header) == "f.csv: no requests");
  CHECK(why(header + "0,5,5,1,1,0,0\n") == "");
  CHECK(why("arrival,prompt,output,samples,beams,system,system_tokens\r\n0,5,5,1,1,0,0\r\n") == "");
  CHECK(
      why(header + "0,5,5,1,33,0,0\n") ==
      "f.csv: line 2: 0,5,5,1,33,0,0: does not fit into the cache: samples x beams x 2048 must be "
      "at most 65536");
  CHECK(why(header + "0,5,5,1,32,0,0\n") == "");
  CHECK(why(header + "0,5,5,1,1,0\n") == "f.csv: line 2: 0,5,5,1,1,0: must be seven integers");
  for (const char* line :
       {"0,5,5,1,1,0,0,", "0,5,5,1,1,0,x", "0,0,5,1,1,0,0", "0,5,5,2,2,0,0", "0,5,5,1,1,0,9",
        "0,2000,49,1,1,0,0", "0,5,5,33,1,0,0", "-1,5,5,1,1,0,0", "0,9223372036854775807,1,1,1,0,0",
        "0,10,9223372036854775807,1,1,0,0", "0,10,10,1,1,1,9223372036854775800",
        "0,5,5,9223372036854775807,1,0,0", "9223372036854775807,5,5,1,1,0,0"})
    CHECK(why(header + line + "\n").starts_with("f.csv: line 2: "));
  CHECK(why("\xEF\xBB\xBF" + header + "\n0,5,5,1,1,0,0\n\n") == "");  // a BOM and empty lines
  CHECK(why(header + "3,5,5,1,1,0,0\n2,5,5,1,1,0,0\n").ends_with("arrives before the line above"));
}
