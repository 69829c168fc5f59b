// Chapter 07: every step is correct for every batch and page size that it accepts, on both back
// ends.
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>

#include "07_paged/host/paged.h"
#include "07_paged/kernels/splits.h"
#include "attn/error.h"
#include "attn/rotary.h"
#include "check/inputs.h"
#include "check/variations.h"
#include "files/npy.h"
#include "run/options.h"
#include "run/runner.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Lengths of the batch; those at page ends are added.
const std::vector<int64_t> kLengths07{1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 700};
constexpr int64_t kPageSizes[] = {1, 5, 16, 64, 256};

// Query heads per K/V head: group sizes that fill a tile, and others.
constexpr int64_t kHeads[][2] = {{1, 1}, {3, 1}, {7, 1}, {8, 1}, {16, 1}, {2, 2}, {6, 2}};
constexpr int64_t kQueries[] = {1, 1, 2, 1, 4, 1, 16, 3};

// Problems that combine every length with every page size, and pairs of all other parameters.
template <class Body>
void paged_problems(const std::vector<int64_t>& lengths, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier};
  constexpr int64_t kDims[] = {128, 64, 128, 256, 64, 128, 64};
  std::size_t n = 0;
  for (const int64_t length : lengths)
    for (const int64_t page : kPageSizes) {
      Problem p = paged(kQueries[n % 8], length, kDims[n % 7], page,
                        n % 2 == 0 ? DType::bf16 : DType::fp16, kInputs[n % 4]);
      p.heads = kHeads[n * 5 % 7][0], p.kv_heads = kHeads[n * 5 % 7][1];
      p.causal = n % 3 == 1;
      if (n % 3 == 2) p.window_left = static_cast<int64_t>(n * 37 % 150), p.window_right = 0;
      // Next to the longest sequence: lengths at, before and past a page end, or an empty sequence.
      const int64_t whole = std::max<int64_t>(1, length / page / 2) * page;
      const int64_t others[] = {whole, whole - 1, whole + 1, 0};
      p.batch = 3;
      p.seqused_k = {std::min(length, others[n % 4]), length, std::min(length, others[n / 4 % 4])};
      if (n % 4 != 0) p.own["blocks"] = {static_cast<double>(1 + n * 7 % 9)};  // blocks of a plan
      p.seed = n + 1;
      body(p);
      ++n;
    }
}

}  // namespace

// 16 bits; three head dims or that of latent attention; up to 16 queries or ragged prefill; any
// page size; masks by position; no other feature.
bool attn::tests::promised(const Step& step, const Problem& p) {
  const std::string& name = step.operation->name;
  return p.dtype != DType::fp32 &&
         (name == "paged_mla" ? p.head_dim == 576 && p.kv_heads == 1
                              : one_of(p.head_dim, {64, 128, 256})) &&
         (p.seqlen_q <= 16 || (name != "paged_decode" && name != "paged_mla")) &&
         (!p.varlen() || step.operation->name == "paged_prefill") &&
         (!p.own.contains("tree") || step.name == "v9_tree_mask") &&
         ((!p.own.contains("serial") && !p.own.contains("streams")) || step.name == "v11_mixed") &&
         (!p.own.contains("serial") || !p.own.contains("streams")) && p.dropout == 0 &&
         (!one_of_steps(step, {"v15_prefill_tma", "v16_mla_seesaw", "v17_prefix_tma"}) ||
          splits::page_size_of(p) % 8 == 0) &&
         (step.name != "v16_mla_seesaw" || p.window_left < 0) &&
         ((p.softcap == 0 && !p.alibi && !p.own.contains("sinks") &&
           (!p.own.contains("rotary") || name != "paged_decode")) ||
          step.name == "v10_variants") &&
         (!p.own.contains("rotary") || p.seqlen_q <= p.seqlen_k) && !p.mask;
}

TEST_CASE("steps are correct for any lengths and page sizes", "[emulated]") {
  Counts ran;
  paged_problems(kLengths07, [&](const Problem& p) {
    ran += check_steps("paged_decode", p, Backend::emulated);
  });
  // Three of five page sizes are multiples of 8.
  for (const Step* step : decode_steps())
    CHECK(ran.of[step->name] == (step->name == "v17_prefix_tma" ? 36 : 60));
}

TEST_CASE("variants are correct with masks and split row blocks", "[emulated]") {
  Counts ran;
  std::size_t n = 0;
  paged_problems({16, 65, 257, 700}, [&](Problem p) {
    if (++n % 2 == 0) p.softcap = n % 4 == 0 ? 30 : 0.5;
    p.alibi = n % 4 != 0;
    if (n % 3 != 0) p.own["sinks"] = {1};
    if (n % 5 < 2) p.own["rotary"] = {1};
    ran += check_steps("paged_decode", p, Backend::emulated);
  });
  CHECK(ran.of == std::map<std::string, int>{{"v10_variants", 20}});
}
// Computed by hand: a key and a sink with equal logits share the row. The reference must treat
// sinks differently from other logits.
TEST_CASE("a sink adds to the denominator and has no value", "[emulated]") {
  Problem p = paged(1, 1, 64, 16, DType::bf16);
  p.batch = 2, p.heads = p.kv_heads = 1, p.seqused_k = {1, 0};
  p.own["sinks"] = {1};
  p.finish();
  HostTensors in = draw(paged_decode(), p).tensors;
  std::ranges::fill(in.at("q").data, 0.0f);  // the key's score is 0
  in.at("sinks").data = {std::log(3.0f)};
  const std::vector<Expected> expected = paged_decode().reference(p, in, {});
  for (std::size_t c = 0; c < 64; ++c) {
    CHECK(std::abs(expected[0].reference[c] - double{in.at("v").row(0, 0, 0)[c]} / 4) < 1e-7);
    CHECK(expected[0].reference[64 + c] == 0);  // without keys
  }
  CHECK(std::abs(expected[1].reference[0] - std::log(4.0)) < 1e-6);
  CHECK(std::abs(expected[1].reference[1] - std::log(3.0)) < 1e-6);
}
// A running max that starts at the sink would make P of the keys subnormal in fp16; added at the
// end, the sink does no harm. Also: a sink so large that O is subnormal, a sink of -inf, which is
// none, and a sequence without keys.
TEST_CASE("sinks far above the scores and sinks of -inf in fp16", "[emulated]") {
  for (const int64_t splits : {1, 8}) {
    Problem p = paged(2, 700, 64, 16, DType::fp16);
    p.batch = 3, p.heads = 6, p.kv_heads = 1, p.seqused_k = {33, 700, 0};
    p.own["sinks"] = {1}, p.own["blocks"] = {static_cast<double>(splits)};
    p.finish();
    Case c(p, paged_decode());
    c.inputs.at("sinks").data = {9, 12, 14, 17, 30, -INFINITY};
    c.expected = paged_decode().reference(p, c.inputs, {});
    for (const Step& step : chapter().steps) {
      if (step.operation != &paged_decode() || refusal(step, p)) continue;
      INFO(step.name << " " << splits);
      HostTensors out;
      CHECK(run_step(step, c, Backend::emulated, &out) == "");
      CHECK(out.at("lse").row(2, 5, 0)[0] == -INFINITY);
      CHECK(std::abs(out.at("lse").row(2, 4, 0)[0] - 30) < 1e-5f);
    }
  }
}
// Only the key at the query's own position is visible: both are rotated by the same angle, so the
// score is their dot product at any position.
TEST_CASE("a query is rotated by the position of the last key", "[emulated]") {
  Problem p = paged(1, 40, 64, 16, DType::bf16);
  p.batch = 3, p.heads = p.kv_heads = 1, p.seqused_k = {1, 3, 40};
  p.window_left = 0, p.window_right = 0, p.own["rotary"] = {1};
  p.finish();
  HostTensors in = draw(paged_decode(), p).tensors;
  std::vector<double> products;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t last = p.seqused_k[static_cast<std::size_t>(b)] - 1;
    HostTensor& k = in.at("k");
    const std::span<float> key(&k.data[static_cast<std::size_t>(64 * k.spec.row(b, 0, last))], 64);
    products.push_back(std::inner_product(key.begin(), key.end(), in.at("q").row(b, 0, 0), 0.0));
    turn(key, in.at("cos_sin").row(0, 0, last));
  }
  const std::vector<Expected> expected = paged_decode().reference(p, in, {});
  for (std::size_t b = 0; b < products.size(); ++b)
    CHECK(std::abs(expected[1].reference[b] - products[b] / 8) < 1e-5);
  p.seqused_k.clear(), p.seqlen_q = 5, p.seqlen_k = 4;
  for (const Step* step : decode_steps())
    CHECK(refusal(*step, p) == (step->name == "v10_variants"
                                    ? "--rotary: 5 queries, but room for 4 keys"
                                    : "--rotary: this step has no rotary embedding"));
}
TEST_CASE("variants on the GPU", "[gpu]") {
  std::size_t n = 0;
  paged_problems({16, 65, 257, 700, 32789}, [&](Problem p) {
    if (++n % 2 == 0) p.softcap = n % 4 == 0 ? 30 : 0.5;
    p.alibi = n % 4 != 0;
    if (n % 3 != 0) p.own["sinks"] = {1};
    if (n % 5 < 2) p.own["rotary"] = {1};
    check_steps("paged_decode", p, Backend::gpu);
  });
}

TEST_CASE("a batch of empty sequences gives O = 0 and lse = -inf", "[emulated]") {
  Problem p = paged(2, 100, 64, 16, DType::bf16);
  p.batch = 3, p.heads = 4, p.kv_heads = 2;
  p.seqused_k = {0, 0, 0};
  p.finish();
  for (const Step* step : decode_steps()) {
    HostTensors out;
    INFO(step->name);
    CHECK(run_step(*step, p, Backend::emulated, &out) == "");
    for (const float x : out.at("o").data) CHECK(x == 0);
    for (const float x : out.at("lse").data) CHECK((std::isinf(x) && x < 0));
  }
}

TEST_CASE("more sequences than a warp has lanes", "[emulated]") {
  Problem p = paged(1, 300, 64, 16, DType::bf16);
  p.batch = 70, p.heads = 2, p.kv_heads = 1;
  for (int64_t b = 0; b < 70; ++b) p.seqused_k.push_back(b % 5 == 0 ? 0 : b * 37 % 301);
  check_steps("paged_decode", p, Backend::emulated);
}

TEST_CASE("unallocated pages and page tails are NaN", "[emulated]") {
  Problem p = paged(1, 40, 64, 5, DType::bf16);
  p.batch = 3, p.heads = 2, p.kv_heads = 1;
  p.seqused_k = {7, 0, 40};
  p.finish();
  const HostTensors in = draw(paged_decode(), p).tensors;
  int64_t numbers = 0, entries = 0, last = 0;
  for (const float x : in.at("k").data) numbers += !std::isnan(x);
  for (const int64_t page : in.at("page_table").numbers) {
    entries += page != (int64_t{1} << 31) - 1;
    last += page == num_pages_of(p) - 1;
  }
  CHECK(numbers == (7 + 40) * 64);
  CHECK(entries == 2 + 8);
  CHECK(last == 1);  // the pool's last page is allocated
  CHECK(num_pages_of(p) == 10 + 3);
  // Each NaN encodes its place: past the last key of a sequence, or in an unallocated page.
  std::map<uint32_t, int64_t> rows;
  for (const float x : in.at("k").data) rows[std::bit_cast<uint32_t>(x)] += std::isnan(x);
  const auto count = [&](int64_t sequence) {
    return rows[std::bit_cast<uint32_t>(unused_nan(sequence))] / 64;
  };
  CHECK((count(0) == 3 && count(1) == 0 && count(2) == 0 && count(-1) == 3 * 5));
  for (const DType type : {DType::bf16, DType::fp16}) {  // also where a kernel reads them
    HostTensor k = in.at("k");
    k.spec.dtype = type;
    const HostTensor read = from_bytes(k.spec, to_bytes(k));
    int64_t kept = 0;
    for (std::size_t i = 0; i < k.data.size(); ++i)
      kept += std::isnan(k.data[i]) &&
              std::bit_cast<uint32_t>(read.data[i]) == std::bit_cast<uint32_t>(k.data[i]);
    CHECK(kept == (3 + 3 * 5) * 64);
  }
  p.own["num_pages"] = {9};
  CHECK_THROWS_WITH(draw(paged_decode(), p), "--num-pages 9: the sequences need 10");
}

TEST_CASE("a failure is repeated with simpler pages", "[emulated]") {
  Problem p = paged(1, 40, 64, 5, DType::bf16);
  p.batch = 2, p.seqused_k = {7, 40};
  p.own["num_pages"] = {20};
  p.finish();
  std::map<std::string, Problem> all;
  for (const Variation& v : variations(p, paged_decode(), std::nullopt)) all[v.change] = v.problem;
  const auto table = [&](const std::string& change) {
    return draw(paged_decode(), all.at(change)).tensors.at("page_table").numbers;
  };
  CHECK(splits::page_size_of(all.at("with pages of 1 token")) == 1);
  CHECK(table("with one page a sequence (40)").size() == 2);
  constexpr int64_t kNone = (int64_t{1} << 31) - 1;
  CHECK(table("with pages in order") == std::vector<int64_t>{0, 1, kNone, kNone, kNone, kNone,
                                                             kNone, kNone, 2, 3, 4, 5, 6, 7, 8, 9});
  p.own["page_size"] = {1}, p.own["identity_table"] = {1};
  for (const Variation& v : variations(p, paged_decode(), std::nullopt)) {
    CHECK(v.change != "with pages of 1 token");
    CHECK(v.change != "with pages in order");
  }
}

TEST_CASE("drawn lengths follow the option --lengths", "[emulated]") {
  CHECK(drawn_lengths("const:7", 3, 1) == std::vector<int64_t>{7, 7, 7});
  // First values of PyTorch's randint(4096, 16385) after manual_seed(7).
  const std::vector<int64_t> uniform = drawn_lengths("uniform:4096,16384", 33, 7);
  CHECK(std::vector(uniform.begin(), uniform.begin() + 6) ==
        std::vector<int64_t>{10370, 7782, 6486, 13951, 12221, 14678});
  for (const int64_t n : uniform) CHECK((n >= 4096 && n <= 16384));
  CHECK(std::accumulate(uniform.begin(), uniform.end(), int64_t{0}) / 1000 == 335);
  const std::vector<int64_t> zipf = drawn_lengths("zipf:1024", 64, 1);
  CHECK(std::abs(std::accumulate(zipf.begin(), zipf.end(), int64_t{0}) - 64 * 1024) < 32);
  CHECK(*std::ranges::max_element(zipf) > 60 * *std::ranges::min_element(zipf));
  for (const char* text : {"", "uniform", "uniform:5", "uniform:5,4", "zipf:0", "const:1,2",
                           "const:x", "const:-1", "poisson:4", "const:1x"})
    CHECK_THROWS_AS(drawn_lengths(text, 4, 1), InputError);
}

TEST_CASE("contradictory options are refused with the reason", "[emulated]") {
  const auto why = [](std::vector<const char*> options) -> std::string {
    options.insert(options.begin(), "07_paged");
    try {
      parse_options(chapter(), static_cast<int>(options.size()), options.data());
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(why({"--seqlen-k", "200", "--shared-prefix", "1000,2"}) ==
        "--shared-prefix 1000: the longest sequence has 200 tokens");
  CHECK(why({"--lengths", "const:300", "--shared-prefix", "301"}) ==
        "--shared-prefix 301: the longest sequence has 300 tokens");
  CHECK(why({"--operation", "paged_prefill", "--varlen", "3,70", "--shared-prefix", "71"}) ==
        "--shared-prefix 71: the longest sequence has 70 tokens");
  CHECK(why({"--batch", "2", "--seqused", "90,10", "--shared-prefix", "90"}) == "");
  CHECK(why({"--operation", "paged_append", "--seqlen-q", "60", "--seqlen-k", "40"}) ==
        "--seqlen-q 60: more new tokens than the 40 that a sequence has room for");
  CHECK(why({"--operation", "paged_append", "--seqlen-q", "40", "--seqlen-k", "40"}) == "");
  CHECK(why({"--tree"}) == "--tree: only for paged_prefill, not for paged_decode");
  CHECK(why({"--operation", "paged_prefill", "--sinks"}) ==
        "--sinks: only for paged_decode, not for paged_prefill");
  CHECK(why({"--operation", "paged_mla", "--shared-prefix", "100"}) ==
        "--shared-prefix 100: only for paged_decode and paged_prefill, not for paged_mla");
  CHECK(why({"--operation", "page_copy", "--rotary"}) ==
        "--rotary: only for paged_decode and paged_append, not for page_copy");
  for (const Step& step : chapter().steps)
    if (step.name == "v8_shared_prefix")
      CHECK(step.support.ends_with("reads shared prefixes of at least 128 tokens once"));
}

TEST_CASE("unsupported options of pages are named", "[emulated]") {
  const auto status = [](std::vector<const char*> options) {
    options.insert(options.begin(),
                   {"07_paged", "--device", "emulated", "--step", "v3_prefetched_pages"});
    return run_chapter(chapter(), static_cast<int>(options.size()), options.data());
  };
  CHECK(status({"--batch", "3", "--lengths", "zipf:40", "--page-size", "5"}) == 0);
  CHECK(status({"--lengths", "zipf"}) == 2);
  CHECK(status({"--lengths", "const:40", "--seqused", "3"}) == 2);
  CHECK(status({"--lengths", "const:40", "--seqlen-k", "50"}) == 2);
  CHECK(status({"--page-size", "0"}) == 2);
  CHECK(status({"--num-pages", "2"}) == 2);
  CHECK(status({"--rotary"}) == 3);  // for v10_variants and paged_append
  // The loaded page table differs from a drawn one: outputs follow the loaded table.
  const auto run = [](std::vector<const char*> options) {
    options.insert(options.begin(),
                   {"07_paged", "--device", "emulated", "--rotary", "--operation", "paged_append"});
    return run_chapter(chapter(), static_cast<int>(options.size()), options.data());
  };
  CHECK(run({"--batch", "3", "--seqlen-q", "4", "--seqused", "9,2,30", "--seqlen-k", "30", "--seed",
             "5", "--save", "append_files"}) == 0);
  CHECK(run({"--load", "append_files"}) == 0);
  CHECK(run({"--load", "append_files", "--page-size", "5"}) == 2);
  // A loaded table may have capacity past the longest sequence; a shorter one is refused.
  NpyArray angles = read_npy("append_files/cos_sin.npy");
  for (const int64_t positions : {40, 29}) {
    angles.data.resize(static_cast<std::size_t>(positions * angles.shape[1]));
    write_npy("append_files/cos_sin.npy", {positions, angles.shape[1]}, angles.data.data());
    CHECK(run({"--load", "append_files"}) == (positions == 40 ? 0 : 2));
  }
  std::filesystem::remove_all("append_files");
  const char* const trace[] = {"07_paged", "--trace", "no_such_file.csv"};
  CHECK(run_chapter(chapter(), 3, trace) == 2);
}

TEST_CASE("steps refuse unsupported problems with the reason", "[emulated]") {
  const auto refused = [](Problem p, const char* why) {
    p.finish();
    for (const Step* step : decode_steps()) {
      const auto reason = refusal(*step, p);
      REQUIRE(reason);
      INFO(step->name << ": " << *reason);
      CHECK(reason->find(why) != std::string::npos);
    }
  };
  refused(paged(1, 64, 96, 16, DType::bf16), "--head-dim 96: this step takes 64, 128 and 256");
  refused(paged(17, 64, 64, 16, DType::bf16), "--seqlen-q 17: this step takes at most 16");
  refused(paged(1, 64, 64, 16, DType::fp32), "--dtype fp32: this step takes fp16 and bf16");
  Problem p = paged(1, 64, 64, 4096, DType::bf16);
  p.own["num_pages"] = {1 << 19};
  refused(p, "a pool holds at most 2^31 - 1 tokens");
  p.own["num_pages"] = {(1 << 19) - 1};
  p.finish();
  for (const Step* step : decode_steps()) CHECK(!refusal(*step, p));
}

TEST_CASE("all steps on the GPU", "[gpu]") {
  std::vector<int64_t> lengths = kLengths07;
  lengths.insert(lengths.end(), {4096, 32789});
  Counts ran;
  paged_problems(lengths,
                 [&](const Problem& p) { ran += check_steps("paged_decode", p, Backend::gpu); });
  for (const Step* step : decode_steps())
    CHECK(ran.of[step->name] == (step->name == "v17_prefix_tma" ? 42 : 70));
  for (const int64_t page : {1, 16}) {
    Problem p = paged(1, 131072, 128, page, DType::bf16, InputKind::needle);
    p.batch = 4, p.heads = 8, p.kv_heads = 2;
    p.seqused_k = {1, 131072, 1000, 77777};
    check_steps("paged_decode", p, Backend::gpu);
  }
  Problem p = paged(1, 3000, 64, 16, DType::fp16);
  p.batch = 256, p.heads = 4, p.kv_heads = 2;
  for (int64_t b = 0; b < p.batch; ++b) p.seqused_k.push_back(b % 7 == 0 ? 0 : b * 1009 % 3001);
  check_steps("paged_decode", p, Backend::gpu);
}

namespace {
// The contents of the pool repeat after a quarter of it: a multiple of four pages, so that a period
// has whole rows, and not a power of two.
void large_pool(Backend backend, int64_t pages, int64_t length, int64_t most) {
  for (const char* operation : {"paged_decode", "paged_prefill"}) {
    Problem p = paged(1, length, 128, 16, DType::bf16);
    p.batch = 4, p.heads = p.kv_heads = 8;
    p.own["num_pages"] = {static_cast<double>(pages)};
    check_large_steps(operation, p, backend, most);
  }
}
}  // namespace

TEST_CASE("a pool with periodic contents", "[emulated]") {
  large_pool(Backend::emulated, 36, 130, 1000);
}
TEST_CASE("a pool past 2^32 elements, with live pages at its end", "[gpu][large]") {
  large_pool(Backend::gpu, (1 << 18) + 4, 60000, int64_t{1} << 27);
}

TEST_CASE("tokens are appended to their pages and rotated with --rotary", "[emulated]") {
  Counts ran;
  std::size_t n = 0;
  for (const int64_t page : kPageSizes)
    for (const int64_t fresh : {1, 3, 40})
      for (const bool rotary : {false, true}) {
        Problem p = paged(fresh, 300,
                          n % 3 == 0   ? 128
                          : n % 3 == 1 ? 64
                                       : 256,
                          page, n % 2 == 0 ? DType::bf16 : DType::fp16);
        p.batch = 4, p.heads = p.kv_heads = 1 + static_cast<int64_t>(n % 3);
        p.seqused_k = {300, page, 0, fresh + 1};
        if (rotary) p.own["rotary"] = {1};
        p.seed = ++n;
        ran += check_steps("paged_append", p, Backend::emulated);
      }
  CHECK(ran.of["a1_append"] == 30);
}

TEST_CASE("pages are copied in full and in part", "[emulated]") {
  for (const int64_t page : kPageSizes) {
    Problem p = paged(1, 1, 128, page, DType::bf16);
    p.batch = 20, p.heads = p.kv_heads = 3;
    check_steps("page_copy", p, Backend::emulated);
  }
}

TEST_CASE("append and copy on the GPU", "[gpu]") {
  for (const int64_t page : kPageSizes) {
    Problem p = paged(7, 3000, 128, page, DType::bf16);
    p.batch = 70, p.heads = p.kv_heads = 8;
    for (int64_t b = 0; b < p.batch; ++b)
      p.seqused_k.push_back(b % 7 == 0 ? b / 7 : b * 1009 % 3001);
    check_steps("paged_append", p, Backend::gpu);
    p.own["rotary"] = {1};
    check_steps("paged_append", p, Backend::gpu);
    p.seqused_k.clear(), p.own.erase("rotary"), p.seqlen_k = 1;
    check_steps("page_copy", p, Backend::gpu);
  }
}
