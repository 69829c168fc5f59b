// Launch inputs besides read-only ones: tensors that are partly modified, and a host-side plan. And
// inputs stored in fewer bits than they were drawn in.
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attn/mask.h"
#include "attn/small_types.h"
#include "report/table_kinds.h"
#include "run/results.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

std::vector<Workspace> no_workspaces(const Problem&) { return {}; }
Step host_step(const Operation& op, LaunchFunction launch) {
  return {.name = "v1_host",
          .operation = &op,
          .idea = "",
          .support = "",
          .refuses = [](const Problem&) { return std::nullopt; },
          .workspaces = no_workspaces,
          .cost = [](const Problem&) { return Cost{{.name = "all", .hbm_read = 1}}; },
          .launch = {nullptr, launch},
          .takes = {"seqused"}};
}

// ---- in and out -------------------------------------------------------------------------------

enum class Wrong { nothing, no_write, neighbour, old_value, shared_row };
Wrong wrong = Wrong::nothing;

// The row after the used rows of each sequence.
std::vector<int64_t> appended_rows(const Problem& p, const HostTensors&, const std::string&) {
  std::vector<int64_t> rows;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.kv_heads; ++h)
      rows.push_back((b * p.kv_heads + h) * p.seqlen_k + p.seqused_k[static_cast<std::size_t>(b)]);
  return rows;
}

// Copies `fresh` [B, Hkv, 1, d] to row seqused_k of each head of cache [B, Hkv, N, d].
const Operation& append() {
  static const Operation operation = [] {
    const auto cache = [](const Problem& p) {
      return TensorSpec{"cache", {p.batch, p.kv_heads, p.seqlen_k, p.head_dim}, p.dtype};
    };
    Operation op;
    op.name = "append";
    op.inputs = [cache](const Problem& p) {
      return std::vector<TensorSpec>{
          cache(p), {"fresh", {p.batch, p.kv_heads, 1, p.head_dim}, p.dtype}, seqused_of(p)};
    };
    op.saved = [](const Problem&) { return std::vector<TensorSpec>(); };
    op.outputs = [cache](const Problem& p) { return std::vector{cache(p)}; };
    op.flop = [](const Problem&) { return 0.0; };
    op.changes = appended_rows;
    op.reference = [cache](const Problem& p, const HostTensors& in, Selection) {
      Expected e =
          expected_rows(cache(p), static_cast<std::size_t>(p.batch * p.kv_heads), 0, false);
      for (std::size_t r = 0; r < e.rows.size(); ++r) {
        const auto b = static_cast<int64_t>(r) / p.kv_heads,
                   h = static_cast<int64_t>(r) % p.kv_heads;
        e.rows[r] = {b, h, p.seqused_k[static_cast<std::size_t>(b)]};
        const auto first = static_cast<std::ptrdiff_t>(r) * p.head_dim;
        std::copy_n(in.at("fresh").row(b, h, 0), p.head_dim, e.reference.begin() + first);
        std::copy_n(in.at("fresh").row(b, h, 0), p.head_dim, e.low.begin() + first);
      }
      return std::vector{e};
    };
    return op;
  }();
  return operation;
}

Status append_on_host(const Arguments& args) {
  const Problem& p = args.problem;
  const auto* fresh = args.in<float>("fresh");
  const auto* used = args.in<int32_t>("seqused_k");
  auto* cache = args.out<float>("cache");
  if (wrong == Wrong::no_write) return Status::success();
  for (int64_t head = 0; head < p.batch * p.kv_heads; ++head) {
    const int64_t row = head * p.seqlen_k + used[head / p.kv_heads];
    for (int64_t c = 0; c < p.head_dim; ++c) {
      const float was = cache[row * p.head_dim + c];
      cache[row * p.head_dim + c] =
          fresh[head * p.head_dim + c] + (wrong == Wrong::old_value ? 1e-3f * was : 0);
    }
    if (wrong == Wrong::neighbour && head == 2) cache[(row + 1) * p.head_dim] = 7;
    if (wrong == Wrong::shared_row && head == 0) cache[0] += 1;
  }
  return Status::success();
}

// ---- a plan -----------------------------------------------------------------------------------

int plans = 0;
bool plan_changed = false, plan_random = false;

// The first key of each sequence, counted on the host in 63 bits.
HostTensors count_before(const Problem& p, const HostTensors& in) {
  ++plans;
  HostTensor before = zeros({"before", {1, 1, 1, p.batch}, DType::int64});
  int64_t sum = plan_random ? plans : int64_t{1} << 40;
  for (std::size_t b = 0; b < before.numbers.size(); ++b)
    before.numbers[b] = sum, sum += in.at("seqused_k").numbers[b];
  return {{"before", before}};
}
Status append_with_plan(const Arguments& args) {
  auto* before = const_cast<int64_t*>(args.in<int64_t>("before"));
  const auto* used = args.in<int32_t>("seqused_k");
  for (int64_t b = 0; b + 1 < args.problem.batch; ++b)
    if (before[b + 1] - before[b] != used[b]) return Status::kernel_error("another plan");
  if (before[0] != int64_t{1} << 40 && !plan_random)
    return Status::kernel_error("numbers were cut");
  if (plan_changed) ++before[1];
  return append_on_host(args);
}

Problem cache_problem() {
  Problem p = problem(1, 9, 4, DType::fp32);
  p.batch = 3, p.kv_heads = p.heads = 2;
  p.seqused_k = {3, 0, 7};
  p.finish();
  return p;
}

}  // namespace

TEST_CASE("a tensor that goes in and out is given, changed, checked and guarded", "[session]") {
  const Problem p = cache_problem();
  const Step step = host_step(append(), append_on_host);
  const auto found = [&](Wrong what) {
    wrong = what;
    const std::string why = run_step(step, p, Backend::emulated);
    wrong = Wrong::nothing;
    return why;
  };
  CHECK(found(Wrong::nothing) == "");
  CHECK(found(Wrong::no_write).find("cache (b 0, h 0, row 3, ") == 0);
  CHECK(found(Wrong::old_value).find("cache (b 0, h 0, row 3, ") == 0);
  CHECK(found(Wrong::neighbour) == "wrote to row 19 of cache, which must stay as it is");
  CHECK(found(Wrong::shared_row) == "wrote to row 0 of cache, which must stay as it is");
  // Counted as one buffer.
  CHECK(memory_need(p, append(), step).tensors ==
        double(DeviceBuffer::footprint(3 * 2 * 9 * 4 * 4) + DeviceBuffer::footprint(3 * 2 * 4 * 4) +
               DeviceBuffer::footprint(12)));
  const HostTensors in = draw(append(), p).tensors;
  Session session(p, append(), Backend::emulated, in);
  REQUIRE(session.prepare(step).ok());
  wrong = Wrong::old_value;  // each launch finds the tensor as given, so the second result
                             // equals the first
  REQUIRE(session.launch().ok());
  const HostTensors first = session.outputs();
  REQUIRE(session.launch().ok());
  CHECK(same(session.outputs().at("cache"), first.at("cache")));
  wrong = Wrong::nothing;
  REQUIRE(session.launch().ok());
  const HostTensors out = session.outputs();
  CHECK(out.at("cache").data[0] == in.at("cache").data[0]);
  CHECK(out.at("cache").row(2, 1, 7)[3] == in.at("fresh").row(2, 1, 0)[3]);
  CHECK(session.output_rows("cache", {7 + 9 * 5}).data ==
        std::vector<float>(in.at("fresh").row(2, 1, 0), in.at("fresh").row(2, 1, 0) + 4));
}

TEST_CASE(
    "a plan is made on the host, timed by itself, and on the device when the step is launched",
    "[session]") {
  const Problem p = cache_problem();
  Step step = host_step(append(), append_with_plan);
  step.plan = count_before;
  CHECK(run_step(step, p, Backend::emulated) == "");
  plan_changed = true;
  CHECK(run_step(step, p, Backend::emulated) == "wrote to its input before");
  plan_changed = false, plan_random = true;
  CHECK(run_step(step, p, Backend::emulated) == "plan: two of one problem differ");
  plan_random = false;
  Session session(p, append(), Backend::emulated, draw(append(), p).tensors);
  REQUIRE(session.prepare(step).ok());
  const int before = plans;
  CHECK(session.time_plan().value() >= 0);
  CHECK(plans == before + 1);
  // Other lengths, with the old plan and with their own plan in the same place.
  Problem other = p;
  other.seqused_k = {5, 1, 2};
  const HostTensors inputs = draw(append(), other).tensors;
  session.replace(inputs);
  CHECK(session.launch().message == "another plan");
  session.replan(inputs);
  CHECK(session.launch().ok());
  REQUIRE(session.prepare(host_step(append(), append_on_host)).ok());
  CHECK_FALSE(session.time_plan());
  // A separate entry in the JSON, not included in the other times.
  RunResult run;
  run.problem = p;
  run.steps.resize(2);
  run.steps[0].plan_time = TimeStatistics{2e-5, 1e-5, 3e-5, 1e-5, 20};
  CHECK(to_json(run)["steps"][0]["plan_time"]["median_s"] == 2e-5);
  CHECK_FALSE(to_json(run)["steps"][1].contains("plan_time"));
}

// ---- masks --------------------------------------------------------------------------------------

namespace {

bool mask_forgotten = false;

// fp32 attention through the kernel interface: blocks of 4 queries and 8 keys, shared by all heads.
Status attend_in_blocks(const Arguments& args) {
  const Problem& p = args.problem;
  const auto* seen = args.in<int8_t>("block_mask");
  const int64_t blocks = (p.seqlen_k + 7) / 8, d = p.head_dim;
  for (int64_t row = 0; row < p.heads * p.seqlen_q; ++row) {
    const int64_t i = row % p.seqlen_q, h = row / p.seqlen_q;
    const float *q = args.in<float>("q") + row * d, *k = args.in<float>("k") + h * p.seqlen_k * d;
    const float* v = args.in<float>("v") + h * p.seqlen_k * d;
    std::vector<double> o(static_cast<std::size_t>(d));
    double sum = 0;
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (!mask_forgotten && seen[i / 4 * blocks + j / 8] == 0) continue;
      double s = 0;
      for (int64_t c = 0; c < d; ++c) s += q[c] * k[j * d + c] * p.softmax_scale;
      sum += std::exp(s);
      for (int64_t c = 0; c < d; ++c) o[static_cast<std::size_t>(c)] += std::exp(s) * v[j * d + c];
    }
    for (int64_t c = 0; c < d; ++c)
      args.out<float>("o")[row * d + c] =
          sum > 0 ? static_cast<float>(o[static_cast<std::size_t>(c)] / sum) : 0;
    args.out<float>("lse")[row] = sum > 0 ? static_cast<float>(std::log(sum)) : -INFINITY;
  }
  return Status::success();
}

}  // namespace

TEST_CASE("a mask of blocks is an input, and a step that forgets it is found", "[session]") {
  Problem p = problem(13, 43, 8, DType::fp32);
  p.inputs = InputKind::needle;
  std::vector<bool> blocks;
  for (int m = 0; m < 4; ++m)
    for (int n = 0; n < 6; ++n)
      blocks.push_back(m != 2 && (m + n) % 3 != 0);  // queries 8 to 11 are fully masked
  p.mask = std::make_shared<BlockMask>(4, 8, std::vector<int64_t>{1, 1, 4, 6}, blocks);
  p.finish();
  CHECK(p.text().find(" mask=blocks:4x8:0.5 ") != std::string::npos);
  Step step = host_step(forward(), attend_in_blocks);
  CHECK(refusal(step, p) == "--mask: this step has no masks of blocks or columns");
  step.takes.push_back("mask");
  CHECK_FALSE(refusal(step, p));
  CHECK(run_step(step, p, Backend::emulated) == "");
  mask_forgotten = true;
  CHECK(run_step(step, p, Backend::emulated).find("o (b 0, h 0, row 0, ") == 0);
  mask_forgotten = false;
}

// ---- inputs in fewer bits ---------------------------------------------------------------------

namespace {

constexpr const char* kStored[] = {"k", "v"};

// K and V in e4m3 with a scale per head: the largest magnitude becomes 448.
HostTensors to_e4m3(const Problem& p, const HostTensors& originals) {
  HostTensors stored{{"q", originals.at("q")}};
  for (const char* name : kStored) {
    const HostTensor& x = originals.at(name);
    HostTensor codes = x,
               scales = zeros(
                   {std::string(name) + "_descale", {p.batch, p.kv_heads, 1, 1}, DType::fp32});
    codes.spec.dtype = DType::e4m3;
    const std::size_t head = x.data.size() / scales.data.size();
    for (std::size_t i = 0; i < x.data.size(); ++i)
      scales.data[i / head] = std::max(scales.data[i / head], std::abs(x.data[i]) / 448);
    for (std::size_t i = 0; i < x.data.size(); ++i)
      codes.data[i] = round_to(DType::e4m3, x.data[i] / scales.data[i / head]);
    stored[name] = codes, stored[scales.spec.name] = scales;
  }
  return stored;
}
HostTensors from_e4m3(const Problem& p, const HostTensors& stored) {
  HostTensors logical{{"q", stored.at("q")}};
  for (const char* name : kStored) {
    HostTensor x = stored.at(name);
    const std::vector<float>& scales = stored.at(std::string(name) + "_descale").data;
    x.spec = like_k(p, name), x.spec.dtype = DType::fp32;
    for (std::size_t i = 0; i < x.data.size(); ++i)
      x.data[i] *= scales[i / (x.data.size() / scales.size())];
    logical[name] = x;
  }
  return logical;
}

const Operation& forward_e4m3() {
  static const Operation operation = [] {
    Operation op = forward();
    op.name = "forward_e4m3";
    op.originals = [](const Problem& p) {
      return std::vector{like_q(p, "q"), like_k(p, "k"), like_k(p, "v")};
    };
    op.store = to_e4m3, op.logical = from_e4m3;
    op.inputs = [](const Problem& p) {
      std::vector<TensorSpec> specs{like_q(p, "q")};
      for (const char* name : kStored) {
        specs.push_back(like_k(p, name));
        specs.back().dtype = DType::e4m3;
        specs.push_back({std::string(name) + "_descale", {p.batch, p.kv_heads, 1, 1}, DType::fp32});
      }
      return specs;
    };
    op.reference = [](const Problem& p, const HostTensors& in, Selection s) {
      return forward_reference(p, from_e4m3(p, in), s);
    };
    return op;
  }();
  return operation;
}

bool scale_of_neighbour = false;

// Attention of fp32 queries to stored K and V.
Status attend_e4m3(const Arguments& args) {
  const Problem& p = args.problem;
  const int64_t d = p.head_dim, n = p.seqlen_k;
  const auto value = [&](const char* name, int64_t head, int64_t j, int64_t c) {
    const float scale =
        args.in<float>(std::string(name) + "_descale")[scale_of_neighbour ? 0 : head];
    return scale * E4M3::decode(args.in<uint8_t>(name)[(head * n + j) * d + c]);
  };
  for (int64_t row = 0; row < p.batch * p.heads * p.seqlen_q; ++row) {
    const int64_t h = row / p.seqlen_q, hkv = h / p.heads * p.kv_heads + h % p.heads / p.group();
    std::vector<double> s(static_cast<std::size_t>(n));
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      double& x = s[static_cast<std::size_t>(j)] = 0;
      for (int64_t c = 0; c < d; ++c)
        x += args.in<float>("q")[row * d + c] * value("k", hkv, j, c) * p.softmax_scale;
      most = std::max(most, x);
    }
    for (double& x : s) sum += x = std::exp(x - most);
    for (int64_t c = 0; c < d; ++c) {
      double o = 0;
      for (int64_t j = 0; j < n; ++j)
        o += s[static_cast<std::size_t>(j)] / sum * value("v", hkv, j, c);
      args.out<float>("o")[row * d + c] = static_cast<float>(o);
    }
    args.out<float>("lse")[row] = static_cast<float>(most + std::log(sum));
  }
  return Status::success();
}

}  // namespace

TEST_CASE("inputs in fewer bits: right for what was stored, and how far that is from the originals",
          "[session]") {
  const Chapter small{"09_small", "the test's", {host_step(forward_e4m3(), attend_e4m3)}};
  const auto run = [&] {
    const char* options[] = {"09_small", "--device", "emulated",   "--dtype", "fp32",
                             "--seqlen", "33",       "--head-dim", "16",      "--batch",
                             "2",        "--json",   "small.json", "--save",  "small_files"};
    return run_chapter(small, static_cast<int>(std::size(options)), options);
  };
  REQUIRE(run() == 0);
  const nlohmann::json j = nlohmann::json::parse(std::ifstream("small.json"));
  const nlohmann::json& o = j["steps"][0]["verdicts"][0];
  CHECK(o["bound"].get<double>() <
        1e-3);  // the fp32 bound: the reference is exact for the stored values
  const nlohmann::json& off = o["to_originals"];
  CHECK((off["cosine"].get<double>() > 0.99 && off["cosine"].get<double>() < 0.99999));
  CHECK((off["relative_l1"].get<double>() > 1e-3 && off["relative_l1"].get<double>() < 0.1));
  CHECK((off["rmse"].get<double>() > 1e-4 && off["rmse"].get<double>() < 0.05));
  CHECK(std::filesystem::exists("small_files/k.npy.txt"));
  const std::string table = report::accuracy_table(".", {"small"});
  CHECK(table.find("| problem | inputs | step | tensor | cosine | relative L1 | RMSE |") !=
        table.npos);
  CHECK(
      table.find("| forward_e4m3 B=2 Hq=2 Hkv=2 N=33 d=16 fp32 | random | `v1_host` | o | 0.99") !=
      table.npos);
  scale_of_neighbour = true;
  CHECK(run() == 1);
  scale_of_neighbour = false;
}

TEST_CASE("distances by hand", "[session]") {
  Expected e = expected_rows({"o", {1, 1, 2, 2}, DType::fp32}, 2, 1, false);
  e.rows = {{0, 0, 0}, {0, 0, 1}};
  e.reference = {3, 4, 0, 0};
  const Distance same = distance({e.spec, {3, 4, 0, 0}}, e),
                 off = distance({e.spec, {4, 3, 0, 1}}, e);
  CHECK((same.cosine == 1 && same.relative_l1 == 0 && same.rmse == 0));
  CHECK(off.cosine == Approx(24 / std::sqrt(25.0 * 26.0)));
  CHECK(off.relative_l1 == Approx(3.0 / 7));
  CHECK(off.rmse == Approx(std::sqrt(3.0 / 4)));
}

// ---- repeats ------------------------------------------------------------------------------------

namespace {

int repeat = 0, other_bits_in = -1;

Status write_ones(const Arguments& args) {
  const int64_t elements = args.problem.batch * args.problem.heads * args.problem.seqlen_q;
  for (int64_t i = 0; i < elements * args.problem.head_dim; ++i) args.out<float>("o")[i] = 1;
  for (int64_t i = 0; i < elements; ++i) args.out<float>("lse")[i] = 1;
  if (repeat++ == other_bits_in) args.out<float>("lse")[elements - 1] = -0.0f;
  return Status::success();
}

}  // namespace

TEST_CASE("every repeat is compared, not the last one alone", "[session]") {
  Problem p = problem(5, 7, 8, DType::fp32);
  p.finish();
  const Step step = host_step(forward(), write_ones);
  Session session(p, forward(), Backend::emulated, draw(forward(), p).tensors);
  REQUIRE(session.prepare(step).ok());
  for (const int n : {-1, 1, 3, 9}) {
    repeat = 0, other_bits_in = n;
    CHECK(session.repeats_differ(10) ==
          (n < 0 ? "" : fmt::format("lse of launch {} has other bits than that of launch 0", n)));
  }
}
