// The C functions of attention.h: checks of a call's arguments, and the launch.
#include "api/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "api/guarded.h"
#include "api/make_plan.h"
#include "api/memory.h"
#include "device/device.h"

namespace attn::api {
namespace {

bool aligned(const void* pointer, std::uintptr_t to) {
  return reinterpret_cast<std::uintptr_t>(pointer) % to == 0;
}

// Arguments of a plan for one launch.
class Lease {
 public:
  Lease(attn_plan& plan, Stream stream) : plan_(plan) {
    {
      const std::lock_guard lock(plan.mutex);
      if (!plan.free.empty()) {
        arguments_ = std::move(plan.free.back());
        plan.free.pop_back();
      }
    }
    if (!arguments_) arguments_ = std::make_unique<Arguments>(plan.problem, plan.device);
    arguments_->stream = stream;
  }
  ~Lease() {
    const std::lock_guard lock(plan_.mutex);
    plan_.free.push_back(std::move(arguments_));
  }
  Lease(const Lease&) = delete;
  Arguments& operator*() const { return *arguments_; }
  Arguments* operator->() const { return arguments_.get(); }

 private:
  attn_plan& plan_;
  std::unique_ptr<Arguments> arguments_;
};

// The emulator runs one launch at a time.
std::unique_lock<std::mutex> only_launch(const attn_plan& plan) {
  static std::mutex mutex;
  return plan.device.backend == Backend::emulated ? std::unique_lock(mutex)
                                                  : std::unique_lock<std::mutex>();
}

// A tensor of a call: its strides, and whether it must be copied.
struct Given {
  const Slot* slot;
  void* data;
  int64_t batch, head, row;
  bool copied = false;
};

Given checked(const Slot& slot, const attn_tensors& tensors) {
  const char* const name = slot.name.c_str();
  Given given{&slot, nullptr, 0, 0, 0};
  if (!slot.tensor) {
    given.data = const_cast<void*>(not_null(slot.array(tensors), name));
    if (!aligned(given.data, 16))
      fail(ATTN_INVALID_VALUE, fmt::format("{}: must be aligned to 16 bytes", name));
    return given;
  }
  const attn_tensor& t = tensors.*slot.tensor;
  given.data = not_null(t.data, name);
  const int64_t row = slot.stride_row(), head = slot.stride_head(),
                batch = slot.shape[1] * slot.shape[2] * slot.shape[3];
  const bool none = t.stride_batch == 0 && t.stride_head == 0 && t.stride_row == 0;
  given.batch = none ? batch : t.stride_batch;
  given.head = none ? head : t.stride_head;
  given.row = none ? row : t.stride_row;
  const bool contiguous = (slot.shape[0] == 1 || given.batch == batch) &&
                          (slot.shape[1] == 1 || given.head == head) &&
                          (slot.shape[2] == 1 || given.row == row);
  const bool offset = !aligned(given.data, 16);
  if (!aligned(given.data, static_cast<std::uintptr_t>(slot.element_bytes)))
    fail(ATTN_INVALID_VALUE,
         fmt::format("{}: must be aligned to its elements of {} bytes", name, slot.element_bytes));
  if (contiguous && !offset) return given;
  if (slot.copy < 0)
    fail(ATTN_INVALID_VALUE,
         slot.pool ? fmt::format("{}: pages must be contiguous and aligned to 16 bytes", name)
         : offset  ? fmt::format("{}: must be aligned to 16 bytes, or copied (copy_strided)", name)
                   : fmt::format("{}: strides {}, {}, {} are not contiguous ({}, {}, {}): set "
                                  "copy_strided to have it copied",
                                 name, given.batch, given.head, given.row, batch, head, row));
  // An output must not overlap itself; negative strides are not supported.
  const int64_t columns = slot.shape[3];
  struct Side {
    int64_t stride, count;
  };
  Side sides[] = {
      {given.row, slot.shape[2]}, {given.head, slot.shape[1]}, {given.batch, slot.shape[0]}};
  std::ranges::sort(sides, {}, &Side::stride);
  int64_t extent = columns;
  for (const auto& [stride, count] : sides) {
    if (count == 1) continue;
    if (stride < extent)
      fail(ATTN_INVALID_VALUE, fmt::format("{}: strides {}, {}, {} overlap rows of {} elements",
                                           name, given.batch, given.head, given.row, columns));
    if (__builtin_mul_overflow(stride, count - 1, &extent) ||
        __builtin_add_overflow(extent, stride, &extent) || extent > int64_t{1} << 60)
      fail(ATTN_INVALID_VALUE, fmt::format("{}: strides reach beyond 2^60 elements", name));
  }
  given.copied = true;
  return given;
}

void copy(const attn_plan& plan, const Given& g, std::byte* workspace, bool back, Stream stream) {
  const Slot& slot = *g.slot;
  Strided s{slot.shape[0],
            slot.shape[1],
            slot.shape[2],
            slot.shape[3],
            g.batch,
            g.head,
            g.row,
            slot.shape[1] * slot.shape[2] * slot.shape[3],
            slot.stride_head(),
            slot.stride_row()};
  void* const contiguous = workspace + slot.copy;
  if (back) {
    std::swap(s.from_batch, s.to_batch);
    std::swap(s.from_head, s.to_head);
    std::swap(s.from_row, s.to_row);
  }
  check(copy_strided(plan.device, back ? g.data : contiguous, back ? contiguous : g.data, s,
                     static_cast<int>(slot.element_bytes), stream));
}

void check_call(const attn_plan* plan, const attn_tensors* tensors, const void* workspace,
                size_t bytes) {
  not_null(plan, "plan");
  if (tensors && tensors->size != sizeof(attn_tensors))
    fail(ATTN_INVALID_VALUE, fmt::format("tensors: size {}, must be {} (sizeof(attn_tensors))",
                                         tensors->size, sizeof(attn_tensors)));
  const auto needed = static_cast<size_t>(plan->workspace_bytes);
  if (bytes < needed)
    fail(ATTN_WORKSPACE,
         fmt::format("workspace: {} bytes, {} needs {}", bytes, plan->named->name, needed));
  if (needed > 0) not_null(workspace, "workspace");
  if (needed > 0 && !aligned(workspace, 256))
    fail(ATTN_INVALID_VALUE, "workspace: must be aligned to 256 bytes");
  if (plan->device.backend == Backend::gpu && current_gpu() != plan->device.ordinal)
    fail(ATTN_DEVICE_ERROR, fmt::format("the current GPU is {}, the plan is for {}", current_gpu(),
                                        plan->device.ordinal));
}

// Most operations have at most this many tensors.
struct Tensors {
  Given all[16];
  std::size_t count = 0;
  const Given* begin() const { return all; }
  const Given* end() const { return all + count; }
};
Tensors checked(const attn_plan& plan, const attn_tensors& tensors) {
  Tensors given;
  for (const Slot& slot : plan.slots) given.all[given.count++] = checked(slot, tensors);
  return given;
}

// Binds and copies what is read; nothing is launched if a tensor is refused.
void set_pointers(const attn_plan& plan, Arguments& arguments, const Tensors& given,
                  std::byte* workspace) {
  for (const auto& region : plan.regions) arguments.bind(region.name, workspace + region.offset);
  for (const Given& g : given) {
    arguments.bind(g.slot->name, g.copied ? workspace + g.slot->copy : g.data);
    if (g.copied && g.slot->read) copy(plan, g, workspace, false, arguments.stream);
  }
}

const void* k_of(const attn_plan& plan, const attn_tensors* tensors) {
  return plan.prepare_reads && tensors ? tensors->k.data : nullptr;
}

void prepare(attn_plan* plan, const attn_tensors* tensors, void* workspace, size_t bytes,
             void* stream) {
  check_call(plan, tensors, workspace, bytes);
  if (plan->prepare_reads) not_null(tensors, "tensors");
  const auto lock = only_launch(*plan);
  auto* const base = static_cast<std::byte*>(workspace);
  const Lease arguments(*plan, stream);
  set_pointers(*plan, *arguments, plan->prepare_reads ? checked(*plan, *tensors) : Tensors(), base);
  for (const auto& region : plan->regions)
    if (!region.contents.empty())
      check(upload(plan->device, base + region.offset, region.contents.data(),
                   region.contents.size(), stream));
  if (plan->prepare_step) {
    if (plan->scratch_o >= 0) {
      arguments->bind("o", base + plan->scratch_o);
      arguments->bind("lse", base + plan->scratch_lse);
    }
    check(plan->named->step->prepare.on(plan->device.backend)(*arguments));
  }
  const std::lock_guard members(plan->mutex);
  auto& all = plan->prepared;
  std::erase_if(all, [&](const auto& p) { return p.workspace == workspace; });
  all.push_back({workspace, k_of(*plan, tensors)});
}

void run(attn_plan* plan, const attn_tensors* tensors, void* workspace, size_t bytes,
         void* stream) {
  check_call(plan, not_null(tensors, "tensors"), workspace, bytes);
  const Tensors given = checked(*plan, *tensors);
  if (plan->workspace_bytes > 0) {
    const std::lock_guard lock(plan->mutex);
    const auto found =
        std::ranges::find(plan->prepared, workspace, &attn_plan::Prepared::workspace);
    if (found == plan->prepared.end())
      fail(ATTN_WORKSPACE, "workspace: not prepared for this plan: call attn_prepare first");
    if (found->k != k_of(*plan, tensors))
      fail(ATTN_WORKSPACE, "workspace: prepared with another k: call attn_prepare again");
  }
  const auto lock = only_launch(*plan);
  auto* const base = static_cast<std::byte*>(workspace);
  const Lease arguments(*plan, stream);
  set_pointers(*plan, *arguments, given, base);
  check(plan->named->step->launch.on(plan->device.backend)(*arguments));
  for (const Given& g : given)
    if (g.copied && g.slot->written) copy(*plan, g, base, true, stream);
}

attn_status plan_of(Call call, const attn_problem* problem, attn_plan** plan) {
  return guarded([&] { *not_null(plan, "plan") = make_plan(call, problem).release(); });
}
attn_status bytes_of(Call call, const attn_problem* problem, size_t* bytes) {
  return guarded([&] {
    *not_null(bytes, "bytes") = static_cast<size_t>(make_plan(call, problem)->workspace_bytes);
  });
}
attn_status call_of(Call call, const attn_problem* problem, const attn_tensors* tensors,
                    void* workspace, size_t bytes, void* stream) {
  return guarded([&] {
    const std::unique_ptr<attn_plan> plan = make_plan(call, problem);
    check_call(plan.get(), not_null(tensors, "tensors"), workspace, bytes);
    (void)checked(*plan, *tensors);  // before anything is launched
    if (plan->workspace_bytes > 0) prepare(plan.get(), tensors, workspace, bytes, stream);
    run(plan.get(), tensors, workspace, bytes, stream);
  });
}

std::string which(const char* operation, const attn_problem* problem) {
  const Call call = call_named(operation);
  const Known known = known_of(call, problem);
  std::string text;
  bool best = true;
  for (const NamedStep* named :
       by_preference(operation_of(call, known.problem), known.problem)) {
    const auto reason = reason_against(*named, known);
    text += fmt::format("{:<40} {}\n", named->name,
                        reason ? "no: " + *reason
                        : best ? "best"
                               : "yes");
    if (!reason) best = false;
  }
  return text;
}

}  // namespace

std::string& last_error() {
  thread_local std::string line;
  return line;
}

Call call_named(const char* operation) {
  for (const Call call : {Call::forward, Call::backward, Call::decode, Call::paged_decode,
                          Call::paged_prefill, Call::paged_append, Call::quantised_forward})
    if (text_of(call) == not_null(operation, "operation")) return call;
  fail(ATTN_INVALID_VALUE,
       fmt::format("operation {}: must be forward, backward, decode, paged_decode, paged_prefill, "
                   "paged_append or quantised_forward",
                   operation));
}

void give_text(const std::string& all, char* text, size_t bytes, size_t* needed) {
  if (needed) *needed = all.size() + 1;
  if (bytes == 0) return;
  const size_t length = std::min(bytes - 1, all.size());
  std::memcpy(not_null(text, "text"), all.data(), length);
  text[length] = 0;
}

}  // namespace attn::api

using namespace attn::api;

extern "C" {

void attn_problem_defaults(attn_problem* problem) {
  if (!problem) return;
  *problem = {};
  problem->size = sizeof *problem;
  problem->batch = problem->heads = problem->kv_heads = 1;
  problem->seqlen_q = problem->seqlen_k = problem->head_dim = 1;
  problem->window_left = problem->window_right = -1;
  problem->block_m = problem->block_n = 128;
  problem->mask_batch = problem->mask_heads = problem->mask_intervals = 1;
}

#define ATTN_OPERATION(X)                                                                         \
  attn_status attn_##X##_plan(const attn_problem* problem, attn_plan** plan) {                    \
    return plan_of(Call::X, problem, plan);                                                       \
  }                                                                                               \
  attn_status attn_##X##_workspace_bytes(const attn_problem* problem, size_t* bytes) {            \
    return bytes_of(Call::X, problem, bytes);                                                     \
  }                                                                                               \
  attn_status attn_##X(const attn_problem* problem, const attn_tensors* tensors, void* workspace, \
                       size_t workspace_bytes, void* stream) {                                    \
    return call_of(Call::X, problem, tensors, workspace, workspace_bytes, stream);                \
  }
ATTN_OPERATION(forward)
ATTN_OPERATION(backward)
ATTN_OPERATION(decode)
ATTN_OPERATION(paged_decode)
ATTN_OPERATION(paged_prefill)
ATTN_OPERATION(paged_append)
ATTN_OPERATION(quantised_forward)

size_t attn_plan_workspace_bytes(const attn_plan* plan) {
  return plan ? static_cast<size_t>(plan->workspace_bytes) : 0;
}
const char* attn_plan_step(const attn_plan* plan) { return plan ? plan->named->name.c_str() : ""; }
int attn_plan_prepare_reads_tensors(const attn_plan* plan) {
  return plan && plan->prepare_reads ? 1 : 0;
}
attn_status attn_prepare(attn_plan* plan, const attn_tensors* tensors, void* workspace,
                         size_t workspace_bytes, void* stream) {
  return guarded([&] { prepare(plan, tensors, workspace, workspace_bytes, stream); });
}
attn_status attn_run(attn_plan* plan, const attn_tensors* tensors, void* workspace,
                     size_t workspace_bytes, void* stream) {
  return guarded([&] { run(plan, tensors, workspace, workspace_bytes, stream); });
}
void attn_plan_destroy(attn_plan* plan) { delete plan; }

attn_status attn_allocate(int32_t backend, size_t bytes, void** memory) {
  return guarded([&] {
    if (backend != ATTN_GPU && backend != ATTN_EMULATED)
      fail(ATTN_INVALID_VALUE, fmt::format("backend {}: must be 0 (GPU) or 1 (emulated)", backend));
    check(allocate(backend == ATTN_GPU ? attn::Backend::gpu : attn::Backend::emulated, bytes,
                   not_null(memory, "memory")));
  });
}
void attn_free(int32_t backend, void* memory) {
  release(backend == ATTN_GPU ? attn::Backend::gpu : attn::Backend::emulated, memory);
}
int attn_current_gpu(void) { return current_gpu(); }
attn_status attn_record(void* stream, void** mark) {
  return guarded([&] { check(record(stream, not_null(mark, "mark"))); });
}
int attn_done(void* mark) { return done(mark) ? 1 : 0; }
attn_status attn_stream_wait(void* stream, void* other) {
  return guarded([&] { check(stream_wait(stream, other)); });
}

const char* attn_last_error(void) { return last_error().c_str(); }

const char* attn_steps(void) {
  static const std::string all = [] {
    std::string text;
    for (const NamedStep& named : all_steps())
      text += named.name + " " + named.step->operation->name + "\n";
    return text;
  }();
  return all.c_str();
}

attn_status attn_which(const char* operation, const attn_problem* problem, char* text, size_t bytes,
                       size_t* needed) {
  return guarded([&] {
    give_text(which(operation, problem), text, bytes, needed);
  });
}

}  // extern "C"
