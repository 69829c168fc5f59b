// Prefill of chapter 07: ragged queries against pages, whole prompts and chunks of them.
#include <filesystem>

#include "07_paged/host/paged.h"
#include "attn/error.h"
#include "files/tensor_files.h"
#include "tests/test_pages.h"

using namespace attn;
using namespace attn::tests;

namespace {

constexpr int64_t kPageSizes[] = {1, 5, 16, 64, 256};
constexpr int64_t kDims[] = {128, 64, 256};
constexpr int64_t kHeads[][2] = {{1, 1}, {3, 1}, {4, 2}, {2, 2}, {8, 1}};

Problem pages_of(int64_t page, std::size_t n) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier};
  Problem p = problem(1, 1, kDims[n % 3], n % 2 == 0 ? DType::bf16 : DType::fp16, kInputs[n % 4]);
  p.own["page_size"] = {static_cast<double>(page)};
  p.heads = kHeads[n % 5][0], p.kv_heads = kHeads[n % 5][1];
  p.seed = n + 1;
  return p;
}

// Queries and keys per sequence: prompts, chunks after cached tokens, single tokens, more queries
// than keys, none.
using Lengths = std::vector<std::pair<int64_t, int64_t>>;
const std::vector<Lengths> kBatches{
    {{1, 1}, {64, 64}, {17, 300}},
    {{0, 5}, {130, 130}, {5, 0}, {1, 200}},
    {{129, 129}, {63, 65}, {200, 100}},
    {{33, 257}, {0, 0}, {128, 256}, {16, 16}},
    {{127, 383}},
};

void ragged(Backend backend, const std::vector<Lengths>& batches) {
  Counts ran;
  std::size_t n = 0;
  int problems = 0, in_boxes = 0;  // TMA boxes: at least 8 rows of a page
  for (const Lengths& lengths : batches)
    for (const int64_t page : kPageSizes)
      for (int mask = 0; mask < 3; ++mask, ++n) {
        if (backend == Backend::emulated && n % 2 == 1) continue;
        Problem p = pages_of(page, n);
        for (const auto& [queries, keys] : lengths) {
          p.varlen_q.push_back(queries);
          p.varlen_k.push_back(keys);
        }
        p.causal = mask == 1;
        if (mask == 2) p.window_left = static_cast<int64_t>(n * 37 % 150), p.window_right = 3;
        ran += check_steps("paged_prefill", p, backend);
        ++problems, in_boxes += page % 8 == 0 ? 1 : 0;
      }
  for (const Step& step : chapter().steps)
    if (step.operation == &paged_prefill())
      CHECK(ran.of[step.name] == (step.name == "v15_prefill_tma" ? in_boxes : problems));
}

bool is_in_boxes(const Step& step, int) { return step.name == "v15_prefill_tma"; }

// Tiles of v15_prefill_tma with every kind of end: boxes of 8 to 128 rows; the end before, at and
// past a page end; chunks, more queries than keys, sequences without queries or keys.
void boxes(Backend backend) {
  Counts ran;
  int problems = 0;
  std::size_t n = 0;
  for (const int64_t page : {8, 16, 24, 64, 256})
    for (const int64_t pages : {1, page == 256 ? 2 : 5})
      for (const int64_t more : {-1, 0, 1}) {
        constexpr int64_t kGroups[] = {1, 3, 7, 8};
        Problem p = pages_of(page, n);
        p.head_dim = kDims[n / 2 % 3];
        p.kv_heads = page == 256 ? 1 : 2, p.heads = p.kv_heads * kGroups[n % 4];
        const int64_t keys = page * pages + more;
        p.varlen_q = {70, 0, 3, keys, 20}, p.varlen_k = {keys, 5, 0, keys, 131};
        if (n % 3 == 1) p.causal = true;
        if (n % 3 == 2) p.window_left = keys / 2, p.window_right = 3;
        ran += check_steps("paged_prefill", p, backend, is_in_boxes);
        ++problems, ++n;
      }
  CHECK(ran.of == std::map<std::string, int>{{"v15_prefill_tma", problems}});
}

}  // namespace

TEST_CASE("prompts and chunks attend to their pages", "[emulated]") {
  ragged(Backend::emulated, kBatches);
}
TEST_CASE("prompts and chunks attend to their pages on the GPU", "[gpu]") {
  std::vector<Lengths> batches = kBatches;
  batches.push_back({{4096, 4096}, {1, 32789}, {512, 20000}});
  ragged(Backend::gpu, batches);
}

TEST_CASE("a tile may end anywhere in a TMA box", "[emulated]") { boxes(Backend::emulated); }
TEST_CASE("a tile may end anywhere in a TMA box on the GPU", "[gpu]") { boxes(Backend::gpu); }

TEST_CASE("page sizes that are multiples of 8 give bitwise equal results", "[emulated]") {
  for (const Step& step : chapter().steps) {
    if (!is_in_boxes(step, 0)) continue;
    HostTensors first_in, first_out;
    for (const int64_t page : {8, 24, 16, 64, 256}) {
      Problem p = pages_of(page, 0);
      p.heads = 4, p.kv_heads = 2, p.causal = true;
      p.varlen_q = {150, 5}, p.varlen_k = {301, 70};
      p.finish();
      HostTensors in = draw(paged_prefill(), p).tensors;
      if (page == 8) first_in = in;
      in.at("q") = first_in.at("q");
      for (const char* name : {"k", "v"}) {  // moves a key with its values to its new slot
        HostTensor& t = in.at(name);
        const int64_t d = p.head_dim;
        for (int64_t b = 0; b < p.batch; ++b)
          for (int64_t h = 0; h < p.kv_heads; ++h)
            for (int64_t j = 0; j < p.sequence(b).seqlen_k; ++j)
              std::copy_n(first_in.at(name).row(b, h, j), d,
                          t.data.begin() + t.spec.row(b, h, j) * d);
      }
      const HostTensors out = outputs_of(step, p, in);
      if (page == 8) first_out = out;
      INFO(p.text());
      for (const auto& [name, t] : out) CHECK(same(t, first_out.at(name)));
    }
  }
}

TEST_CASE("a page size that is not a multiple of 8 is refused", "[emulated]") {
  for (const Step& step : chapter().steps)
    if (is_in_boxes(step, 0))
      for (const int64_t page : {1, 5, 12}) {
        Problem p = pages_of(page, 0);
        p.finish();
        CHECK(refusal(step, p) ==
              "--page-size " + std::to_string(page) +
                  ": must be a multiple of 8: a TMA box holds whole swizzle atoms");
      }
}

namespace {
// Compulsory bytes are those of valid tokens, whatever the pool's size.
TEST_CASE("the prefill cost counts valid tokens and shared ones once", "[emulated]") {
  Problem p = pages_of(16, 0);
  p.varlen_q = {70, 3}, p.varlen_k = {200, 100};
  p.finish();
  const double token = double(p.kv_heads * p.head_dim * 2),
               q = double(73 * p.heads * p.head_dim * 2);
  const double lists = 4 * (3 + 2 * 13 + 2), lse = double(73 * p.heads * 4);
  const double all = 2 * q + lse + lists;
  CHECK(paged_prefill().compulsory_bytes(p) == all + 2 * 300 * token);
  p.own["num_pages"] = {1000};
  CHECK(paged_prefill().compulsory_bytes(p) == all + 2 * 300 * token);
  p.own["shared_prefix"] = {100, 2};  // whole pages: 96 tokens
  CHECK(paged_prefill().compulsory_bytes(p) == all + 2 * (300 - 96) * token);
  p.inputs = InputKind::files;  // the page table is not known yet
  CHECK(paged_prefill().compulsory_bytes(p) == all + 2 * 300 * token);
}

// Trees of several sizes after caches of several lengths, at any offset in a key block.
void trees(Backend backend) {
  Counts ran;
  int problems = 0;
  std::size_t n = 0;
  const std::vector<Lengths> batches{{{1, 1}, {16, 300}, {64, 64}},
                                     {{33, 257}, {0, 5}, {64, 1000}},
                                     {{130, 350}, {5, 131}},
                                     {{31, 127}, {32, 128}, {63, 129}}};
  for (const Lengths& lengths : batches)
    for (const int64_t page : {5, 16})
      for (int mask = 0; mask < 3; ++mask, ++n) {
        Problem p = pages_of(page, n);
        for (const auto& [queries, keys] : lengths) {
          p.varlen_q.push_back(queries);
          p.varlen_k.push_back(keys);
        }
        p.own["tree"] = {1};
        p.causal = mask == 1;
        if (mask == 2) p.window_left = 40, p.window_right = 3;
        ran += check_steps("paged_prefill", p, backend);
        ++problems;
      }
  Problem p = pages_of(16, n);
  p.batch = 3, p.seqlen_q = 40, p.seqlen_k = 200, p.seqused_k = {40, 111, 200};
  p.own["tree"] = {1};
  ran += check_steps("paged_prefill", p, backend);
  CHECK(ran.of == std::map<std::string, int>{{"v9_tree_mask", problems + 1}});
}
}  // namespace
TEST_CASE("a token of a tree attends to its ancestors", "[emulated]") { trees(Backend::emulated); }
TEST_CASE("a token of a tree attends to its ancestors on the GPU", "[gpu]") { trees(Backend::gpu); }

// A chain is bitwise equal to a causal mask.
TEST_CASE("a tree that is a chain is causal", "[emulated]") {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "tree")) continue;
    Problem p = pages_of(16, 1);  // its inputs do not depend on the mask
    p.varlen_q = {70, 3}, p.varlen_k = {200, 3}, p.own["tree"] = {1};
    p.finish();
    HostTensors inputs = draw(paged_prefill(), p).tensors;
    for (std::size_t at = 0; at < inputs.at("tree_mask").numbers.size(); ++at) {
      const auto query = static_cast<int64_t>(at / 3), word = static_cast<int64_t>(at % 3);
      const int64_t i = query < 70 ? query : query - 70;
      const int64_t below = std::clamp<int64_t>(i + 1 - 32 * word, 0, 32);
      inputs.at("tree_mask").numbers[at] = static_cast<int32_t>((int64_t{1} << below) - 1);
    }
    Session tree(p, paged_prefill(), Backend::emulated, inputs);
    REQUIRE(tree.prepare(step).ok());
    REQUIRE(tree.launch().ok());
    p.own.erase("tree"), p.causal = true;
    HostTensors causal;
    CHECK(run_step(step, p, Backend::emulated, &causal) == "");
    for (const auto& [name, t] : tree.outputs()) CHECK(same(t, causal.at(name)));
  }
}

TEST_CASE("a tree that does not follow its cache is refused", "[emulated]") {
  Problem p = pages_of(16, 0);
  p.varlen_q = {70, 3}, p.varlen_k = {200, 2}, p.own["tree"] = {1};
  p.finish();
  for (const Step& step : chapter().steps)
    if (takes(step, "tree"))
      CHECK(refusal(step, p) == "--tree: sequence 1 has 2 keys, fewer than its 3 tokens");
}

TEST_CASE("prefill of equal lengths", "[emulated]") {
  for (const int64_t page : {5, 64}) {
    Problem p = pages_of(page, 1);
    p.batch = 2, p.seqlen_q = 70, p.seqlen_k = 150, p.causal = true;
    p.seqused_k = {150, 37};
    check_steps("paged_prefill", p, Backend::emulated);
  }
}

// A prompt in one piece and in chunks is bitwise equal if chunks start at tile boundaries.
TEST_CASE("chunked prefill is bitwise equal to a whole prompt", "[emulated]") {
  for (const Step& step : chapter().steps) {
    if (step.operation != &paged_prefill()) continue;
    Problem whole = pages_of(16, 0);
    whole.heads = whole.kv_heads = 1, whole.causal = true;
    whole.varlen_q = {300}, whole.varlen_k = {300};
    whole.finish();
    HostTensors all;
    INFO(step.name);
    CHECK(run_step(step, whole, Backend::emulated, &all) == "");
    const HostTensors in = draw(paged_prefill(), whole).tensors;
    for (int64_t first = 0; first < 300; first += 128) {
      Problem chunk = whole;
      chunk.varlen_q = {std::min<int64_t>(128, 300 - first)};
      chunk.varlen_k = {first + chunk.varlen_q[0]};
      chunk.own["num_pages"] = {static_cast<double>(num_pages_of(whole))};
      chunk.finish();
      HostTensors inputs = in;
      const auto begin = in.at("q").data.begin() + first * chunk.head_dim;
      inputs.at("q").data.assign(begin, begin + chunk.varlen_q[0] * chunk.head_dim);
      const auto pages = static_cast<std::size_t>((chunk.varlen_k[0] + 15) / 16);
      inputs.at("page_table").numbers.resize(pages);
      inputs.at("seqused_k").numbers = chunk.varlen_k;
      inputs.at("cu_seqlens_q").numbers = {0, chunk.varlen_q[0]};
      const HostTensors out = outputs_of(step, chunk, inputs);
      for (const auto& [name, t] : out)
        for (std::size_t i = 0; i < t.data.size(); ++i) {
          const auto at = static_cast<std::size_t>(first * t.spec.columns()) + i;
          REQUIRE(t.data[i] == all.at(name).data[at]);
        }
    }
  }
}

namespace {
// A captured launch is correct with other values in other pages, and with the counters that the
// previous launch left.
void prefill_again(Backend backend) {
  for (const Step& step : chapter().steps) {
    if (step.operation != &paged_prefill()) continue;
    for (const int64_t d : kDims) {
      Problem p = pages_of(16, 1);
      p.head_dim = d, p.heads = 4, p.kv_heads = 2, p.causal = true;
      p.varlen_q = {200, 0, 1, 130}, p.varlen_k = {300, 9, 70, 130};
      p.own["num_pages"] = {60}, p.own["blocks"] = {3};
      p.finish();
      Session session(p, paged_prefill(), backend, draw(paged_prefill(), p).tensors);
      INFO(step.name << " d=" << d);
      REQUIRE(session.prepare(step).ok());
      REQUIRE(session.capture().ok());
      for (int n = 0; n < 3; ++n, ++p.seed) {
        check_replay(session, step, p, backend, 500 + static_cast<uint64_t>(n));
      }
    }
  }
}
}  // namespace
TEST_CASE("replayed prefill is correct with other pages", "[emulated]") {
  prefill_again(Backend::emulated);
}
TEST_CASE("replayed prefill is correct with other pages on the GPU", "[gpu]") {
  prefill_again(Backend::gpu);
}

TEST_CASE("a ragged batch is loaded from files", "[emulated]") {
  const std::string folder = "ragged_files";
  std::filesystem::remove_all(folder);
  Problem p = pages_of(5, 3);
  p.varlen_q = {7, 0, 12}, p.varlen_k = {17, 3, 12};
  p.finish();
  HostTensors in = draw(paged_prefill(), p).tensors;
  save_tensors(folder, in);
  const auto loaded = [&] {
    Problem q;
    q.dtype = p.dtype, q.inputs = InputKind::files;
    paged_prefill().sizes_of_files(folder, q);
    q.finish();
    return q;
  };
  const Problem same_problem = loaded();
  CHECK(same_problem.varlen_q == p.varlen_q);
  CHECK(same_problem.varlen_k == p.varlen_k);
  const HostTensors again = load_inputs(folder, same_problem, paged_prefill()).tensors;
  for (const char* name : {"q", "page_table", "seqused_k", "cu_seqlens_q"})
    CHECK(same(again.at(name), in.at(name)));
  in.at("cu_seqlens_q").numbers.back() = 20;
  save_tensors(folder, in);
  CHECK_THROWS_WITH(loaded(),
                    folder + ": cu_seqlens_q.npy must rise from 0 to 19, the tokens of q.npy");
  std::filesystem::remove_all(folder);
}
