// Several ranks: shards, blocks between them, every step with emulated ranks, and planted faults.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "host/rank_model.h"
#include "ranks/emulated.h"
#include "ranks/meeting.h"
#include "ranks/sharded.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::ranks;
using namespace attn::tests;

// Forward: any lengths and masks of 16-bit types. Ulysses: a K/V head per rank. Decoding: as
// without ranks; with several lengths and a mask only one query.
bool promised_of_ranks(const Step& step, const Problem& p) {
  if (!takes(step, "devices") || !p.own.contains("devices")) return false;
  if (p.own.contains("num_splits") || p.own.contains("split_keys")) return false;
  const auto world = static_cast<int64_t>(devices_of(p).size());
  const bool decodes = step.operation->name == "decode";
  if (p.dtype == DType::fp32 || !one_of(p.head_dim, {64, 128, 256}) || p.varlen() || p.mask ||
      p.dropout > 0 || p.softcap > 0 || p.alibi)
    return false;
  if (step.name == "p4_ulysses" && p.kv_heads % world != 0) return false;
  if (step.name == "p5_ring_backward" &&
      (p.seqlen_q != p.seqlen_k || p.head_dim == 256 || p.window_left >= 0 || p.window_right >= 0))
    return false;
  if (!decodes) return p.seqused_k.empty();
  if (step.name == "p8_paged_shards" && ((p.masked() && p.seqlen_q > 1) || p.window_left >= 0))
    return false;
  const bool masked = (p.masked() && p.seqlen_q > 1) || p.window_left >= 0;
  return p.seqlen_q <= 16 && (p.seqused_k.empty() || !masked);
}

namespace {

constexpr int kWorlds[] = {1, 2, 3, 4, 7, 16};
constexpr TokenOrder kOrders[] = {TokenOrder::contiguous, TokenOrder::zigzag, TokenOrder::striped};

Problem on_ranks(Problem p, int world) {
  for (int r = 0; r < world; ++r) p.own["devices"].push_back(r);
  return p;
}

// Lengths that are no multiple of the ranks, fewer tokens than ranks, unequal lengths
// both ways, windows in which ranks have no work, GQA, and a batch.
std::vector<Problem> forward_problems() {
  std::vector<Problem> all{problem(391, 391, 64, DType::bf16, InputKind::needle),
                           problem(130, 300, 128, DType::fp16),
                           problem(300, 130, 64, DType::bf16),
                           problem(5, 9, 64, DType::bf16),
                           problem(333, 333, 64, DType::bf16, InputKind::needle),
                           problem(200, 333, 64, DType::fp16, InputKind::peaked),
                           problem(97, 260, 256, DType::bf16),
                           problem(1, 1, 64, DType::bf16)};
  for (const std::size_t n : {0, 1, 2, 3, 7}) all[n].causal = true;
  all[4].window_left = 40, all[4].window_right = 0;
  all[5].window_left = 0, all[5].window_right = 5;
  all[6].window_right = 33;
  all[3].batch = 2, all[3].heads = 4, all[3].kv_heads = 2;
  all[1].heads = 3, all[1].kv_heads = 1;
  for (std::size_t n = 0; n < all.size(); ++n) all[n].seed = n + 1;
  return all;
}

HostTensors outputs_of(const Step& step, const Problem& p, const Faults& faults = {}) {
  planted = faults;
  Session session(p, *step.operation, Backend::emulated, draw(*step.operation, p).tensors);
  REQUIRE(session.prepare(step).ok());
  const Status status = session.launch();
  planted = {};
  REQUIRE(status.ok());
  return session.outputs();
}
// What a planted fault leads to: the status of the launch, or the first wrong value.
std::string result_of(const Step& step, const Problem& p, const Faults& faults) {
  planted = faults;
  std::string said = run_step(step, p, Backend::emulated);
  planted = {};
  return said;
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("ranks: every token is on one rank, and the inverse leads back", "[ranks]") {
  for (const TokenOrder order : kOrders)
    for (const int world : kWorlds)
      for (const int64_t tokens : {0, 1, 5, 16, 391}) {
        const std::vector<int64_t> token = permutation(order, tokens, world);
        const std::vector<int64_t> place = inverse(token);
        REQUIRE(std::ssize(token) == tokens);
        CHECK(std::set(token.begin(), token.end()).size() == token.size());
        for (int64_t t = 0; t < tokens; ++t)
          CHECK(token[static_cast<std::size_t>(place[static_cast<std::size_t>(t)])] == t);
      }
  // The permutation is not its own inverse: a test with two parts alone would not tell them apart.
  const std::vector<int64_t> zigzag = permutation(TokenOrder::zigzag, 16, 4);
  CHECK(zigzag != inverse(zigzag));
  CHECK(parts_of(TokenOrder::zigzag, 16, 4, 1)[1].first == 12);
  CHECK(parts_of(TokenOrder::striped, 10, 4, 1)[0].count == 3);
}

TEST_CASE("ranks: the blocks of all ranks hold each visible pair once", "[ranks]") {
  for (const TokenOrder order : kOrders)
    for (const int world : kWorlds)
      for (Problem p : forward_problems()) {
        if (p.seqlen_q > 130 && world != 3) p.seqlen_q = 61, p.seqlen_k = p.seqlen_k / 4;
        p.finish();
        const Sharding s(p, order, world);
        const auto tokens = [](const std::vector<Part>& parts) {
          std::vector<int64_t> all;
          for (const Part& part : parts)
            for (int64_t i = 0; i < part.count; ++i) all.push_back(part.token(i));
          return all;
        };
        std::vector<int> seen(static_cast<std::size_t>(p.seqlen_q * p.seqlen_k));
        for (int rank = 0; rank < world; ++rank)
          for (int owner = 0; owner < world; ++owner) {
            const auto& queries = s.q[static_cast<std::size_t>(rank)];
            const auto& keys = s.k[static_cast<std::size_t>(owner)];
            const std::vector<int64_t> q = tokens(queries), k = tokens(keys);
            for (const ShardBlock& b : blocks_of(p, queries, keys)) {
              const Problem one = problem_of(p, b).sequence(0);
              for (int64_t i = 0; i < b.nq; ++i) {
                const KeyRange range = one.visible(i);
                CHECK(range.size() > 0);  // rows without keys are cut off
                for (int64_t j = range.begin; j < range.end; ++j)
                  ++seen[static_cast<std::size_t>(q[static_cast<std::size_t>(b.q_row + i)] *
                                                      p.seqlen_k +
                                                  k[static_cast<std::size_t>(b.k_row + j)])];
              }
            }
          }
        int wrong = 0;
        for (int64_t i = 0; i < p.seqlen_q; ++i)
          for (int64_t j = 0; j < p.seqlen_k; ++j) {
            const KeyRange range = p.visible(i);
            wrong += seen[static_cast<std::size_t>(i * p.seqlen_k + j)] !=
                     (j >= range.begin && j < range.end ? 1 : 0);
          }
        INFO(p.text() << ", " << world << " ranks, order " << static_cast<int>(order));
        CHECK(wrong == 0);
      }
}

TEST_CASE("ranks: zig-zag gives every rank the same work under a causal mask", "[ranks]") {
  Problem p = problem(1024, 1024, 64, DType::bf16);
  p.causal = true;
  p.finish();
  for (const int world : {2, 4, 8}) {
    const Sharding s(p, TokenOrder::zigzag, world);
    std::set<double> work;
    for (int rank = 0; rank < world; ++rank) {
      double pairs = 0;
      for (const auto& keys : s.k)
        for (const ShardBlock& b : blocks_of(p, s.q[static_cast<std::size_t>(rank)], keys))
          pairs += problem_of(p, b).sequence(0).visible_pairs();
      work.insert(pairs);
    }
    CHECK(work.size() == 1);
  }
}

TEST_CASE("ranks: forward steps match the reference for any number of ranks", "[emulated][ranks]") {
  Counts ran;
  std::set<int> worlds;  // of problems with more than a tile of keys: each has two of the six
  std::size_t turn = 0;
  for (const Problem& p : forward_problems()) {
    ++turn;
    for (std::size_t w = 0; w < std::size(kWorlds); ++w) {
      if (p.seqlen_k >= 100 && (turn + w) % 3 != 0) continue;
      ran += check_steps("forward", on_ranks(p, kWorlds[w]), Backend::emulated);
      if (p.seqlen_k >= 100) worlds.insert(kWorlds[w]);
    }
  }
  CHECK(worlds.size() == std::size(kWorlds));
  for (const char* name : {"p1_all_gather", "p2_ring", "p3_zigzag"}) CHECK(ran.of[name] >= 20);
  CHECK(ran.of["p4_ulysses"] >= 5);
}

TEST_CASE("ranks: decode steps match the reference for any number of ranks", "[emulated][ranks]") {
  Counts ran;
  std::size_t n = 0;
  for (const int world : kWorlds)
    for (const int64_t keys : {1, 9, 391, 1000})
      for (int mask = 0; mask < 3; ++mask, ++n) {
        Problem p = problem(n % 3 == 0   ? 1
                            : n % 3 == 1 ? 3
                                         : 16,
                            keys, n % 4 == 0 ? 128 : 64, n % 2 == 0 ? DType::bf16 : DType::fp16,
                            InputKind::needle);
        p.heads = n % 2 == 0 ? 8 : 7, p.kv_heads = n % 2 == 0 ? 2 : 7;
        p.causal = mask == 1;
        if (mask == 2) p.window_left = keys / 3, p.window_right = 0;
        if (mask == 0 && n % 4 != 0) p.batch = 3, p.seqused_k = {keys, keys / 2, 0};
        p.seed = n + 1;
        ran += check_steps("decode", on_ranks(p, world), Backend::emulated);
      }
  for (const char* name : {"p6_tree_decode", "p7_peer_decode"}) CHECK(ran.of[name] == 72);
  CHECK(ran.of["p8_paged_shards"] == 24);
}

TEST_CASE("ranks: pages of several queries and of mixed lengths", "[emulated][ranks]") {
  Counts ran;
  for (const int world : kWorlds)
    for (const int64_t keys : {64, 65, 1000}) {
      Problem p = problem(keys == 64 ? 1 : 5, keys, 64, DType::bf16, InputKind::peaked);
      p.heads = 6, p.kv_heads = 2, p.batch = 4, p.causal = keys == 64;
      p.seqused_k = {keys, keys / 2, 63, 0};
      p.seed = static_cast<std::uint64_t>(keys + world);
      ran += check_steps("decode", on_ranks(p, world), Backend::emulated);
    }
  CHECK(ran.of["p8_paged_shards"] == 18);
}

TEST_CASE("ranks: the all-reduces of p6 give what its all-gather gives", "[emulated][ranks]") {
  for (const int world : kWorlds) {
    Problem p = problem(4, 300, 64, DType::bf16, InputKind::peaked);
    p.heads = 6, p.kv_heads = 3, p.batch = 2;
    p.seqused_k = {300, world == 7 ? 0 : 2};  // ranks, or all of them, without keys
    p = on_ranks(p, world);
    p.own["collective"] = {1};
    p.finish();
    INFO(world);
    CHECK(run_step(step_named("p6_tree_decode"), p, Backend::emulated) == "");
  }
  Problem copies = on_ranks(problem(1, 300, 64, DType::bf16), 2);
  copies.own["collective"] = copies.own["transport"] = {1};
  copies.finish();
  CHECK(contains(*refusal(step_named("p6_tree_decode"), copies), "no all-reduce"));
  // The problem stores the word as a number.
  copies.own = {{"transport", {1}}};
  CHECK(*refusal(step_named("v13_even_splits"), copies) ==
        "--transport: this step has no exchange between devices");
}

TEST_CASE("ranks: gradients match the reference for any number of ranks", "[emulated][ranks]") {
  Counts ran;
  std::uint64_t n = 0;
  for (const int world : kWorlds)
    for (const int64_t length : {5, 20, 97}) {
      if (length == 97 && world > 4) continue;  // hundreds of pairs of parts
      Problem p =
          problem(length, length, n % 2 == 0 ? 64 : 128, n % 3 == 0 ? DType::fp16 : DType::bf16);
      p.causal = n % 2 == 0 || length == 5;
      p.heads = 2, p.kv_heads = 1, p.batch = length == 5 && world < 4 ? 2 : 1;
      p.seed = ++n;
      ran += check_steps("backward", on_ranks(p, world), Backend::emulated);
    }
  CHECK(ran.of["p5_ring_backward"] == 16);
}

TEST_CASE("ranks: results have the same bits under any schedule and delivery",
          "[emulated][ranks]") {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "devices") || !step.deterministic) continue;
    Problem p = problem(step.operation->name == "decode" ? 4 : 200, 300, 64, DType::bf16);
    p.heads = 6, p.kv_heads = 3, p.causal = step.name != "p8_paged_shards";
    p = on_ranks(p, 3);
    p.finish();
    choose_schedule(1);
    const HostTensors first = outputs_of(step, p);
    for (const std::uint64_t schedule : {2, 3}) {
      choose_schedule(schedule);
      const HostTensors again = outputs_of(step, p, {.early = schedule == 3});
      for (const auto& [name, t] : again) {
        INFO(step.name << " " << name << ", schedule " << schedule);
        CHECK(same(t, first.at(name)));
      }
    }
  }
}

TEST_CASE("ranks: a second and a third run in the same buffers are right", "[emulated][ranks]") {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "devices")) continue;
    Problem p = problem(step.operation->name == "decode" ? 4 : 200, 200, 64, DType::bf16);
    p.heads = 6, p.kv_heads = 3, p.causal = step.name != "p8_paged_shards";
    p = on_ranks(p, 3);
    p.finish();
    INFO(step.name);
    CHECK(result_of(step, p, {.runs = 3}) == "");
  }
}

TEST_CASE("ranks: a lost message ends in a time-out that names it", "[emulated][ranks]") {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "devices") || step.name == "p7_peer_decode") continue;
    Problem p = problem(step.operation->name == "decode" ? 1 : 100, 100, 64, DType::bf16);
    p.heads = p.kv_heads = 3;
    p = on_ranks(p, 3);
    p.finish();
    const std::string said = result_of(step, p, {.lost = 1});
    INFO(step.name << ": " << said);
    CHECK(contains(said, "time-out of 30 s"));
    CHECK(contains(said, "rank 0"));
    CHECK(contains(said, "bytes"));
    // Of the backward step: the ring of the forward pass before it.
    const bool in_ring =
        !one_of_steps(step, {"p1_all_gather", "p4_ulysses", "p6_tree_decode", "p8_paged_shards"});
    CHECK(contains(said, in_ring ? "in hop 1" : "in all-"));
  }
}

TEST_CASE("ranks: sends before receives without a group end in a time-out", "[emulated][ranks]") {
  for (const char* name : {"p1_all_gather", "p2_ring", "p3_zigzag"}) {
    Problem p = on_ranks(problem(100, 100, 64, DType::bf16), 2);
    p.finish();
    const std::string said = result_of(step_named(name), p, {.ungrouped = true});
    INFO(name << ": " << said);
    CHECK(contains(said, "time-out of 30 s"));
    CHECK(contains(said, " in "));
  }
}

TEST_CASE("ranks: late messages, and a shard that is multiplied twice, are noticed",
          "[emulated][ranks]") {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "devices") || step.name == "p7_peer_decode") continue;
    Problem p = problem(step.operation->name == "decode" ? 1 : 90, 90, 64, DType::bf16);
    p.heads = p.kv_heads = 3;
    p = on_ranks(p, 3);
    p.finish();
    INFO(step.name);
    CHECK(result_of(step, p, {.late = 1}) != "");
    if (step.name == "p2_ring" || step.name == "p3_zigzag")  // a second message, of the same size
      CHECK(contains(result_of(step, p, {.stale = 1}), "o"));
  }
}

TEST_CASE("ranks: refusals say why", "[ranks]") {
  Problem p = problem(100, 100, 64, DType::bf16);
  p.finish();
  CHECK(contains(*refusal(step_named("p2_ring"), p), "--devices"));
  Problem three = on_ranks(p, 3);
  CHECK(contains(*refusal(step_named("p4_ulysses"), three), "multiple of the 3 ranks"));
  three.seqlen_q = 2, three.causal = true, three.batch = 2, three.seqused_k = {100, 3};
  CHECK(contains(*refusal(step_named("p6_tree_decode"), three), "--seqused"));
  three.seqused_k.clear(), three.batch = 1;
  CHECK(contains(*refusal(step_named("p7_peer_decode"), on_ranks(three, 14)), "at most 16"));
  Problem by_nccl = three;
  by_nccl.own["transport"] = {0};
  CHECK(contains(*refusal(step_named("p7_peer_decode"), by_nccl), "write to peers"));
  Problem packed = on_ranks(p, 2);
  packed.varlen_q = packed.varlen_k = {50, 50};
  packed.finish();
  CHECK(contains(*refusal(step_named("p2_ring"), packed), "packed sequences"));
}

TEST_CASE("ranks: the model predicts what its parts say", "[ranks]") {
  Problem p = problem(65536, 65536, 128, DType::bf16);
  p.heads = p.kv_heads = 16, p.causal = true;
  p.finish();
  using rank_model::predict;
  const auto of = [&](const char* step, int world) { return *predict(step, p, world); };
  CHECK(of("p3_zigzag", 8).seconds() < 0.6 * of("p2_ring", 8).seconds());
  CHECK(of("p2_ring", 8).seconds() < of("p1_all_gather", 8).seconds());
  // A slow link shows in full: hops of transfer, and the last hop's computation.
  rank_model::Machine slow;
  slow.small_bytes_per_s = slow.link_bytes_per_s = 1e9;
  const auto hops = *predict("p3_zigzag", p, 4, slow);
  CHECK(hops.seconds() > hops.transfer_s);
  CHECK(hops.seconds() < hops.transfer_s + hops.compute_s);
  CHECK_FALSE(predict("v1_one_block", p, 2).has_value());
  // As measured on two H200s (docs/reports/h200/ranks.05_flash_decoding.txt): p7 pays at 8192 keys,
  // the fewest measured; NCCL's form at 32768, not at 16384.
  Problem decoding = problem(1, 16384, 128, DType::bf16);
  decoding.heads = 32, decoding.kv_heads = 8;
  decoding.finish();
  const int64_t peers = rank_model::pays_from("p7_peer_decode", decoding);
  CHECK((peers > 4096 && peers <= 8192));
  const int64_t tree = rank_model::pays_from("p6_tree_decode", decoding, rank_model::nvlink_nccl());
  CHECK((tree > 16384 && tree < 32768));
  // One long sequence: the first rank has all keys of the short ones.
  decoding.batch = 2, decoding.seqused_k = {16384, 8192};
  CHECK(predict("p6_tree_decode", decoding, 2)->compute_s >
        predict("p8_paged_shards", decoding, 2)->compute_s);
}

TEST_CASE("ranks: processes meet at a file", "[ranks]") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("attn_meeting_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::string file = folder / "id";
  const Invitation sent{std::string("\0id\xff", 4), 3, 22803, "B=1 N=5"};
  const auto fails = [&](int world, int version, double seconds, const std::string& said,
                         const std::string& run = "B=1 N=5") {
    INFO(said);
    CHECK_THROWS_WITH(accept(file, 2, {"", world, version, run}, seconds), ContainsSubstring(said));
  };
  fails(3, 22803, 0.05, "time-out of 0.05 s: rank 2 waits for --nccl-id " + file);
  std::string got;
  std::thread waits([&] { got = accept(file, 1, {"", 3, 22803, "B=1 N=5"}, 20).id; });
  invite(file, sent);
  waits.join();
  CHECK(got == sent.id);
  CHECK_THROWS_WITH(invite(file, sent), ContainsSubstring("of another run"));
  fails(2, 22803, 1, "--world 2: rank 0 of " + file + " has 3");
  fails(3, 21803, 1, "rank 0 has NCCL 22803, rank 2 has 21803");
  fails(3, 22803, 1, "rank 0 computes B=1 N=5, rank 2 B=1 N=6", "B=1 N=6");
  for (const char* text : {"", "another file", "attention ranks 1\nworld 3\nversion 1\nid 0g\n"}) {
    std::ofstream(file) << text;
    fails(3, 22803, 1, "not a file of rank 0");
  }
  CHECK_THROWS_WITH(invite(folder / "none" / "id", sent), ContainsSubstring("cannot be written"));
  std::filesystem::remove_all(folder);
}

TEST_CASE("ranks: options of a rank in a process of its own", "[ranks]") {
  Problem p = on_ranks(problem(64, 64, 64, DType::bf16), 1);
  p.finish();
  const auto with = [&](double rank, double world) {
    Problem q = p;
    q.own["rank"] = {rank}, q.own["world"] = {world}, q.own["nccl_id"] = {1};
    return q;
  };
  const Step& ring = step_named("p2_ring");
  CHECK(refusal(ring, with(1, 2)).value_or("none") == "none");
  CHECK(devices_of(with(1, 3)).size() == 3);
  CHECK(contains(*refusal(ring, with(2, 2)), "--rank 2: must be below --world 2"));
  Problem half = with(0, 2);
  half.own.erase("nccl_id");
  CHECK(contains(*refusal(ring, half), "go together"));
  Problem two = with(0, 2);
  two.own["devices"] = {0, 1};
  CHECK(contains(*refusal(ring, two), "one GPU"));
  Problem copies = with(0, 2);
  copies.own["transport"] = {1};
  CHECK(contains(*refusal(ring, copies), "one process"));
  Problem one = with(0, 2);
  one.seqlen_q = 1;
  CHECK(contains(*refusal(step_named("p7_peer_decode"), one), "its own process"));
}
