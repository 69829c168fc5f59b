/// \file
/// libattention in one program with the chapters' sessions: every step through the ABI has the bits
/// of its session; strides, offsets, workspaces, lengths on the device, threads; refusals.
#include <fmt/format.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "api/tests/calls.h"
#include "device/device.h"
#include "tests/catch.h"

using namespace attn;
using namespace attn::tests;
using api::Call;

namespace {

using Bytes = std::vector<std::byte>;

// A forward problem of two sequences, its tensors, and its bits by a contiguous call.
struct Forward {
  Problem p;
  attn_problem problem;
  CallTensors tensors;
  Bytes o, lse;

  explicit Forward(const char* step = "04_flash_v2/v13_tuned") {
    p.batch = 2, p.heads = 4, p.kv_heads = 2, p.seqlen_q = 33, p.seqlen_k = 50, p.head_dim = 64;
    p.causal = true;
    p.finish();
    problem = abi_problem(p, forward());
    problem.step = step;
    tensors = tensors_of(forward(), p, draw(forward(), p).tensors);
    REQUIRE(run(Call::forward, problem, tensors.tensors) == "");
    o = tensors.bytes("o"), lse = tensors.bytes("lse");
    forget();
  }
  void forget() {
    for (const char* name : {"o", "lse"})
      std::memset(tensors.memory.at(name).data(), 0xFF, tensors.memory.at(name).bytes());
  }
  bool untouched() {
    for (const char* name : {"o", "lse"})
      for (const std::byte b : tensors.bytes(name))
        if (b != std::byte{0xFF}) return false;
    return true;
  }
};

// Rows of [B, H, N, d] as [B, N, H, d], after an offset in bytes, or back.
Bytes transposed(const Bytes& from, int64_t batch, int64_t heads, int64_t rows, std::size_t row) {
  Bytes to(from.size());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t n = 0; n < rows; ++n)
        std::memcpy(to.data() + static_cast<std::size_t>((b * rows + n) * heads + h) * row,
                    from.data() + static_cast<std::size_t>((b * heads + h) * rows + n) * row, row);
  return to;
}

attn_status status_of(Call call, const attn_problem& problem) {
  attn_plan* plan = nullptr;
  const attn_status status = plan_function(call)(&problem, &plan);
  attn_plan_destroy(plan);
  return status;
}
std::string line_of(Call call, const attn_problem& problem) {
  return status_of(call, problem) == ATTN_OK ? "" : attn_last_error();
}

}  // namespace

TEST_CASE("tensors with strides are copied where asked, else refused", "[api]") {
  Forward f;
  attn_tensors& t = f.tensors.tensors;
  const std::size_t row = 128;
  Memory q(f.tensors.bytes("q").size()), k(f.tensors.bytes("k").size()), o(f.o.size(), 2);
  const Bytes of_q = transposed(f.tensors.bytes("q"), 2, 4, 33, row),
              of_k = transposed(f.tensors.bytes("k"), 2, 2, 50, row);
  std::memcpy(q.data(), of_q.data(), of_q.size());
  std::memcpy(k.data(), of_k.data(), of_k.size());
  t.q = attention::bnhd(q.data(), 33, 4, 64);
  t.k = attention::bnhd(k.data(), 50, 2, 64);
  t.o = attention::bnhd(o.data(), 33, 4, 64);  // not aligned to 16 bytes, too
  CHECK(run(Call::forward, f.problem, t).find("strides 8448, 64, 256 are not contiguous") !=
        std::string::npos);
  CHECK(f.untouched());
  f.problem.copy_strided = 1;
  REQUIRE(run(Call::forward, f.problem, t) == "");
  CHECK(same(Bytes(o.data(), o.data() + o.bytes()), transposed(f.o, 2, 4, 33, row)));
  CHECK(same(f.tensors.bytes("lse"), f.lse));

  t.o.stride_row = 32;  // rows of O would overlap
  CHECK(run(Call::forward, f.problem, t).find("overlap rows of 64 elements") != std::string::npos);
}

TEST_CASE("a tensor after an offset is copied where asked, else refused", "[api]") {
  Forward f;
  Memory k(f.tensors.bytes("k").size(), 2);
  std::memcpy(k.data(), f.tensors.memory.at("k").data(), k.bytes());
  f.tensors.tensors.k.data = k.data();
  CHECK(run(Call::forward, f.problem, f.tensors.tensors) ==
        "k: must be aligned to 16 bytes, or copied (copy_strided)");
  CHECK(f.untouched());
  f.problem.copy_strided = 1;
  REQUIRE(run(Call::forward, f.problem, f.tensors.tensors) == "");
  CHECK(same(f.tensors.bytes("o"), f.o));
}

TEST_CASE("a workspace is large enough, aligned and prepared", "[api]") {
  Forward f("06_flash_v3_hopper/v14_tuned");
  const attn_tensors& t = f.tensors.tensors;
  attn_plan* made = nullptr;
  REQUIRE(attn_forward_plan(&f.problem, &made) == ATTN_OK);
  const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
  const std::size_t bytes = attn_plan_workspace_bytes(plan.get());
  std::size_t needed = 0;
  REQUIRE(attn_forward_workspace_bytes(&f.problem, &needed) == ATTN_OK);
  CHECK(bytes == needed);
  Memory workspace(bytes), other(bytes), offset(bytes, 16);
  const auto refused = [&](attn_status status, attn_status expected, const std::string& part) {
    CHECK(status == expected);
    INFO(attn_last_error());
    CHECK(std::string(attn_last_error()).find(part) != std::string::npos);
    CHECK(f.untouched());
  };
  refused(attn_forward(&f.problem, &t, workspace.data(), bytes - 1, nullptr), ATTN_WORKSPACE,
          fmt::format("{} bytes, 06_flash_v3_hopper/v14_tuned needs {}", bytes - 1, bytes));
  refused(attn_prepare(plan.get(), &t, workspace.data(), bytes - 1, nullptr), ATTN_WORKSPACE,
          "needs");
  refused(attn_run(plan.get(), &t, workspace.data(), bytes, nullptr), ATTN_WORKSPACE,
          "not prepared");
  REQUIRE(attn_prepare(plan.get(), nullptr, workspace.data(), bytes, nullptr) == ATTN_OK);
  refused(attn_run(plan.get(), &t, other.data(), bytes, nullptr), ATTN_WORKSPACE, "not prepared");
  refused(attn_run(plan.get(), &t, workspace.data(), bytes - 1, nullptr), ATTN_WORKSPACE, "needs");
  refused(attn_run(plan.get(), &t, nullptr, bytes, nullptr), ATTN_INVALID_VALUE, "is null");
  refused(attn_run(plan.get(), &t, offset.data(), bytes, nullptr), ATTN_INVALID_VALUE,
          "aligned to 256");
  for (int n = 0; n < 2; ++n) {
    f.forget();
    REQUIRE(attn_run(plan.get(), &t, workspace.data(), bytes, nullptr) == ATTN_OK);
    CHECK(same(f.tensors.bytes("o"), f.o));
  }
}

TEST_CASE("a cache that prepare has quantised is not another call's", "[api]") {
  for (const api::NamedStep& named : api::all_steps()) {
    if (named.name != "08_quant_sparse/d1_int8_kv") continue;
    const Problem p = *problem_for(*named.step);
    attn_problem problem = abi_problem(p, *named.step->operation);
    problem.step = named.name.c_str();
    CallTensors tensors =
        tensors_of(*named.step->operation, p, draw(*named.step->operation, p).tensors);
    attn_tensors t = tensors.tensors;
    attn_plan* made = nullptr;
    REQUIRE(attn_decode_plan(&problem, &made) == ATTN_OK);
    const std::unique_ptr<attn_plan, void (*)(attn_plan*)> plan(made, attn_plan_destroy);
    CHECK(attn_plan_prepare_reads_tensors(made) == 1);
    const std::size_t bytes = attn_plan_workspace_bytes(made);
    Memory workspace(bytes), other(tensors.memory.at("k").bytes());
    CHECK(attn_prepare(made, nullptr, workspace.data(), bytes, nullptr) == ATTN_INVALID_VALUE);
    REQUIRE(attn_prepare(made, &t, workspace.data(), bytes, nullptr) == ATTN_OK);
    CHECK(attn_run(made, &t, workspace.data(), bytes, nullptr) == ATTN_OK);
    t.k.data = other.data();
    CHECK(attn_run(made, &t, workspace.data(), bytes, nullptr) == ATTN_WORKSPACE);
    CHECK(std::string(attn_last_error()).find("prepared with another k") != std::string::npos);
    return;
  }
  FAIL("no such step");
}

TEST_CASE("a run allocates nothing that the step's launch does not", "[api]") {
  Forward f("06_flash_v3_hopper/v14_tuned");
  const std::unique_ptr<attn_plan> plan = api::make_plan(Call::forward, &f.problem);
  const auto bytes = static_cast<std::size_t>(plan->workspace_bytes);
  Memory workspace(bytes);
  const attn_tensors& t = f.tensors.tensors;
  REQUIRE(attn_prepare(plan.get(), &t, workspace.data(), bytes, nullptr) == ATTN_OK);
  Arguments arguments(plan->problem, plan->device);
  for (auto& [name, memory] : f.tensors.memory) arguments.bind(name, memory.data());
  for (const auto& region : plan->regions)
    arguments.bind(region.name, workspace.data() + region.offset);
  int64_t of_run = 0, of_launch = 0;
  for (int n = 0; n < 3; ++n) {  // the first ones fill caches
    int64_t before = allocations();
    REQUIRE(attn_run(plan.get(), &t, workspace.data(), bytes, nullptr) == ATTN_OK);
    of_run = allocations() - before;
    before = allocations();
    REQUIRE(plan->named->step->launch.emulated(arguments).ok());
    of_launch = allocations() - before;
  }
  CHECK(of_launch > 0);  // the emulator's own
  CHECK(of_run == of_launch);
}

TEST_CASE("one plan runs in several threads", "[api]") {
  Forward f("06_flash_v3_hopper/v14_tuned");
  const attention::Plan plan = [&] { return attention::Plan(attn_forward_plan, f.problem); }();
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n)
    threads.emplace_back([&] {
      attention::Plan& mine = const_cast<attention::Plan&>(plan);
      Memory workspace(plan.workspace_bytes()), o(f.o.size()), lse(f.lse.size());
      attn_tensors t = f.tensors.tensors;
      t.o.data = o.data(), t.lse = reinterpret_cast<float*>(lse.data());
      mine.prepare(t, workspace.data());
      for (int launch = 0; launch < 3; ++launch) mine.run(t, workspace.data());
      right += Bytes(o.data(), o.data() + o.bytes()) == f.o;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 4);
}

TEST_CASE("lengths on the device: steps that schedule there run, others refuse", "[api]") {
  const api::NamedStep* planned = nullptr;
  const api::NamedStep* on_device = nullptr;
  for (const api::NamedStep& named : api::all_steps()) {
    if (named.name == "07_paged/v14_cross_work_tile") planned = &named;
    if (named.name == "07_paged/v6_device_plan") on_device = &named;
  }
  REQUIRE((planned && on_device));
  const Operation& op = *on_device->step->operation;
  Problem p = *problem_for(*on_device->step);
  p.own["num_pages"] = {30};  // else the pool's size depends on the lengths
  const HostTensors inputs = draw(op, p).tensors;
  attn_problem problem = abi_problem(p, op);
  problem.lengths_k = nullptr;
  problem.step = planned->name.c_str();
  const std::string line = line_of(Call::paged_decode, problem);
  CHECK(line.find("needs lengths on the host") != std::string::npos);
  CHECK(line.find("07_paged/v6_device_plan") != std::string::npos);

  problem.step = on_device->name.c_str();
  attention::Plan plan(attn_paged_decode_plan, problem);
  CallTensors tensors = tensors_of(op, p, inputs);
  Memory workspace(plan.workspace_bytes());
  plan.prepare(tensors.tensors, workspace.data());
  // Lengths change in place between runs, as between replays of a captured graph.
  for (const std::vector<int64_t>& lengths : {p.seqused_k, {12, 150}, {160, 160}}) {
    Problem now = p;
    now.seqused_k = lengths;
    HostTensors changed = inputs;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      changed.at("seqused_k").numbers[b] = lengths[b];
      reinterpret_cast<int32_t*>(tensors.memory.at("seqused_k").data())[b] =
          static_cast<int32_t>(lengths[b]);
    }
    // The page table covers all of the room, so that any length is in pages of the pool.
    for (std::size_t n = 0; n < changed.at("page_table").numbers.size(); ++n) {
      const auto page = static_cast<int64_t>(n) % problem.num_pages;
      changed.at("page_table").numbers[n] = page;
      reinterpret_cast<int32_t*>(tensors.memory.at("page_table").data())[n] =
          static_cast<int32_t>(page);
    }
    for (const char* name : {"k", "v"}) {  // unused rows are NaN: use one that is not
      HostTensor& t = changed.at(name);
      for (float& x : t.data)
        if (!(std::abs(x) < 100)) x = 0.5f;
      tensors.give(name, to_bytes(t));
    }
    choose_schedule(1);
    Session session(now, op, Backend::emulated, changed);
    REQUIRE(session.prepare(*on_device->step).ok());
    REQUIRE(session.launch().ok());
    plan.run(tensors.tensors, workspace.data());
    for (const auto& [name, tensor] : session.outputs()) {
      INFO(name << " of lengths " << lengths[0] << ", " << lengths[1]);
      CHECK(same(tensors.bytes(name), to_bytes(tensor)));
    }
  }
}

TEST_CASE("every feature of the ABI has the bits of a session that has it", "[api]") {
  std::map<std::string, int> tested;
  for (const api::NamedStep& named : api::all_steps()) {
    const Step& step = *named.step;
    const auto call = call_of(step);
    if (!call) continue;
    const auto plain = problem_for(step);
    for (const char* feature : {"varlen", "softcap", "alibi", "window", "fp16", "scale", "dropout",
                                "sinks", "blocks", "columns", "tiles"}) {
      const std::string name = feature;
      if (!plain || tested[name + " " + step.operation->name] == 2) continue;
      Problem p = *plain;
      if (name == "varlen" && (p.varlen() || step.operation->few_queries > 0)) continue;
      if (name == "varlen") p.varlen_q = {40, 3, 21}, p.varlen_k = {10, 70, 21};
      if (name == "softcap") p.softcap = 20;
      if (name == "alibi") p.alibi = true;
      if (name == "window") p.window_left = 30, p.window_right = 5, p.causal = false;
      if (name == "fp16") p.dtype = DType::fp16;
      if (name == "scale") p.softmax_scale = 0.3;
      if (name == "dropout") p.dropout = 0.25, p.seed = 77;
      if (name == "sinks" && step.operation->name != "paged_decode") continue;
      if (name == "sinks") p.own["sinks"] = {1};
      if (name == "blocks" || name == "columns") {
        if (*call != Call::forward || p.varlen()) continue;
        p.seqlen_q = 300, p.seqlen_k = 520;  // 3 x 5 blocks
        p.mask = name == "blocks" ? some_blocks(p) : some_columns(p);
      }
      if (name == "tiles") {
        if (*call != Call::forward || p.varlen()) continue;
        p.seqlen_q = p.seqlen_k = 560, p.causal = false, p.mask = some_tiles();
      }
      p.finish();
      if (refusal(step, p)) continue;
      INFO(feature);
      compare_with_session(named, *call, p, Backend::emulated);
      ++tested[name + " " + step.operation->name];
    }
  }
  for (const char* must :
       {"varlen forward", "varlen backward", "softcap forward", "softcap backward", "alibi forward",
        "alibi decode", "window paged_decode", "fp16 decode", "scale paged_prefill",
        "dropout forward", "dropout backward", "sinks paged_decode", "blocks forward",
        "columns forward", "tiles forward"}) {
    INFO(must);
    CHECK(tested[must] > 0);
  }
}

TEST_CASE("packed sequences with lengths on the device", "[api]") {
  for (const char* step : {"04_flash_v2/v13_tuned", "06_flash_v3_hopper/v14_tuned"}) {
    INFO(step);
    Problem p;
    p.heads = p.kv_heads = 2, p.head_dim = 64;
    p.varlen_q = {40, 3, 21}, p.varlen_k = {10, 70, 21};
    p.finish();
    attn_problem problem = abi_problem(p, forward());
    problem.step = step;
    CallTensors tensors = tensors_of(forward(), p, draw(forward(), p).tensors);
    REQUIRE(run(Call::forward, problem, tensors.tensors) == "");
    const Bytes o = tensors.bytes("o"), lse = tensors.bytes("lse");
    std::memset(tensors.memory.at("o").data(), 0xFF, o.size());
    std::memset(tensors.memory.at("lse").data(), 0xFF, lse.size());
    problem.lengths_q = problem.lengths_k = nullptr;
    REQUIRE(run(Call::forward, problem, tensors.tensors) == "");
    CHECK(same(tensors.bytes("o"), o));
    CHECK(same(tensors.bytes("lse"), lse));
  }
}

TEST_CASE("a problem that is wrong gets a code and one line", "[api]") {
  const Forward f;
  const auto with = [&](auto change) {
    attn_problem p = f.problem;
    p.step = nullptr;
    change(p);
    return line_of(Call::forward, p);
  };
  const auto has = [](const std::string& line, const char* part) {
    INFO(line);
    CHECK(line.find(part) != std::string::npos);
    CHECK(line.find('\n') == std::string::npos);
  };
  has(with([](auto& p) { p.size = 8; }), "attn_problem_defaults");
  has(with([](auto& p) { p.backend = 7; }), "backend 7: must be 0 (GPU) or 1");
  has(with([](auto& p) { p.dtype = 99; }), "dtype 99");
  has(with([](auto& p) { p.dtype = ATTN_INT8; }), "forward takes bf16, fp16 and fp32");
  has(with([](auto& p) { p.batch = 0; }), "batch 0: must be from 1");
  has(with([](auto& p) { p.heads = -1; }), "heads -1");
  has(with([](auto& p) { p.kv_heads = 3; }), "multiple of the key/value heads");
  has(with([](auto& p) { p.seqlen_k = int64_t{1} << 40; }), "seqlen_k 1099511627776: must be from");
  has(with([](auto& p) { p.head_dim = 65537; }), "head_dim 65537");
  has(with([](auto& p) { p.window_left = -2; }), "window -2");
  has(with([](auto& p) { p.softmax_scale = 1.0 / 0.0; }), "finite");
  has(with([](auto& p) { p.softcap = -1; }), "softcap");
  has(with([](auto& p) { p.dropout = 1; }), "dropout 1: must be from 0 to 255/256");
  has(with([](auto& p) { p.sinks = 1; }), "sinks: forward has none");
  has(with([](auto& p) { p.step = "06_flash_v3_hopper/v99"; }), "no such step");
  has(with([](auto& p) { p.step = "05_flash_decoding/v4_gqa"; }),
      "a step of decode, not of forward");
  has(with([](auto& p) { p.step = "06_flash_v3_hopper/v14_tuned", p.head_dim = 96; }),
      "head_dim 96: this step takes 64, 128 and 256");
  has(with([](auto& p) { p.packed = 1, p.total_q = 20, p.total_k = 80; }),
      "total_q 20: must be from 33");
  static const int64_t lengths[] = {5, 99};
  has(with([](auto& p) { p.packed = 1, p.lengths_q = lengths, p.lengths_k = lengths; }),
      "lengths_q[1] is 99: must be from 0 to 33");
  has(with([](auto& p) { p.lengths_k = lengths; }), "lengths_k: forward has them only with packed");
  static const uint8_t blocks[] = {1, 0, 2, 1};  // 33 queries, 50 keys of 4 heads
  static const int32_t rows[50] = {3, -1};
  const auto masked = [&](auto change) {
    return with([&](attn_problem& p) {
      p.block_mask = blocks, p.mask_heads = 4;
      change(p);
    });
  };
  has(masked([](auto&) {}), "block_mask[2] is 2: must be 0 or 1");
  has(masked([](auto& p) { p.mask_batch = 3; }), "mask_batch 3: must be 1 or 2");
  has(masked([](auto& p) { p.mask_heads = 2; }), "mask_heads 2: must be 1 or 4");
  has(masked([](auto& p) { p.block_m = 0; }), "block_m 0, block_n 128: must be from 1");
  has(masked([](auto& p) { p.block_m = 96, p.mask_heads = 1; }), "08_quant_sparse/s1_block_mask");
  has(masked([](auto& p) { p.hidden_end = rows; }), "at most one of them may be given");
  has(with([](auto& p) { p.hidden_end = rows; }), "both must be given, or none");
  const auto columns = [&](int64_t intervals) {
    return with([&](attn_problem& p) {
      p.hidden_begin = p.hidden_end = rows, p.mask_intervals = intervals;
    });
  };
  has(columns(1), "hidden_begin[1] -1, hidden_end[1] -1: must be queries, from 0 on");
  has(columns(3), "mask_intervals 3: must be 1 or 2");
  static const int64_t windows[] = {2, 8, 8};
  const auto tiles = [&](auto change) {
    return with([&](attn_problem& p) {
      p.seqlen_q = p.seqlen_k = 560, p.tile_windows = windows;
      const int64_t canvas[] = {2, 16, 16}, tile[] = {2, 8, 8};
      std::copy_n(canvas, 3, p.canvas), std::copy_n(tile, 3, p.tile);
      change(p);
    });
  };
  has(tiles([](auto& p) { p.block_mask = blocks; }), "at most one of them may be given");
  has(tiles([](auto& p) { p.canvas[1] = 0; }), "canvas 2 x 0 x 16: must be from 1 to 2^20");
  has(tiles([](auto& p) { p.canvas[1] = 12; }),
      "tile_windows: a canvas of 2x12x16: must be a multiple of tiles of 2x8x8");
  has(tiles([](auto& p) { p.canvas[0] = 1 << 20; }), "must be as many, the canvas of 268435456");
  has(tiles([](auto& p) { p.seqlen_q = 559; }),
      "canvas: 559 queries and 560 keys: must be as many");
  static const int64_t wide[] = {4, 8, 8};
  has(tiles([](auto& p) { p.tile_windows = wide; }), "tile_windows: a window of 4x8x8: must have");
  attn_problem backward = f.problem;
  backward.step = nullptr, backward.block_mask = blocks;
  has(line_of(Call::backward, backward), "block_mask: backward has no mask");
  const auto chosen = [&](auto change) {
    attn_problem p = f.problem;
    p.step = nullptr;
    change(p);
    return std::string(attention::Plan(attn_forward_plan, p).step());
  };
  CHECK(chosen([](auto& p) { p.block_mask = blocks; }) == "08_quant_sparse/s1_block_mask");
  static const int32_t none_hidden[50] = {};
  CHECK(chosen([](auto& p) { p.hidden_begin = p.hidden_end = none_hidden; }) ==
        "08_quant_sparse/s2_flashmask");
  attn_plan* plan = nullptr;
  CHECK(attn_forward_plan(nullptr, &plan) == ATTN_INVALID_VALUE);
  CHECK(attn_forward_plan(&f.problem, nullptr) == ATTN_INVALID_VALUE);
  CHECK(attn_run(nullptr, nullptr, nullptr, 0, nullptr) == ATTN_INVALID_VALUE);
  attn_tensors none = attention::tensors();
  CHECK(run(Call::forward, f.problem, none) == "q: is null");
  none.size = 3;
  CHECK(run(Call::forward, f.problem, none).find("tensors: size 3") == 0);
  if (!gpu_info().available) {
    attn_problem p = f.problem;
    p.backend = ATTN_GPU;
    CHECK(status_of(Call::forward, p) == ATTN_DEVICE_ERROR);
    has(attn_last_error(), "backend GPU: there is none");
  }
}
