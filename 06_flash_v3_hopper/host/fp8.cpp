// The FP8 steps: cost models, refused problems, and the values that each stores, up to the
// neighbouring code of a few numbers (check/quantise.h). A step is checked against attention over
// these.
#include "host/fp8.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attn/rotary.h"
#include "attn/tiling.h"
#include "check/operation.h"
#include "check/quantise.h"
#include "device/device.h"

ATTN_DECLARE_STEP(f1_fp8);
ATTN_DECLARE_STEP(f2_p_scale);
ATTN_DECLARE_STEP(f3_two_level);
ATTN_DECLARE_STEP(f4_block_scales);
ATTN_DECLARE_STEP(f5_incoherent);
ATTN_DECLARE_STEP(f6_smooth_v_chunks);
ATTN_DECLARE_STEP(f7_rotary);
ATTN_DECLARE_STEP(f8_q_in_registers);
ATTN_DECLARE_STEP(tile_counter);

namespace attn {
namespace {

constexpr const char* kQuantised[] = {"q", "k", "v"};
constexpr int64_t kPartials = 256;

// As in quantise_tiles.h.
float random_sign(int column) {
  auto x = static_cast<uint32_t>(column) * 0x9E3779B9u;
  x = (x ^ x >> 15) * 0x85EBCA6Bu;
  return ((x ^ x >> 13) & 1) != 0 ? -1.0f : 1.0f;
}

// One scale per tile of 128 rows of a head.
void round_tiles(HostTensor& t) {
  const int64_t tiles = (t.spec.shape[2] + 127) / 128;
  round_to_codes(t, e4m3_codes(t), [=](int64_t head, int64_t row, int64_t) {
    return head * tiles + row / 128;
  });
}

// Random signs, then the Hadamard matrix.
void rotate_rows(HostTensor& t, std::size_t d) {
  parallel_for(static_cast<int64_t>(t.data.size() / d), [&](int64_t row) {
    float* const x = t.data.data() + static_cast<std::size_t>(row) * d;
    for (std::size_t i = 0; i < d; ++i) x[i] *= random_sign(static_cast<int>(i));
    for (std::size_t apart = 1; apart < d; apart *= 2)
      for (std::size_t i = 0; i < d; ++i)
        if ((i & apart) == 0) {
          const float a = x[i], b = x[i + apart];
          x[i] = a + b, x[i + apart] = a - b;
        }
  });
}

int64_t heads_q(const Problem& p) { return p.batch * p.heads; }
int64_t heads_k(const Problem& p) { return p.batch * p.kv_heads; }
int64_t padded_keys(const Problem& p) { return (p.seqlen_k + 15) / 16 * 16; }
double elements_q(const Problem& p) { return double(heads_q(p) * p.seqlen_q * p.head_dim); }
double elements_k(const Problem& p) { return double(heads_k(p) * p.seqlen_k * p.head_dim); }

// As forward_cost of chapter.cpp, with 1-byte Q, K and V.
Phase attention_phase(const Problem& p, const Tiling& t) {
  const double heads = double(heads_q(p)), d = double(p.head_dim);
  const double q_rows = heads * double(p.seqlen_q), pairs = heads * visits(p, t);
  Phase phase{.name = "attention"};
  phase.exp = pairs * double(t.block_m * t.block_n);
  phase.tensor_flop = 4 * d * phase.exp;
  phase.hbm_read = elements_q(p) + 2 * elements_k(p);
  phase.hbm_write = q_rows * (2 * d + 4);
  phase.l2_bytes = q_rows * (3 * d + 4) + pairs * 2 * double(t.block_n) * d;
  return phase;
}

Cost tensor_scales_cost(const Problem& p, Launch launch) {
  const double all = elements_q(p) + 2 * elements_k(p);
  return {{.name = "scales", .hbm_read = 2 * all},
          {.name = "quantise", .hbm_read = 2 * all, .hbm_write = all},
          attention_phase(p, *tiling_of(launch, p))};
}

std::optional<std::string> refuse(const Problem& p, Launch launch) {
  const int64_t block_m = tiling_of(launch, p)->block_m;
  const int64_t row_tiles = (p.seqlen_q + block_m - 1) / block_m;
  if (heads_q(p) > ((int64_t{1} << 31) - 1) / row_tiles)
    return fmt::format("{} heads of {} tiles of queries: at most 2^31 - 1 blocks fit in a grid",
                       heads_q(p), row_tiles);
  if (p.seqlen_k > 65535 * 128)
    return fmt::format("--seqlen-k {}: V is transposed in a grid of up to 65535 x 128 keys",
                       p.seqlen_k);
  return std::nullopt;
}

std::vector<Workspace> tensor_scales_workspaces(const Problem& p) {
  return {{"tile_counter", 4, true},
          {"q8", heads_q(p) * p.seqlen_q * p.head_dim},
          {"k8", heads_k(p) * p.seqlen_k * p.head_dim},
          {"v8", heads_k(p) * p.head_dim * padded_keys(p)},
          {"partial", 3 * kPartials * 4},
          {"descale", 3 * 4}};
}

int64_t tiles_of(int64_t rows) { return (rows + 127) / 128; }

std::vector<Workspace> tile_scales_workspaces(const Problem& p) {
  std::vector<Workspace> all = tensor_scales_workspaces(p);
  all.resize(all.size() - 2);  // no partial maxima, other scales
  all.push_back({"q_descale", heads_q(p) * tiles_of(p.seqlen_q) * 4});
  all.push_back({"k_descale", heads_k(p) * tiles_of(p.seqlen_k) * 4});
  all.push_back({"v_descale", heads_k(p) * tiles_of(p.seqlen_k) * 4});
  return all;
}

Cost tile_scales_cost(const Problem& p, Launch launch) {
  Cost cost = tensor_scales_cost(p, launch);
  cost.erase(cost.begin());  // one pass
  return cost;
}

// One MMA computes four rounds of the rotation, as a product with a 16 x 16 matrix.
Cost rotated_cost(const Problem& p, Launch launch) {
  Cost cost = tile_scales_cost(p, launch);
  cost.front().tensor_flop = 2 * 16 * (elements_q(p) + elements_k(p));
  return cost;
}

// Workspace of each resident block: O, l and max of the previous chunks, as in
// f6_smooth_v_chunks.cu.
constexpr int64_t kChunkKeys = 4096;
int64_t chunks_of(const Problem& p) { return (p.seqlen_k + kChunkKeys - 1) / kChunkKeys; }
int64_t sums_bytes(const Problem& p) {
  const int64_t rows = p.head_dim == 64 ? 192 : 128, threads = 2 * rows;  // query rows per tile
  const int64_t tiles = heads_q(p) * ((p.seqlen_q + rows - 1) / rows);
  const int64_t sms = gpu_info().available ? gpu_info().num_sms : 132;
  return std::min(tiles, sms) * (p.head_dim / 8 + 1) * threads * 16;
}

std::vector<Workspace> chunks_workspaces(const Problem& p) {
  std::vector<Workspace> all = tile_scales_workspaces(p);
  all.pop_back();  // V has other scales
  all.push_back({"v_chunk", heads_k(p) * chunks_of(p) * p.head_dim * 8});
  all.push_back({"sums", sums_bytes(p)});
  return all;
}
std::vector<Workspace> apart_workspaces(const Problem& p) {
  std::vector<Workspace> all = chunks_workspaces(p);
  if (!has_rotary(p)) return all;
  all.push_back({"q_turned", heads_q(p) * p.seqlen_q * p.head_dim * 2});
  all.push_back({"k_turned", heads_k(p) * p.seqlen_k * p.head_dim * 2});
  return all;
}

// O of all chunks of a tile but the first is written and read once, in L2.
Cost chunks_cost(const Problem& p, Launch launch) {
  const double chunks = heads_k(p) * double(chunks_of(p)) * double(p.head_dim) * 8;
  Cost cost = rotated_cost(p, launch);
  cost.back().l2_bytes +=
      heads_q(p) * double(p.seqlen_q) * double(chunks_of(p) - 1) * (8 * double(p.head_dim) + 32);
  cost.front().hbm_write += chunks;
  return cost;
}

// Rotary embedding in a separate pass, which reads and writes Q and K, or fused into the
// quantisation pass.
Cost rotary_cost(const Problem& p, Launch launch, bool fused) {
  Cost cost = chunks_cost(p, launch);
  if (!has_rotary(p)) return cost;
  const double both = 2 * (elements_q(p) + elements_k(p));
  const double angles = 4 * double(std::max(p.seqlen_q, p.seqlen_k)) * double(p.head_dim);
  if (fused)  // rotates by additions, without the MMA
    cost[0].hbm_read += angles, cost[0].tensor_flop = 0;
  else
    cost.insert(cost.begin(), {.name = "rotary", .hbm_read = both + angles, .hbm_write = both});
  return cost;
}

Step tensor_scales_step(std::string name, std::string idea, Launch launch) {
  return {
      .name = std::move(name),
      .operation = &forward(),
      .idea = std::move(idea),
      .support = "any lengths, masks, GQA",
      .limits = {.head_dims = {64, 128, 256}, .least_scale = kLeastQuantisedScale},
      .refuses = [launch](const Problem& p) { return refuse(p, launch); },
      .workspaces = tensor_scales_workspaces,
      .cost = [launch](const Problem& p) { return tensor_scales_cost(p, launch); },
      .launch = launch,
      .prepare = ATTN_LAUNCH(tile_counter),
      .needs = kHopper,
      .tiled = true,
      .takes = {"e4m3"},
      .logical = in_tensor_scales,
  };
}

Step tile_scales_step(std::string name, std::string idea, Launch launch) {
  Step step = tensor_scales_step(std::move(name), std::move(idea), launch);
  step.workspaces = tile_scales_workspaces;
  step.cost = [launch](const Problem& p) { return tile_scales_cost(p, launch); };
  step.logical = in_tile_scales;
  return step;
}

}  // namespace

HostTensors in_tensor_scales(const Problem&, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : kQuantised) {
    HostTensor& t = stored.at(name);
    round_to_codes(t, e4m3_codes(t), [](int64_t, int64_t, int64_t) { return 0; });
  }
  return stored;
}

HostTensors in_tile_scales(const Problem&, const HostTensors& inputs) {
  HostTensors stored = inputs;
  for (const char* name : kQuantised) round_tiles(stored.at(name));
  return stored;
}

// The rotation without its factor 1 / sqrt(d), which the descales have instead.
HostTensors rotated_in_tile_scales(const Problem& p, const HostTensors& inputs) {
  const auto norm = static_cast<float>(1 / std::sqrt(double(p.head_dim)));
  HostTensors stored = inputs;
  for (const char* name : {"q", "k"})
    rotate_rows(stored.at(name), static_cast<std::size_t>(p.head_dim));
  stored = in_tile_scales(p, stored);
  for (const char* name : {"q", "k"})
    for (float& x : stored.at(name).data) x *= norm;
  return stored;
}

// V minus the mean of a channel of a chunk, in codes with one scale per channel and chunk; Q and K
// as in f5.
HostTensors rotated_in_chunks(const Problem& p, const HostTensors& inputs) {
  HostTensors stored = rotated_in_tile_scales(p, inputs);
  HostTensor& v = stored.at("v") = inputs.at("v");
  const HostTensor means = column_means(v, kChunkKeys);
  add_elements(v, means, -1);
  const int64_t d = p.head_dim, chunks = chunks_of(p);
  round_to_codes(v, e4m3_codes(v), [=](int64_t head, int64_t row, int64_t c) {
    return (head * chunks + row / kChunkKeys) * d + c;
  });
  add_elements(v, means);
  return stored;
}

// Q and K turned by their positions. The separate pass also rounds them to bf16.
static HostTensors with_rotary(const Problem& p, HostTensors inputs, DType stored_in) {
  if (!has_rotary(p)) return inputs;
  const HostTensor table = std::move(inputs.extract("cos_sin").mapped());
  const auto d = static_cast<std::size_t>(p.head_dim), half = d / 2;
  for (const char* name : {"q", "k"}) {
    HostTensor& t = inputs.at(name);
    const int64_t first = *name == 'q' ? rotary_row_of_queries(p) : rotary_row_of_keys(p);
    parallel_for(static_cast<int64_t>(t.data.size() / d), [&](int64_t row) {
      float* const x = t.data.data() + static_cast<std::size_t>(row) * d;
      const float* const angle = table.row(0, 0, first + row % t.spec.shape[2]);
      for (std::size_t c = 0; c < half; ++c) {
        const float a = x[c], b = x[c + half];
        x[c] = a * angle[c] - b * angle[c + half];
        x[c + half] = b * angle[c] + a * angle[c + half];
      }
      round_to(stored_in, x, d);
    });
  }
  return inputs;
}

HostTensors turned_apart(const Problem& p, const HostTensors& inputs) {
  return rotated_in_chunks(p, with_rotary(p, inputs, DType::bf16));
}
HostTensors turned_in_registers(const Problem& p, const HostTensors& inputs) {
  return rotated_in_chunks(p, with_rotary(p, inputs, DType::fp32));
}

// The diagonal of the rotation: Q and K are multiplied by diag(signs) H / sqrt(d).
static HostTensors signs_of_columns(const Problem& p, const ReadWorkspace&) {
  HostTensor signs = zeros({"signs", {1, 1, 1, p.head_dim}, DType::fp32, {}, nullptr, false, 1});
  for (std::size_t c = 0; c < signs.data.size(); ++c)
    signs.data[c] = random_sign(static_cast<int>(c));
  HostTensors choices;
  choices.emplace("signs", std::move(signs));
  return choices;
}

static Step rotated_step(std::string name, std::string idea, Launch launch) {
  Step step = tile_scales_step(std::move(name), std::move(idea), launch);
  step.logical = rotated_in_tile_scales;
  step.cost = [launch](const Problem& p) { return rotated_cost(p, launch); };
  step.choices = signs_of_columns;
  return step;
}

static Step chunks_step(std::string name, std::string idea, Launch launch, bool fused) {
  Step step = tile_scales_step(std::move(name), std::move(idea), launch);
  step.logical = fused ? turned_in_registers : turned_apart;
  step.support += ", rotary embedding";
  step.workspaces = fused ? chunks_workspaces : apart_workspaces;
  step.cost = [launch, fused](const Problem& p) { return rotary_cost(p, launch, fused); };
  step.takes.push_back("rotary");
  step.choices = signs_of_columns;
  return step;
}

std::vector<Step> fp8_steps() {
  return {tensor_scales_step("f1_fp8", "FP8: both GEMMs on e4m3, one scale per tensor",
                             ATTN_LAUNCH(f1_fp8)),
          tensor_scales_step("f2_p_scale", "P scaled by 2^8, key tiles in reverse order",
                             ATTN_LAUNCH(f2_p_scale)),
          tensor_scales_step("f3_two_level",
                             "two-level accumulation: P V of a tile is added to O in fp32",
                             ATTN_LAUNCH(f3_two_level)),
          tile_scales_step("f4_block_scales", "one scale per tile of 128 rows of Q, K and V",
                           ATTN_LAUNCH(f4_block_scales)),
          rotated_step("f5_incoherent",
                       "incoherent processing: Q and K are rotated before quantisation",
                       ATTN_LAUNCH(f5_incoherent)),
          chunks_step("f6_smooth_v_chunks",
                      "smooth V per 4096-key chunk; P V accumulated in the tensor core",
                      ATTN_LAUNCH(f6_smooth_v_chunks), false),
          chunks_step("f7_rotary", "rotary embedding fused into the quantisation pass",
                      ATTN_LAUNCH(f7_rotary), true),
          chunks_step("f8_q_in_registers", "Q in registers at d=128",
                      ATTN_LAUNCH(f8_q_in_registers), true)};
}

}  // namespace attn
