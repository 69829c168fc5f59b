// The C functions of attention_check.h.
#include "api/attention_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "api/guarded.h"
#include "api/make_plan.h"
#include "attn/tiling.h"
#include "check/failure_shape.h"
#include "check/operation.h"
#include "device/roofline.h"

namespace attn::api {
namespace {

// A problem for the host alone.
Known known_on_host(Call call, const attn_problem* from) {
  attn_problem problem = *not_null(from, "problem");
  if (problem.size == sizeof problem) problem.backend = ATTN_EMULATED;
  return known_of(call, &problem);
}

HostTensor tensor_of(const TensorSpec& spec, const double* values, const char* name) {
  HostTensor t = zeros(spec);
  not_null(values, name);
  t.rest.resize(t.data.size());
  for (std::size_t n = 0; n < t.data.size(); ++n) {
    t.data[n] = static_cast<float>(values[n]);
    t.rest[n] = static_cast<float>(values[n] - static_cast<double>(t.data[n]));
  }
  return t;
}

void give(const Expected& e, double* to) {
  if (!to) return;
  const auto columns = e.spec.columns();
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    std::copy_n(e.reference.data() + static_cast<int64_t>(r) * columns, columns,
                to + e.spec.row(b, h, i) * columns);
  }
}

void reference(const attn_problem* from, const attn_doubles* tensors) {
  const attn_doubles& t = *not_null(tensors, "tensors");
  if (t.size != sizeof t)
    fail(ATTN_INVALID_VALUE,
         fmt::format("tensors: size {}, must be {} (sizeof(attn_doubles))", t.size, sizeof t));
  attn_problem problem = *not_null(from, "problem");
  problem.dtype = ATTN_FP32;
  const bool lengths = problem.lengths_k && !problem.packed;
  const Known known = known_on_host(lengths ? Call::decode : Call::forward, &problem);
  const Problem& p = known.problem;
  if (!known.host_lengths && p.varlen())
    fail(ATTN_INVALID_VALUE, "lengths_q, lengths_k: the reference needs them");
  HostTensors inputs;
  inputs.emplace("q", tensor_of(like_q(p, "q"), t.q, "q"));
  inputs.emplace("k", tensor_of(like_k(p, "k"), t.k, "k"));
  inputs.emplace("v", tensor_of(like_k(p, "v"), t.v, "v"));
  if (p.alibi) {
    HostTensor slopes = zeros(alibi_slopes(p));
    std::copy_n(not_null(t.alibi, "alibi"), p.heads, slopes.data.begin());
    inputs.emplace("alibi", std::move(slopes));
  }
  if (t.o || t.lse) {
    const std::vector<Expected> all = forward_reference(p, inputs, {});
    give(all[0], t.o), give(all[1], t.lse);
  }
  if (t.dq || t.dk || t.dv) {
    if (lengths) fail(ATTN_INVALID_VALUE, "lengths_k: gradients need packed sequences");
    inputs.emplace("do", tensor_of(like_q(p, "do"), t.dout, "dout"));
    const std::vector<Expected> all = backward_reference(p, inputs, {});
    give(all[0], t.dq), give(all[1], t.dk), give(all[2], t.dv);
  }
}

// The operation of a call, as its steps define it.
const Operation& operation(Call call, const Problem& p) {
  const std::string name = operation_of(call, p);
  for (const NamedStep& named : all_steps())
    if (named.step->operation->name == name) return *named.step->operation;
  fail(ATTN_UNSUPPORTED, fmt::format("{}: no step of this library has it", name));
}

const Step* step_named(const attn_problem& problem, const std::string& of_operation) {
  if (!problem.step) return nullptr;
  const auto found =
      std::ranges::find(all_steps(), std::string_view(problem.step), &NamedStep::name);
  if (found == all_steps().end() || found->step->operation->name != of_operation)
    fail(ATTN_INVALID_VALUE, fmt::format("step {}: no such step of {}; attn_steps() lists all",
                                         problem.step, of_operation));
  return found->step;
}

InputKind kind_named(const char* inputs) {
  for (const InputKind kind :
       {InputKind::random, InputKind::needle, InputKind::peaked, InputKind::outlier})
    if (name(kind) == not_null(inputs, "inputs")) return kind;
  fail(ATTN_INVALID_VALUE,
       fmt::format("inputs {}: must be random, needle, peaked or outlier", inputs));
}

// What a forward pass saves for the backward pass, from its reference.
HostTensor rounded(const Expected& e) {
  HostTensor t = zeros(e.spec);
  const auto columns = e.spec.columns();
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    for (int64_t c = 0; c < columns; ++c)
      t.data[static_cast<std::size_t>(e.spec.row(b, h, i) * columns + c)] = round_to(
          e.spec.dtype,
          static_cast<float>(e.reference[r * static_cast<std::size_t>(columns) +
                                         static_cast<std::size_t>(c)]));
  }
  return t;
}

std::string line_of(const char* side, const TensorSpec& spec) {
  const int64_t* end = spec.shape + (spec.name == "lse" ? 3 : 4);  // lse has no columns
  return fmt::format("{} {} {} {}\n", side, spec.name, name(spec.dtype),
                     fmt::join(spec.shape + (4 - spec.rank), end, " "));
}

std::string cost(const char* operation_name, const attn_problem* from, const char* gpu) {
  const Call call = call_named(operation_name);
  const Known known = known_on_host(call, from);
  const Problem& p = known.problem;
  const std::string of = operation_of(call, p);
  const Step* step = step_named(*from, of);
  std::string step_name = step ? from->step : "";
  for (const NamedStep* named : by_preference(of, p)) {
    if (step) break;
    if (!reason_against(*named, known)) step = named->step, step_name = named->name;
  }
  if (!step) fail(ATTN_UNSUPPORTED, fmt::format("{}: no step takes this problem", of));
  if (const auto reason = refusal(*step, p))
    fail(ATTN_UNSUPPORTED, fmt::format("{}: {}", step_name, *reason));
  const GpuSpec* spec = gpu ? find_gpu(gpu) : nullptr;
  if (gpu && !spec)
    fail(ATTN_INVALID_VALUE, fmt::format("gpu {}: must be one of {}", gpu, gpu_names()));
  if (!spec && gpu_info().available) spec = spec_of_device(gpu_info().name);
  if (!spec) spec = find_gpu("h200");
  const Roofs roofs = datasheet_roofs(*spec);
  const DType products = type_of_products(*step->operation, p);
  const Cost phases = cost_of(*step, p, roofs.machine);
  const Prediction predicted = predict(phases, roofs, products);
  nlohmann::json json{{"step", step_name},
                      {"gpu", spec->full_name},
                      {"useful_flop", step->operation->flop(p)},
                      {"compulsory_bytes", step->operation->compulsory_bytes(p)},
                      {"hbm_bytes", modelled_bytes(phases)},
                      {"seconds", predicted.seconds},
                      {"bound_by", predicted.binding},
                      {"roofs",
                       {{"hbm_bytes_per_s", roofs.hbm_copy.rate},
                        {"tensor_flop_per_s", roofs.tensor(products).rate},
                        {"fp32_flop_per_s", roofs.fp32.rate},
                        {"exp_per_s", roofs.exp.rate}}},
                      {"phases", nlohmann::json::array()}};
  for (std::size_t n = 0; n < phases.size(); ++n) {
    const Phase& phase = phases[n];
    json["phases"].push_back({{"name", phase.name},
                              {"tensor_flop", phase.tensor_flop},
                              {"fp32_flop", phase.fp32_flop},
                              {"exp", phase.exp},
                              {"hbm_read", phase.hbm_read},
                              {"hbm_write", phase.hbm_write},
                              {"l2_bytes", phase.l2_bytes > 0 ? nlohmann::json(phase.l2_bytes)
                                                              : nlohmann::json()},
                              {"seconds", predicted.phases[n].seconds},
                              {"bound_by", predicted.phases[n].binding}});
  }
  return json.dump();
}

std::string describe(const char* step_name) {
  const std::string_view wanted = not_null(step_name, "step");
  const auto found = std::ranges::find(all_steps(), wanted, &NamedStep::name);
  if (found == all_steps().end())
    fail(ATTN_INVALID_VALUE,
         fmt::format("step {}: no such step; attn_steps() lists all", step_name));
  const Step& step = *found->step;
  nlohmann::json dtypes = nlohmann::json::array();
  if (const DType to = quantises_to(step); to != DType::bf16)
    dtypes.push_back(name(to));
  else
    for (const DType type : step.limits.dtypes) dtypes.push_back(name(type));
  return nlohmann::json{{"step", found->name},
                        {"operation", step.operation->name},
                        {"idea", step.idea},
                        {"dtypes", dtypes},
                        {"head_dims", step.limits.head_dims},
                        {"most_queries", step.limits.most_queries},
                        {"deterministic", step.deterministic},
                        {"features", step.takes},
                        {"support", step.support},
                        {"compute_capability", step.needs.compute_capability / 10.0}}
      .dump();
}

// The function that GpuTimer launches: the one that attn_time was given in this thread.
thread_local int (*launched)(void*) = nullptr;
thread_local void* launched_with = nullptr;
Status launch_given(const Arguments&) {
  return launched(launched_with) == 0 ? Status::success()
                                      : Status::device_error("launch: returned an error");
}

void time(int (*launch)(void*), void* user, void* stream, double* seconds, int* hidden) {
  launched = not_null(launch, "launch"), launched_with = user;
  not_null(seconds, "seconds");
  if (!gpu_info().available)
    fail(ATTN_DEVICE_ERROR,
         fmt::format("attn_time: there is no GPU ({}): times of the emulator mean nothing",
                     gpu_info().error));
  thread_local GpuTimer timer;
  Problem problem;
  problem.finish();
  Arguments arguments(problem, Device(Backend::gpu, gpu_info().ordinal));
  arguments.stream = stream;
  Sample sample;
  check(timer.time(arguments, launch_given, sample));
  *seconds = sample.seconds;
  if (hidden) *hidden = sample.launch_hidden ? 1 : 0;
}

}  // namespace
}  // namespace attn::api

struct attn_check {
  attn::Problem problem;
  attn::HostTensors inputs;
  std::vector<attn::Expected> expected;
  const attn::Step* step = nullptr;
  std::string tensors;
};

using namespace attn::api;

namespace {

void begin(const char* operation_name, const attn_problem* from, const char* inputs, uint64_t seed,
           attn_check** result) {
  not_null(result, "check");
  const Call call = call_named(operation_name);
  Known known = known_on_host(call, from);
  if (!known.host_lengths)
    fail(ATTN_INVALID_VALUE, "lengths_q, lengths_k: the checker needs them on the host");
  auto check = std::make_unique<attn_check>();
  attn::Problem& p = check->problem = known.problem;
  p.inputs = kind_named(inputs);
  p.seed = seed;
  const attn::Operation& op = operation(call, p);
  check->step = step_named(*from, op.name);
  check->inputs = attn::draw(op, p).tensors;
  check->expected = op.reference(p, check->inputs, {});
  if (call == Call::backward)
    for (const attn::Expected& e : attn::forward_reference(p, check->inputs, {}))
      check->inputs.emplace(e.spec.name, rounded(e));
  for (const auto& [name, tensor] : check->inputs) check->tensors += line_of("in", tensor.spec);
  for (const attn::Expected& e : check->expected) check->tensors += line_of("out", e.spec);
  *result = check.release();
}

void input(const attn_check* check, const char* name, void* data, size_t bytes) {
  const auto found = not_null(check, "check")->inputs.find(not_null(name, "name"));
  if (found == check->inputs.end())
    fail(ATTN_INVALID_VALUE, fmt::format("{}: no such input", name));
  const std::vector<std::byte> contents = attn::to_bytes(found->second);
  if (bytes != contents.size())
    fail(ATTN_INVALID_VALUE, fmt::format("{}: {} bytes, must be {}", name, bytes, contents.size()));
  std::memcpy(not_null(data, "data"), contents.data(), bytes);
}

std::string output(const attn_check* check, const char* name, const void* data, size_t bytes,
                   int* pass) {
  const auto& all = not_null(check, "check")->expected;
  const auto found = std::ranges::find_if(
      all, [&](const attn::Expected& e) { return e.spec.name == not_null(name, "name"); });
  if (found == all.end()) fail(ATTN_INVALID_VALUE, fmt::format("{}: no such output", name));
  const auto needed = static_cast<size_t>(found->spec.bytes());
  if (bytes != needed)
    fail(ATTN_INVALID_VALUE, fmt::format("{}: {} bytes, must be {}", name, bytes, needed));
  const auto* const first = static_cast<const std::byte*>(not_null(data, "data"));
  const attn::HostTensor out = attn::from_bytes(found->spec, {first, first + bytes});
  attn::Verdict v = attn::check(out, *found);
  *not_null(pass, "pass") = v.pass ? 1 : 0;
  if (!v.pass)
    v.shape = attn::failure_shape(
        v, out, *found, check->problem,
        check->step ? attn::tiling_of(*check->step, check->problem) : std::nullopt);
  return v.pass ? fmt::format("{}: {} rows, largest relative error of a row {:.2e} (bound {:.2e})",
                              name, v.rows_checked, v.worst_row_error, v.bound)
                : attn::failure_text(v);
}

}  // namespace

extern "C" {

attn_status attn_reference(const attn_problem* problem, const attn_doubles* tensors) {
  return guarded([&] { reference(problem, tensors); });
}
attn_status attn_check_begin(const char* operation, const attn_problem* problem, const char* inputs,
                             uint64_t seed, attn_check** check) {
  return guarded([&] { begin(operation, problem, inputs, seed, check); });
}
const char* attn_check_tensors(const attn_check* check) {
  return check ? check->tensors.c_str() : "";
}
attn_status attn_check_input(const attn_check* check, const char* name, void* data, size_t bytes) {
  return guarded([&] { input(check, name, data, bytes); });
}
attn_status attn_check_output(const attn_check* check, const char* name, const void* data,
                              size_t bytes, int* pass, char* text, size_t text_bytes,
                              size_t* needed) {
  return guarded(
      [&] { give_text(output(check, name, data, bytes, pass), text, text_bytes, needed); });
}
void attn_check_end(attn_check* check) { delete check; }

attn_status attn_cost(const char* operation, const attn_problem* problem, const char* gpu,
                      char* text, size_t bytes, size_t* needed) {
  return guarded([&] { give_text(cost(operation, problem, gpu), text, bytes, needed); });
}
attn_status attn_describe(const char* step, char* text, size_t bytes, size_t* needed) {
  return guarded([&] { give_text(describe(step), text, bytes, needed); });
}
attn_status attn_time(int (*launch)(void*), void* user, void* stream, double* seconds,
                      int* hidden) {
  return guarded([&] { time(launch, user, stream, seconds, hidden); });
}

}  // extern "C"
