// The block-sparse steps of chapter 08: block masks of any density and shape, combined with other
// masks.
#include <filesystem>
#include <random>

#include "08_quant_sparse/host/sparse_steps.h"
#include "attn/error.h"
#include "files/tensor_files.h"
#include "run/mask_option.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

std::shared_ptr<BlockMask> random_mask(const Problem& p, double density, int64_t block_m,
                                       int64_t block_n, bool own_batch, bool own_heads,
                                       uint64_t seed) {
  const std::vector<int64_t> shape{own_batch ? p.batch : 1, own_heads ? p.heads : 1,
                                   (p.seqlen_q + block_m - 1) / block_m,
                                   (p.seqlen_k + block_n - 1) / block_n};
  std::mt19937_64 random(seed);
  std::vector<bool> open(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  for (std::size_t n = 0; n < open.size(); ++n)
    open[n] = static_cast<double>(random() >> 11) * 0x1p-53 < density;
  return std::make_shared<BlockMask>(block_m, block_n, shape, open);
}

// Problems that combine densities, block sizes and other masks.
template <class Body>
int masked_problems(Body body) {
  constexpr int64_t kLengths[][2] = {{300, 700}, {513, 513}, {128, 1024}, {70, 130}, {900, 400}};
  constexpr int64_t kDims[] = {128, 64, 256}, kBlocks[][2] = {{128, 128}, {256, 128}, {128, 384}};
  constexpr double kDensities[] = {0.3, 0, 1, 0.1, 0.7};
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked};
  int n = 0;
  for (const auto& [queries, keys] : kLengths)
    for (const auto& [block_m, block_n] : kBlocks) {
      Problem p = problem(queries, keys, kDims[n % 3], n % 2 == 0 ? DType::bf16 : DType::fp16,
                          kInputs[n / 2 % 3]);
      p.batch = 1 + n % 2, p.heads = n % 4 == 3 ? 3 : 4, p.kv_heads = n % 4 == 3 ? 1 : 2;
      p.causal = n % 3 == 1;
      if (n % 5 == 2) p.window_left = 200, p.window_right = 30;
      p.seed = static_cast<uint64_t>(n + 1);
      p.mask = random_mask(p, kDensities[n % 5], block_m, block_n, n % 4 == 1, n % 3 != 0, p.seed);
      p.finish();
      body(p);
      ++n;
    }
  return n;
}

// FlashMask's kinds, each at two lengths.
template <class Body>
int flashmask_problems(Body body) {
  struct Kind {
    const char* name;
    bool causal;
  };
  constexpr Kind kKinds[] = {
      {"causal", true},           {"sliding_window", true},    {"causal_document", true},
      {"document", false},        {"share_question", true},    {"global_sliding_window", false},
      {"causal_blockwise", true}, {"prefix_lm_causal", false}, {"prefix_lm_document", false},
      {"qk_sparse", true},        {"hash_sparse", true},       {"random_eviction", true}};
  int n = 0;
  for (const auto& [name, causal] : kKinds)
    for (const int64_t length : {300, 900, 1024}) {  // qk_sparse hides whole tiles of 1024
      Problem p = problem(length, length,
                          n % 5 == 4   ? 256
                          : n % 2 == 0 ? 128
                                       : 64,
                          n % 3 == 0 ? DType::fp16 : DType::bf16,
                          n % 2 == 0 ? InputKind::needle : InputKind::random);
      p.heads = 2, p.kv_heads = 1, p.causal = causal;
      p.seed = static_cast<uint64_t>(++n);
      p.finish();
      p.mask = read_mask(std::string("flashmask:") + name, p);
      body(p);
    }
  return n;
}

}  // namespace

TEST_CASE("block-sparse steps match the reference for any block mask", "[emulated]") {
  Counts ran;
  const int problems = masked_problems(
      [&](const Problem& p) { ran += check_steps("forward", p, Backend::emulated); });
  CHECK(ran.of == std::map<std::string, int>{{"s1_block_mask", problems}});
}
TEST_CASE("block-sparse steps match the reference for FlashMask's twelve masks", "[emulated]") {
  Counts ran;
  const int problems = flashmask_problems(
      [&](const Problem& p) { ran += check_steps("forward", p, Backend::emulated); });
  CHECK(problems == 36);
  CHECK(ran.of == std::map<std::string, int>{{"s2_flashmask", problems}});
}
TEST_CASE("FlashMask's masks on the GPU", "[gpu]") {
  flashmask_problems([&](const Problem& p) { check_steps("forward", p, Backend::gpu); });
}

// The same rows hidden by two intervals that meet inside a tile: that tile is then visited, with a
// mask. So skipping a tile changes no bit.
TEST_CASE("skipping blocks changes no bit", "[emulated]") {
  std::mt19937_64 random(7);
  for (const int64_t d : {64, 128}) {
    Problem p = problem(700, 700, d, DType::bf16, InputKind::peaked);
    p.heads = 2, p.kv_heads = 1, p.causal = true;
    std::vector<int64_t> begin, end, middle;
    for (int64_t j = 0; j < 700; ++j) {
      begin.push_back(std::min<int64_t>(700, j + 1 + static_cast<int64_t>(random() % 300)));
      end.push_back(700);
      middle.push_back((begin.back() + 700) / 2);
    }
    std::vector<int64_t> begins = begin, ends = middle;
    begins.insert(begins.end(), middle.begin(), middle.end());
    ends.insert(ends.end(), end.begin(), end.end());
    HostTensors whole, halves;
    p.mask = std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 1, 1, 700}, begin, end);
    p.finish();
    const double tiles = visited_tiles(p);
    CHECK(run_step(step_named("s2_flashmask"), p, Backend::emulated, &whole) == "");
    p.mask = std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 1, 2, 700}, begins, ends);
    CHECK(visited_tiles(p) > tiles);
    CHECK(run_step(step_named("s2_flashmask"), p, Backend::emulated, &halves) == "");
    CHECK(same(whole.at("o"), halves.at("o")));
    CHECK(same(whole.at("lse"), halves.at("lse")));
  }
}

TEST_CASE("column intervals per head and sequence", "[emulated]") {
  for (const bool own_batch : {false, true})
    for (const bool own_heads : {false, true}) {
      Problem p = problem(200, 300, 64, DType::fp16, InputKind::needle);
      p.batch = 2, p.heads = 4, p.kv_heads = 2;
      const std::vector<int64_t> shape{own_batch ? 2 : 1, own_heads ? 4 : 1, 2, 300};
      std::vector<int64_t> begin, end;
      for (int64_t n = 0; n < shape[0] * shape[1] * 600; ++n) {
        begin.push_back(n * 37 % 150);
        end.push_back(n % 5 == 0 ? begin.back() : std::min<int64_t>(200, begin.back() + n % 97));
      }
      p.mask = std::make_shared<ColumnIntervals>(shape, begin, end);
      p.finish();
      CHECK(run_step(step_named("s2_flashmask"), p, Backend::emulated) == "");
    }
}
TEST_CASE("block-sparse steps on the GPU", "[gpu]") {
  masked_problems([&](const Problem& p) { check_steps("forward", p, Backend::gpu); });
}

TEST_CASE("without a block mask every block is visited", "[emulated]") {
  for (const bool causal : {false, true}) {
    Problem p = problem(300, 420, 128, DType::bf16, InputKind::needle);
    p.heads = 2, p.kv_heads = 1, p.causal = causal;
    p.finish();
    CHECK(run_step(step_named("s1_block_mask"), p, Backend::emulated) == "");
  }
}

TEST_CASE("a needle in the first, the last or the only block of a row is found", "[emulated]") {
  for (const int64_t only : {0, 2, 5}) {
    Problem p = problem(128, 768, 64, DType::bf16, InputKind::needle);
    std::vector<bool> open(6);
    open[static_cast<std::size_t>(only)] = true;
    p.mask = std::make_shared<BlockMask>(128, 128, std::vector<int64_t>{1, 1, 1, 6}, open);
    p.finish();
    CHECK(run_step(step_named("s1_block_mask"), p, Backend::emulated) == "");
  }
}

TEST_CASE("an empty block list gives O = 0 and lse = -inf", "[emulated]") {
  Problem p = problem(300, 300, 128, DType::bf16);
  p.heads = 2;
  std::vector<bool> open(18, true);
  for (std::size_t n = 3; n < 6; ++n) open[n] = false;  // the second tile of head 0
  p.mask = std::make_shared<BlockMask>(128, 128, std::vector<int64_t>{1, 2, 3, 3}, open);
  p.finish();
  HostTensors out;
  CHECK(run_step(step_named("s1_block_mask"), p, Backend::emulated, &out) == "");
  for (int64_t i = 0; i < 300; ++i) {
    const bool empty = i / 128 == 1;
    const float lse = out.at("lse").data[static_cast<std::size_t>(i)];
    CHECK((std::isinf(lse) && lse < 0) == empty);
    for (int64_t c = 0; empty && c < 128; ++c)
      CHECK(out.at("o").data[static_cast<std::size_t>(i * 128 + c)] == 0);
  }
}

TEST_CASE("lists have each visible block once and masked blocks last", "[emulated]") {
  masked_problems([&](const Problem& p) {
    const HostTensors lists = step_named("s1_block_mask").plan(p, {});
    const std::vector<int64_t>&visits = lists.at("visits").numbers,
          &visited = lists.at("visited").numbers;
    const ListStrides strides = list_strides(p);
    const int64_t tiles = (p.seqlen_q + kSparseBlockM - 1) / kSparseBlockM;
    const int64_t block_n = sparse_block_n(p.head_dim);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t m = 0; m < tiles; ++m) {
          const auto list =
              static_cast<std::size_t>(3 * (b * strides.batch + h * strides.head + m));
          std::vector<int> unmasked(static_cast<std::size_t>(p.seqlen_k)), seen = unmasked;
          for (int64_t n = visits[list]; n < visits[list + 2]; ++n)
            for (int64_t j = visited[static_cast<std::size_t>(n)] * block_n, end = j + block_n;
                 j < std::min(end, p.seqlen_k); ++j) {
              ++seen[static_cast<std::size_t>(j)];
              unmasked[static_cast<std::size_t>(j)] += n < visits[list + 1];
            }
          const Problem one = p.sequence(b);
          std::vector<int> must(static_cast<std::size_t>(p.seqlen_k));
          const int64_t last = std::min(p.seqlen_q, (m + 1) * kSparseBlockM);
          for (int64_t i = m * kSparseBlockM; i < last; ++i)
            one.for_each_range(h, i, [&](KeyRange run) {
              for (int64_t j = run.begin; j < run.end; ++j) ++must[static_cast<std::size_t>(j)];
            });
          int wrong = 0;
          for (std::size_t j = 0; j < must.size(); ++j)
            wrong += seen[j] > 1 || (must[j] > 0 && seen[j] != 1) ||
                     (unmasked[j] > 0 && must[j] != last - m * kSparseBlockM);
          INFO(p.text() << ": head " << h << ", tile " << m);
          CHECK(wrong == 0);
        }
  });
}

TEST_CASE("unsupported masks are refused", "[emulated]") {
  Problem p = problem(256, 256, 64, DType::bf16);
  p.mask = std::make_shared<BlockMask>(64, 64, std::vector<int64_t>{1, 1, 4, 4},
                                       std::vector<bool>(16, true));
  p.finish();
  CHECK(refusal(step_named("s1_block_mask"), p).value_or("") ==
        "blocks of 64 x 64: must be multiples of 128 queries and 128 keys");
  CHECK(refusal(step_named("s2_flashmask"), p).value_or("") ==
        "this step needs a mask of column intervals");
  p.mask = read_mask("flashmask:document", p);
  CHECK(refusal(step_named("s1_block_mask"), p).value_or("") ==
        "this step takes no masks other than block masks");
  CHECK(refusal(step_named("s2_flashmask"), p).value_or("") == "");
}

namespace {

// Canvases with windows in the middle, at the edges, and as large as the canvas; with text or
// without.
template <class Body>
int canvas_problems(Body body) {
  struct Canvas {
    Sides canvas, tile;
    std::vector<Sides> windows;
    int64_t text, d;
  };
  const Canvas canvases[] = {{{10, 8, 24}, {2, 8, 8}, {{6, 8, 8}, {2, 8, 24}, {10, 8, 8}}, 0, 64},
                             {{2, 24, 24}, {2, 8, 8}, {{2, 8, 24}, {2, 24, 8}, {2, 8, 8}}, 70, 128},
                             {{4, 16, 8}, {2, 8, 8}, {{4, 16, 8}, {2, 8, 8}, {2, 16, 8}}, 200, 256},
                             {{6, 8, 24}, {6, 8, 8}, {{6, 8, 8}, {6, 8, 24}, {6, 8, 8}}, 384, 64}};
  int n = 0;
  for (const auto& [canvas, tile, windows, text, d] : canvases) {
    const int64_t length = canvas[0] * canvas[1] * canvas[2] + text;
    Problem p = problem(length, length, d, n % 2 == 0 ? DType::bf16 : DType::fp16,
                        n % 2 == 0 ? InputKind::needle : InputKind::random);
    p.heads = 3, p.kv_heads = 1, p.batch = n == 1 ? 2 : 1;
    p.mask = std::make_shared<SlidingTiles>(canvas, tile, windows, text);
    p.seed = static_cast<uint64_t>(++n);
    p.finish();
    body(p);
  }
  return n;
}

}  // namespace

TEST_CASE("sliding tile windows match the reference at edges and next to text", "[emulated]") {
  Counts ran;
  const int problems = canvas_problems(
      [&](const Problem& p) { ran += check_steps("forward", p, Backend::emulated); });
  CHECK(ran.of ==
        std::map<std::string, int>{{"s1_block_mask", problems}, {"s3_sliding_tile", problems}});
}
TEST_CASE("sliding tile windows on the GPU", "[gpu]") {
  canvas_problems([&](const Problem& p) { check_steps("forward", p, Backend::gpu); });
}

// Token by token, as the paper defines it: along each side the window is that of the tile's centre,
// moved inside the canvas.
TEST_CASE("the keys of a sliding tile window are those of the paper", "[emulated]") {
  const SlidingTiles mask({6, 16, 40}, {2, 8, 8}, {{2, 8, 24}, {6, 16, 40}}, 100);
  const auto seen = [&](int64_t h, int64_t i) {
    std::vector<int64_t> keys;
    mask.for_each_range(0, h, i, {0, 3940}, [&](KeyRange run) {
      for (int64_t j = run.begin; j < run.end; ++j) keys.push_back(j);
    });
    return keys;
  };
  const auto tokens = [](std::vector<int64_t> tiles) {
    std::vector<int64_t> keys;
    for (const int64_t tile : tiles)
      for (int64_t j = 0; j < 128; ++j) keys.push_back(128 * tile + j);
    for (int64_t j = 3840; j < 3940; ++j) keys.push_back(j);
    return keys;
  };
  // Tiles of 3 x 2 x 5. For head 0, three in a row: in the middle, and at both ends.
  CHECK(seen(0, 128 * 12) == tokens({11, 12, 13}));
  CHECK(seen(0, 128 * 10 + 5) == tokens({10, 11, 12}));
  CHECK(seen(0, 128 * 29 + 127) == tokens({27, 28, 29}));
  CHECK(seen(0, 3850).size() == 3940);  // text
  CHECK(seen(1, 7).size() == 3940);
}

TEST_CASE("invalid sliding tile windows are refused", "[emulated]") {
  const auto said = [](const std::string& text, int64_t length, bool causal = false) {
    Problem p = problem(length, length, 64, DType::bf16);
    p.heads = 2, p.causal = causal;
    p.finish();
    try {
      p.mask = read_mask(text, p);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return refusal(step_named("s3_sliding_tile"), p).value_or("");
  };
  CHECK(said("sta:2x8x24,2x8x8,2x8x8", 384) == "");
  CHECK(said("sta:2x8x24,2x8x8,2x8x16", 384).find("must have an odd number of tiles") !=
        std::string::npos);
  CHECK(said("sta:2x8x20,2x8x8,2x8x8", 384)
            .find("a canvas of 2x8x20: must be a multiple of tiles of 2x8x8") != std::string::npos);
  CHECK(said("sta:2x8x24,2x8x8", 384).find("must be sta:CANVAS,TILE,WINDOW") != std::string::npos);
  CHECK(said("sta:2x8x24,2x8x8,2x8x8", 300).find("the canvas of 384 tokens") != std::string::npos);
  CHECK(said("sta:2x8x24,2x4x8,2x4x8", 384) ==
        "blocks of 64 x 64: must be multiples of 128 queries and 128 keys");
  CHECK(said("sta:2x8x24,2x8x8,2x8x8", 384, true) ==
        "this step has no causal mask and no window but sliding tile windows");
  CHECK(said("sta:2x8x24,2x8x8,2x8x8,2x8x24,2x8x8", 384)
            .find("3 windows and 2 heads: at most one per head") != std::string::npos);
  CHECK(said("sat:2x8x24,2x8x8", 384).find("or sta:CANVAS,TILE,WINDOW") != std::string::npos);
}

// The printed option can be passed again, and gives the same mask.
TEST_CASE("the name of a mask lists all its windows", "[sparse]") {
  Problem p = problem(640, 640, 64, DType::bf16);
  p.heads = 2;
  p.finish();
  for (const char* text : {"sta:2x8x40,2x8x8,2x8x24,2x8x8", "sta:2x8x40,2x8x8,2x8x24"})
    CHECK(read_mask(text, p)->text() == text);
  CHECK(read_mask("sta:2x8x40,2x8x8,2x8x24,2x8x24", p)->text() == "sta:2x8x40,2x8x8,2x8x24");
  p.heads = p.kv_heads = 4;  // two windows again
  CHECK(read_mask("sta:2x8x40,2x8x8,2x8x24,2x8x8", p)->text() ==
        "sta:2x8x40,2x8x8,2x8x24,2x8x8,2x8x24,2x8x8");
}

// User intervals, per head: from a folder, or with the tensors of --load. The run compares with a
// reference that hides the same rows; a NaN of the mask alone would not show.
TEST_CASE("user-supplied hidden_begin and hidden_end are the mask", "[emulated]") {
  const std::string folder = "own_intervals";
  std::filesystem::remove_all(folder);
  Problem p = problem(200, 200, 64, DType::bf16);
  p.heads = 2, p.kv_heads = 1;
  p.finish();
  TensorSpec spec{"hidden_begin", {1, 2, 1, 200}, DType::int32};
  HostTensor begin = zeros(spec), end = zeros(spec);
  end.spec.name = "hidden_end";
  for (std::size_t i = 0; i < begin.numbers.size(); ++i) {
    const auto head = static_cast<int64_t>(i) / 200, j = static_cast<int64_t>(i) % 200;
    begin.numbers[i] = head == 0 ? j / 2 : 0, end.numbers[i] = head == 0 ? j / 2 + 30 : j % 7;
  }
  save_tensors(folder, {{"hidden_begin", begin}, {"hidden_end", end}});
  for (const std::string& text : {"flashmask:" + folder, std::string("flashmask:causal")}) {
    const auto mask = read_mask(text, p, text.ends_with("causal") ? folder : "");
    const std::vector<HostTensor> tensors = mask->tensors();
    CHECK(tensors.at(0).numbers == begin.numbers);
    CHECK(tensors.at(1).numbers == end.numbers);
  }
  const char* const words[] = {"08_quant_sparse",
                               "--device",
                               "emulated",
                               "--step",
                               "s2",
                               "--heads",
                               "2",
                               "--kv-heads",
                               "1",
                               "--seqlen",
                               "200",
                               "--mask",
                               "flashmask:own_intervals",
                               "--check",
                               "full"};
  CHECK(run_chapter(chapter(), static_cast<int>(std::size(words)), words) == 0);
  const auto why = [&](const std::string& text, const std::string& load = "") -> std::string {
    try {
      read_mask(text, p, load);
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  std::filesystem::remove(folder + "/hidden_begin.npy");
  CHECK(why("flashmask:" + folder).find("hidden_begin.npy: no such file") != std::string::npos);
  CHECK(why("flashmask:causal", folder).find("hidden_begin.npy: no such file") !=
        std::string::npos);
  CHECK(why("flashmask:").find("or a folder with hidden_begin.npy") != std::string::npos);
  std::filesystem::remove_all(folder);
}
