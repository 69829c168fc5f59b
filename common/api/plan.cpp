#include "api/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "api/memory.h"
#include "api/make_plan.h"
#include "attn/error.h"
#include "attn/mask.h"
#include "attn/sliding_tiles.h"
#include "device/device.h"

namespace attn::api {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kLargestPage = 4096, kLatentDim = 576, kLatentValues = 512;

[[noreturn]] void invalid(std::string line) { throw Failure{ATTN_INVALID_VALUE, std::move(line)}; }

bool is_paged(Call call) {
  return call == Call::paged_decode || call == Call::paged_prefill || call == Call::paged_append;
}
bool takes_packed(Call call) {
  return call == Call::forward || call == Call::backward || call == Call::paged_prefill;
}
bool has_used_lengths(Call call) { return call == Call::decode || is_paged(call); }

DType dtype_of(Call call, int32_t dtype) {
  static constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32,
                                     DType::int8, DType::e4m3, DType::int4};
  if (dtype < 0 || dtype >= static_cast<int32_t>(std::size(kTypes)))
    invalid(fmt::format("dtype {}: must be one of attn_dtype, 0 to 5", dtype));
  const DType type = kTypes[dtype];
  const bool quantised = bits_of(type) < 16;
  if (quantised != (call == Call::quantised_forward) && call != Call::decode)
    invalid(fmt::format(
        "dtype {}: {} takes {}", name(type), text_of(call),
        call == Call::quantised_forward ? "int8, e4m3 and int4" : "bf16, fp16 and fp32"));
  return type;
}

// Lengths that are known on the device alone: as long as possible, with the same sum and maximum.
std::vector<int64_t> bounds(int64_t batch, int64_t longest, int64_t total, const char* of_total) {
  if (total < longest || total > batch * longest)
    invalid(fmt::format("{} {}: must be from {}, the longest sequence, to {}", of_total, total,
                        longest, batch * longest));
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < batch; ++b) {
    lengths.push_back(std::min(longest, total));
    total -= lengths.back();
  }
  return lengths;
}
std::vector<int64_t> given(const int64_t* lengths, int64_t batch, int64_t most, const char* which) {
  std::vector<int64_t> all(lengths, lengths + batch);
  for (std::size_t b = 0; b < all.size(); ++b)
    if (all[b] < 0 || all[b] > most)
      invalid(fmt::format("{}[{}] is {}: must be from 0 to {}", which, b, all[b], most));
  return all;
}

void set_lengths(Call call, const attn_problem& from, Known& known) {
  Problem& p = known.problem;
  if (from.packed && !takes_packed(call))
    invalid(fmt::format("packed: {} has no packed sequences", text_of(call)));
  if (!from.packed && from.lengths_q) invalid("lengths_q: only with packed sequences");
  if (from.packed) {
    if (!from.lengths_q != !from.lengths_k)
      invalid("lengths_q, lengths_k: both must be given, or none");
    if (from.lengths_q) {
      p.varlen_q = given(from.lengths_q, p.batch, p.seqlen_q, "lengths_q");
      p.varlen_k = given(from.lengths_k, p.batch, p.seqlen_k, "lengths_k");
      return;
    }
    known.host_lengths = false;
    p.varlen_q = bounds(p.batch, p.seqlen_q, from.total_q, "total_q");
    p.varlen_k = is_paged(call) ? std::vector(static_cast<std::size_t>(p.batch), p.seqlen_k)
                                : bounds(p.batch, p.seqlen_k, from.total_k, "total_k");
  } else if (has_used_lengths(call)) {
    known.host_lengths = from.lengths_k != nullptr;
    p.seqused_k = from.lengths_k ? given(from.lengths_k, p.batch, p.seqlen_k, "lengths_k")
                                 : std::vector(static_cast<std::size_t>(p.batch), p.seqlen_k);
  } else if (from.lengths_k) {
    invalid(fmt::format("lengths_k: {} has them only with packed sequences", text_of(call)));
  }
}

std::shared_ptr<const KeyMask> sliding_tiles(const attn_problem& from, const Problem& p) {
  const auto sides = [](const char* name, const int64_t* three) {
    const Sides s{three[0], three[1], three[2]};
    if (*std::ranges::min_element(s) < 1 || *std::ranges::max_element(s) > 1 << 20)
      invalid(fmt::format("{} {}: must be from 1 to 2^20", name, fmt::join(s, " x ")));
    return s;
  };
  const Sides canvas = sides("canvas", from.canvas), tile = sides("tile", from.tile);
  std::vector<Sides> windows;
  for (int64_t h = 0; h < p.heads; ++h)
    windows.push_back(
        sides("tile_windows", from.tile_windows + (from.mask_heads == 1 ? 0 : 3 * h)));
  const int64_t tokens = canvas[0] * canvas[1] * canvas[2];
  const int64_t blocks = p.seqlen_k / (tile[0] * tile[1] * tile[2]) + 1;
  if (p.seqlen_q != p.seqlen_k || p.seqlen_k < tokens)
    invalid(
        fmt::format("canvas: {} queries and {} keys: must be as many, the canvas of {} tokens "
                    "and text",
                    p.seqlen_q, p.seqlen_k, tokens));
  if (blocks > (int64_t{1} << 32) / blocks / p.heads)
    invalid(fmt::format("tile: {} tiles of {} heads: the mask must have at most 2^32 entries",
                        blocks, p.heads));
  try {
    return std::make_shared<SlidingTiles>(canvas, tile, windows, p.seqlen_k - tokens);
  } catch (const InputError& e) {  // in the words of the option --mask
    constexpr std::string_view kOption = "--mask sta: ";
    const std::string text = e.what();
    invalid("tile_windows: " + (text.starts_with(kOption) ? text.substr(kOption.size()) : text));
  }
}

void set_mask(Call call, const attn_problem& from, Problem& p) {
  const bool columns = from.hidden_begin || from.hidden_end, tiles = from.tile_windows != nullptr;
  if (!from.block_mask && !columns && !tiles) return;
  const char* const name = from.block_mask ? "block_mask"
                           : columns       ? "hidden_begin"
                                           : "tile_windows";
  if (call != Call::forward) invalid(fmt::format("{}: {} has no mask", name, text_of(call)));
  if ((from.block_mask != nullptr) + columns + tiles > 1)
    invalid("block_mask, hidden_begin, tile_windows: at most one of them may be given");
  if (columns && (!from.hidden_begin || !from.hidden_end))
    invalid("hidden_begin, hidden_end: both must be given, or none");
  int64_t count = 1;
  std::vector<int64_t> shape;
  const auto extent = [&](int64_t size) {
    shape.push_back(size);
    if (__builtin_mul_overflow(count, size, &count) || count > int64_t{1} << 40)
      invalid(fmt::format("{}: must have at most 2^40 entries", name));
  };
  for (const auto& [title, given, whole] : {std::tuple{"mask_batch", from.mask_batch, p.batch},
                                            std::tuple{"mask_heads", from.mask_heads, p.heads}}) {
    if (given != 1 && given != whole)
      invalid(fmt::format("{} {}: must be 1 or {}", title, given, whole));
    extent(given);
  }
  if (tiles) {
    p.mask = sliding_tiles(from, p);
    return;
  }
  if (columns) {
    if (from.mask_intervals != 1 && from.mask_intervals != 2)
      invalid(fmt::format("mask_intervals {}: must be 1 or 2", from.mask_intervals));
    extent(from.mask_intervals), extent(p.seqlen_k);
    std::vector<int64_t> begin(from.hidden_begin, from.hidden_begin + count),
        end(from.hidden_end, from.hidden_end + count);
    for (std::size_t n = 0; n < begin.size(); ++n)
      if (begin[n] < 0 || end[n] < 0)
        invalid(fmt::format("hidden_begin[{}] {}, hidden_end[{}] {}: must be queries, from 0 on", n,
                            begin[n], n, end[n]));
    p.mask = std::make_shared<ColumnIntervals>(shape, std::move(begin), std::move(end));
    return;
  }
  if (from.block_m < 1 || from.block_n < 1)
    invalid(fmt::format("block_m {}, block_n {}: must be from 1", from.block_m, from.block_n));
  extent((p.seqlen_q - 1) / from.block_m + 1), extent((p.seqlen_k - 1) / from.block_n + 1);
  if (const auto* bad = std::find_if(from.block_mask, from.block_mask + count,
                                     [](uint8_t value) { return value > 1; });
      bad != from.block_mask + count)
    invalid(fmt::format("block_mask[{}] is {}: must be 0 or 1", bad - from.block_mask, *bad));
  p.mask = std::make_shared<BlockMask>(from.block_m, from.block_n, shape,
                                       std::vector<bool>(from.block_mask, from.block_mask + count));
}

// The tensors of a call, without their places.
std::vector<Slot> slots_of(Call call, const Problem& p) {
  const bool quantised = bits_of(p.dtype) < 16;
  const int64_t bytes = quantised ? 2 : size_of(p.dtype);
  const bool latent = call == Call::paged_decode && p.head_dim == kLatentDim && p.kv_heads == 1;
  std::vector<Slot> slots;
  const auto add = [&](const char* name, attn_tensor attn_tensors::*tensor, int64_t heads,
                       int64_t rows, int64_t tokens, bool read) {
    Slot slot{.name = name, .tensor = tensor, .read = read, .written = !read};
    slot.element_bytes = bytes;
    slot.packed = tokens >= 0;
    const int64_t columns = latent && slot.name == "o" ? kLatentValues : p.head_dim;
    const int64_t shape[4] = {slot.packed ? 1 : p.batch, heads, slot.packed ? tokens : rows,
                              columns};
    std::copy_n(shape, 4, slot.shape);
    slots.push_back(slot);
    return &slots.back();
  };
  const auto add_array = [&](const char* name, const void* (*array)(const attn_tensors&),
                             bool written = false) {
    Slot slot{.name = name, .tensor = nullptr, .array = array, .read = !written};
    slot.written = written;
    slots.push_back(slot);
  };
  const int64_t tokens_q = p.varlen() ? p.tokens_q() : -1,
                tokens_k = p.varlen() ? p.tokens_k() : -1;
  const auto like_q = [&](const char* name, attn_tensor attn_tensors::*tensor, bool read) {
    add(name, tensor, p.heads, p.seqlen_q, tokens_q, read);
  };
  const auto like_k = [&](const char* name, attn_tensor attn_tensors::*tensor, bool read) {
    Slot& slot = *add(name, tensor, p.kv_heads, p.seqlen_k, is_paged(call) ? -1 : tokens_k, read);
    slot.pool = is_paged(call);
    if (call == Call::paged_append) slot.written = true;
  };

  if (call == Call::paged_append) {
    add("k_new", &attn_tensors::k_new, p.kv_heads, 0, p.batch * p.seqlen_q, true);
    add("v_new", &attn_tensors::v_new, p.kv_heads, 0, p.batch * p.seqlen_q, true);
  } else {
    like_q("q", &attn_tensors::q, true);
    like_q("o", &attn_tensors::o, call == Call::backward);
    add_array(
        "lse", [](const attn_tensors& t) -> const void* { return t.lse; }, call != Call::backward);
  }
  like_k("k", &attn_tensors::k, true);
  if (!latent) like_k("v", &attn_tensors::v, true);
  if (call == Call::backward) {
    like_q("do", &attn_tensors::dout, true);
    like_q("dq", &attn_tensors::dq, false);
    like_k("dk", &attn_tensors::dk, false);
    like_k("dv", &attn_tensors::dv, false);
  }
  if (p.own.contains("sinks"))
    add_array("sinks", [](const attn_tensors& t) -> const void* { return t.sinks; });
  if (p.alibi) add_array("alibi", [](const attn_tensors& t) -> const void* { return t.alibi; });
  if (p.varlen()) {
    add_array("cu_seqlens_q", [](const attn_tensors& t) -> const void* { return t.cu_seqlens_q; });
    if (!is_paged(call))
      add_array("cu_seqlens_k",
                [](const attn_tensors& t) -> const void* { return t.cu_seqlens_k; });
  }
  if (has_used_lengths(call))
    add_array("seqused_k", [](const attn_tensors& t) -> const void* { return t.seqused_k; });
  if (is_paged(call))
    add_array("page_table", [](const attn_tensors& t) -> const void* { return t.page_table; });
  return slots;
}

HostTensors known_tensors(Call call, const Problem& p, const int32_t* page_table) {
  HostTensors tensors;
  const auto add = [&](const char* name, std::vector<int64_t> numbers) {
    HostTensor t{{name, {1, 1, 1, static_cast<int64_t>(numbers.size())}, DType::int32}};
    t.numbers = std::move(numbers);
    tensors.emplace(name, std::move(t));
  };
  if (has_used_lengths(call)) add("seqused_k", p.varlen() ? p.varlen_k : p.seqused_k);
  if (p.varlen()) add("cu_seqlens_q", cumulative(p.varlen_q));
  if (page_table) {
    const auto columns = static_cast<int64_t>(p.own.at("max_pages")[0]);
    add("page_table", {page_table, page_table + p.batch * columns});
    tensors.at("page_table").spec.shape[2] = p.batch;
    tensors.at("page_table").spec.shape[3] = columns;
  }
  return tensors;
}

// Workspaces that `prepare` fills with other things than counters depend on the inputs.
bool is_counter(const std::string& workspace) {
  return workspace.find("counter") != workspace.npos || workspace == "arrived" ||
         workspace == "tickets";
}

const NamedStep& choose(Call call, const Known& known, const char* wanted) {
  const std::string operation = operation_of(call, known.problem);
  const std::vector<const NamedStep*> steps = by_preference(operation, known.problem);
  if (!wanted) {
    for (const NamedStep* named : steps)
      if (!reason_against(*named, known)) return *named;
    throw Failure{ATTN_UNSUPPORTED,
                  fmt::format("{}: no step takes this problem; {}: {} (attn_which says why of all)",
                              text_of(call), steps.empty() ? "none" : steps[0]->name,
                              steps.empty() ? "is built" : *reason_against(*steps[0], known))};
  }
  const auto found = std::ranges::find(all_steps(), std::string_view(wanted), &NamedStep::name);
  if (found == all_steps().end())
    invalid(fmt::format("step {}: no such step; attn_steps() lists all", wanted));
  if (found->step->operation->name != operation)
    invalid(fmt::format("step {}: a step of {}, not of {}", wanted, found->step->operation->name,
                        operation));
  const auto reason = reason_against(*found, known);
  if (!reason) return *found;
  std::string line = fmt::format("{}: {}", wanted, *reason);
  if (found->step->plan && !known.host_lengths) {
    std::vector<std::string> others;
    for (const NamedStep* named : steps)
      if (!reason_against(*named, known)) others.push_back(named->name);
    line += fmt::format("; without: {}", fmt::join(others, ", "));
  }
  throw Failure{ATTN_UNSUPPORTED, line};
}

}  // namespace

std::string_view text_of(Call call) {
  static constexpr std::string_view kNames[] = {"forward",          "backward",      "decode",
                                                "paged_decode",     "paged_prefill", "paged_append",
                                                "quantised_forward"};
  return kNames[static_cast<int>(call)];
}

std::string operation_of(Call call, const Problem& p) {
  if (call == Call::quantised_forward) return "forward";
  if (call == Call::paged_decode && p.head_dim == kLatentDim && p.kv_heads == 1) return "paged_mla";
  return std::string(text_of(call));
}

Known known_of(Call call, const attn_problem* from) {
  if (!from) invalid("problem: is null");
  if (from->size != sizeof(attn_problem))
    invalid(fmt::format("problem: size {}, must be {}: call attn_problem_defaults", from->size,
                        sizeof(attn_problem)));
  Known known;
  if (from->backend == ATTN_GPU) {
    if (!gpu_info().available)
      throw Failure{ATTN_DEVICE_ERROR, fmt::format("backend GPU: there is none ({}); ATTN_EMULATED "
                                                   "runs without",
                                                   gpu_info().error)};
    known.device = Device(Backend::gpu, current_gpu());
  } else if (from->backend != ATTN_EMULATED) {
    invalid(fmt::format("backend {}: must be 0 (GPU) or 1 (emulated)", from->backend));
  }
  known.deterministic = from->deterministic != 0;
  Problem& p = known.problem;
  const auto positive = [](const char* name, int64_t value, int64_t most) {
    if (value < 1 || value > most)
      invalid(fmt::format("{} {}: must be from 1 to {}", name, value, most));
    return value;
  };
  constexpr int64_t kMost = (int64_t{1} << 30) - 1;
  p.dtype = dtype_of(call, from->dtype);
  p.batch = positive("batch", from->batch, kMost);
  p.heads = positive("heads", from->heads, kMost);
  p.kv_heads = positive("kv_heads", from->kv_heads, kMost);
  p.seqlen_q = positive("seqlen_q", from->seqlen_q, kMost);
  p.head_dim = positive("head_dim", from->head_dim, 1 << 16);
  if (is_paged(call)) {
    const int64_t size = positive("page_size", from->page_size, kLargestPage);
    const int64_t columns = positive("max_pages", from->max_pages, kMost / size);
    p.own["page_size"] = {double(size)};
    p.own["max_pages"] = {double(columns)};
    p.own["num_pages"] = {double(positive("num_pages", from->num_pages, kMost))};
    p.seqlen_k = size * columns;
  } else {
    p.seqlen_k = positive("seqlen_k", from->seqlen_k, kMost);
  }
  p.causal = from->causal != 0;
  p.window_left = std::min(from->window_left, kMost);
  p.window_right = std::min(from->window_right, kMost);
  p.softmax_scale = from->softmax_scale;
  p.softcap = from->softcap;
  p.alibi = from->alibi != 0;
  p.dropout = from->dropout;
  p.seed = from->seed;
  if (p.dropout != 0 && call != Call::forward && call != Call::backward)
    invalid(fmt::format("dropout: {} has none", text_of(call)));
  if (from->sinks && call != Call::paged_decode)
    invalid(fmt::format("sinks: {} has none", text_of(call)));
  if (from->sinks) p.own["sinks"] = {1};
  if (call == Call::paged_append && p.seqlen_q > p.seqlen_k)
    invalid(fmt::format("seqlen_q {}: more new tokens than the {} that a sequence has room for",
                        p.seqlen_q, p.seqlen_k));
  set_lengths(call, *from, known);
  set_mask(call, *from, p);
  p.finish();
  if (p.empty()) invalid("lengths: at least one sequence must have queries, and one keys");
  return known;
}

std::unique_ptr<attn_plan> make_plan(Call call, const attn_problem* from) {
  auto plan = std::make_unique<attn_plan>();
  const Known known = known_of(call, from);
  plan->problem = known.problem;
  plan->device = known.device;
  plan->named = &choose(call, known, from->step);
  const Problem& p = plan->problem;
  const Step& step = *plan->named->step;

  int64_t offset = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t at = offset;
    offset += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  // What attn_prepare copies to the workspace.
  const auto keep = [&](const std::string& name, const HostTensor& tensor) {
    std::vector<std::byte> bytes = to_bytes(tensor);
    const auto size = static_cast<int64_t>(bytes.size());
    plan->regions.push_back({name, place(size), size, std::move(bytes)});
  };
  for (const Workspace& w : step.workspaces(p)) {
    plan->regions.push_back({w.name, place(w.bytes), w.bytes});
    if (!w.saved || !step.prepare.on(plan->device.backend)) continue;
    plan->prepare_step = true;
    plan->prepare_reads |= !is_counter(w.name);
  }
  if (step.plan) {
    HostTensors tensors;
    try {
      tensors =
          step.plan(p, known_tensors(call, p, is_paged(call) ? from->host_page_table : nullptr));
    } catch (const std::out_of_range&) {
      throw Failure{ATTN_UNSUPPORTED, plan->named->name +
                                          ": schedules by the contents of the page table: "
                                          "host_page_table must be given"};
    }
    for (const auto& [name, tensor] : tensors) keep(name, tensor);
  }
  if (p.mask && !from->block_mask)  // of a block mask, kernels read the plan's lists alone
    for (const HostTensor& tensor : p.mask->tensors()) keep(tensor.spec.name, tensor);
  plan->slots = slots_of(call, p);
  for (Slot& slot : plan->slots) {
    if (from->copy_strided && slot.tensor && !slot.pool) slot.copy = place(slot.bytes());
    if (call != Call::backward || !plan->prepare_step) continue;
    if (slot.name == "o") plan->scratch_o = place(slot.bytes());
    if (slot.name == "lse") plan->scratch_lse = place(4 * p.heads * p.batch * p.seqlen_q);
  }
  plan->workspace_bytes = offset;
  return plan;
}

}  // namespace attn::api
