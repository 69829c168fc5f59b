/// \file
/// What a chapter is made of: steps. A step is one file with kernels and a launch(); this header is
/// what that file and the chapter's table share. It is compiled by nvcc too: no Eigen here.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/cost.h"
#include "attn/problem.h"
#include "attn/status.h"
#include "attn/tensor.h"

namespace attn {

enum class Backend { gpu, emulated };

/// One of the GPUs, by its number, or the emulator. A back end alone means the GPU in use
/// (device.h).
struct Device {
  static constexpr int kInUse = -1;
  Backend backend = Backend::emulated;
  int ordinal = kInUse;
  constexpr Device(Backend b, int number = kInUse) : backend(b), ordinal(number) {}
  bool operator==(const Device&) const = default;
};

/// A tile of queries: the query head, counted over the batch, and the row block in it.
struct QueryTile {
  int64_t head, m_block;
};

/// The tiles of S and the order in which thread blocks take tiles of queries, as a launch reports
/// them (Arguments::report_tiling). Default order: one section of heads after the other; within a
/// section the last row blocks of all its heads first (LPT under a causal mask).
struct Tiling {
  int64_t block_m, block_n;  ///< B_r, B_c
  int64_t section = 1;       ///< query heads per section; 1: one head after the other
  int blocks_per_sm = 1;     ///< resident thread blocks per SM
  /// rows that skip a KV block together, where a warp skips for its rows alone; 0: block_m
  int64_t rows_together = 0;
  /// Another order: the tile that is taken `index`-th, a permutation of all tiles. Null: as above.
  std::function<QueryTile(int64_t index)> order = {};
};

/// A CUDA stream; nullptr is the default stream (and the only one of the emulator).
using Stream = void*;

/// The arguments of a launch: the problem, and device pointers by name. Inputs of the operation,
/// outputs and workspaces are all in one table.
class Arguments {
 public:
  Arguments(const Problem& p, Device d) : problem(p), device(d), backend(d.backend) {}

  const Problem& problem;
  Device device;
  Backend backend;  ///< device.backend
  Stream stream = nullptr;

  void bind(const std::string& name, void* pointer) { pointers_[name] = pointer; }

  /// The device pointer of an input (q, k, v, do ...).
  template <class T>
  const T* in(const std::string& name) const {
    return static_cast<const T*>(pointers_.at(name));
  }
  /// The same, or nullptr where the problem has no such input (alibi ...).
  template <class T>
  const T* in_or_null(const std::string& name) const {
    const auto found = pointers_.find(name);
    return found == pointers_.end() ? nullptr : static_cast<const T*>(found->second);
  }
  /// The device pointer of an output or a workspace.
  template <class T>
  T* out(const std::string& name) const {
    return static_cast<T*>(pointers_.at(name));
  }
  /// The same, or nullptr where the step has no such workspace.
  template <class T>
  T* out_or_null(const std::string& name) const {
    const auto found = pointers_.find(name);
    return found == pointers_.end() ? nullptr : static_cast<T*>(found->second);
  }

  /// Marks the start of a phase of the step's cost, for whoever times the launch.
  void phase(std::string_view name) const {
    if (on_phase) on_phase(name);
  }
  std::function<void(std::string_view)> on_phase;

  /// Says what would be launched. Returns true if that is all that was asked for: then nothing may
  /// be launched.
  bool report_tiling(const Tiling& tiling) const {
    if (on_tiling) on_tiling(tiling);
    return on_tiling != nullptr;
  }
  std::function<void(const Tiling&)> on_tiling;

 private:
  std::map<std::string, void*> pointers_;
};

/// Device memory that a step needs besides inputs and outputs.
struct Workspace {
  std::string name;
  int64_t bytes;
  bool saved = false;  ///< filled by `prepare` (as a forward pass leaves it), then only read
};

using LaunchFunction = Status (*)(const Arguments&);

/// One function on both back ends. Null where a back end was not built. `recorded`: the GPU's in a
/// build that records a timeline (attn/record.h), of steps with marks.
struct Launch {
  LaunchFunction gpu = nullptr, emulated = nullptr, recorded = nullptr;
  LaunchFunction on(Backend b) const { return b == Backend::gpu ? gpu : emulated; }
  explicit operator bool() const { return gpu || emulated; }
};

/// What a GPU must have to run a step: instructions, and the compute capability, times ten, from
/// which on there are such. Those of sm_90a are in no later GPU.
struct GpuNeeds {
  int compute_capability = 0;
  bool no_later = false;
  std::string_view instructions = {};
};
inline constexpr GpuNeeds kAmpere{80, false, "mma.sync for bf16"};
inline constexpr GpuNeeds kHopper{90, true, "wgmma"};
/// Of a step that has none of these instructions, in a file compiled for sm_90a.
inline constexpr GpuNeeds kHopperTarget{90, true, {}};

struct Operation;  // check/operation.h

/// Reads a workspace of the step that was launched last, by its name, as 32-bit words.
using ReadWorkspace = std::function<std::vector<int32_t>(const std::string& name)>;

/// The values of single options that a step takes. Empty, or 0: any.
struct Limits {
  std::vector<DType> dtypes = {};
  std::vector<int64_t> head_dims = {};
  int64_t most_queries = 0, most_keys = 0;  ///< --seqlen-q, --seqlen-k
  double least_scale = 0;                   ///< --scale
};
/// Of tensor cores: fp16 and bf16.
inline const std::vector<DType> k16Bits{DType::fp16, DType::bf16};
/// A smaller softmax scale is 0 or a subnormal as a float; a step that multiplies a masked score
/// (-inf) by the scale gets NaN then.
inline constexpr double kLeastScale = 1e-37;
/// The same of a step that multiplies the scale by those of quantised Q and K.
inline constexpr double kLeastQuantisedScale = 1e-10;

/// One row of a chapter's table.
struct Step {
  std::string name;                      ///< as its file: "v1_global"
  const Operation* operation = nullptr;  ///< &forward(), &backward(), or one of the chapter's own
  std::string idea;       ///< one line: what this step changes
  std::string support;    ///< which problems it accepts beyond `limits`, for --list
  Limits limits = {};     ///< refusal() says what is outside of them
  /// What else a problem has that the step cannot do, as the size of a grid, or nothing. Null: all
  /// is said by `limits` and `takes`.
  std::function<std::optional<std::string>(const Problem&)> refuses;
  std::function<std::vector<Workspace>(const Problem&)> workspaces;
  std::function<Cost(const Problem&)> cost;
  Launch launch;
  /// Choices of a launch that are no outputs and that --save writes next to them: the blocks that a
  /// step visits, an order of tokens. Null: none.
  std::function<HostTensors(const Problem&, const ReadWorkspace&)> choices = {};
  Launch prepare = {};            ///< run once before, untimed: what a forward pass keeps
  bool deterministic = true;      ///< bit-equal from run to run
  GpuNeeds needs = {};            ///< on a GPU; the emulator has all instructions
  /// Its launch reports its tiles (Arguments::report_tiling). Its cost has K and V once; cost_of
  /// adds the reads that miss L2 to the phase "attention".
  bool tiled = false;
  /// Features that it has (feature.h) of those which not every step has: "softcap", "varlen" ...
  std::vector<std::string> takes = {};
  /// What is worked out on the host before a launch: tensors by name, which the launch gets on the
  /// device. A function of the problem and of those inputs alone that are lengths, tables and masks
  /// (made, or of an index type); its time stands in a row of its own.
  std::function<HostTensors(const Problem&, const HostTensors& inputs)> plan = {};
  /// Of a step that stores its inputs in fewer bits: the q, k, v that it multiplies then, computed
  /// independently of the kernel, so a few codes may differ by one. It is checked against the
  /// reference of these (expected_of); how far it is from that of the inputs is printed next to it.
  /// Null: the inputs.
  std::function<HostTensors(const Problem&, const HostTensors& inputs)> logical = {};
};

/// The reason why a step cannot do a problem, or nothing.
std::optional<std::string> refusal(const Step&, const Problem&);
/// Whether a step says that it has a feature.
bool takes(const Step&, std::string_view feature);

/// What a GPU of that name and compute capability (times ten) lacks to run a step, or nothing.
inline std::optional<std::string> lacks(const Step& step, std::string_view gpu,
                                        int compute_capability) {
  const auto& [needed, no_later, instructions] = step.needs;
  if (compute_capability >= needed && !(no_later && compute_capability > needed))
    return std::nullopt;
  const std::string name = std::string(gpu) + " (sm_" + std::to_string(compute_capability) + ")";
  if (instructions.empty())
    return name + " runs no code for sm_90a, which this step is compiled for";
  return name + " has no " + std::string(instructions) +
         ": this step needs sm_" + std::to_string(needed) + (no_later ? "a" : " or later");
}

/// What a step costs. A varlen batch costs what its sequences cost one by one, phase by phase:
/// Step::cost need not know of it. Of a sequence without keys, or without queries, the outputs are
/// written, in the last phase. Of a tiled step K and V count as often as the order of tiles and the
/// L2 of `machine` make them come from HBM (tiling.h).
Cost cost_of(const Step&, const Problem&, const Machine& machine = {});

/// What a chapter's program does besides running steps, asked for by its first option.
struct Command {
  std::string option;  ///< "--trace"
  std::string help;    ///< one line, for --help
  /// Returns the exit status. Throws InputError.
  int (*run)(const std::vector<std::string>& arguments);
};

/// The table of a chapter.
struct Chapter {
  std::string name;     ///< as its folder: "01_naive"
  std::string summary;  ///< one line
  std::vector<Step> steps;
  std::vector<Command> commands = {};
};

/// Defined by every chapter.cpp.
const Chapter& chapter();

}  // namespace attn

/// Declares a launch function of a step file for both back ends. Weak: null in a program that is
/// linked without that back end, or without that step, as a judge of exercises is without most.
#define ATTN_DECLARE_LAUNCH(step, function)                    \
  namespace gpu::step {                                        \
  [[gnu::weak]] attn::Status function(const attn::Arguments&); \
  }                                                            \
  namespace emulated::step {                                   \
  [[gnu::weak]] attn::Status function(const attn::Arguments&); \
  }                                                            \
  namespace recorded::step {                                   \
  [[gnu::weak]] attn::Status function(const attn::Arguments&); \
  }                                                            \
  static_assert(true)
#define ATTN_DECLARE_STEP(step) ATTN_DECLARE_LAUNCH(step, launch)

/// The pair of launch functions of a step file.
#define ATTN_LAUNCH_OF(step, function) \
  attn::Launch { gpu::step::function, emulated::step::function, recorded::step::function }
#define ATTN_LAUNCH(step) ATTN_LAUNCH_OF(step, launch)
