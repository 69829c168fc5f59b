/// \file
/// Hardware counters: the CSV of Nsight Compute (ncu), names that differ between its versions, and
/// what each counter means. A counter that a file lacks is absent here, and never 0.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace attn::report {

enum class Better { lower, higher, neither };

/// How the launches of a step add up to one value.
enum class Total { sum, largest, by_time };

/// In which order a comparison shows counters: causes first.
enum class Kind {
  ratio,  ///< of two counts: how a kernel works, whatever the size of its problem
  count,  ///< what the hardware counted
  rate,   ///< work a second: follows from the time
};

/// One counter of this suite. `names` are ncu's, the newest first; a name with a factor ("x 32")
/// counts something that gives this one when multiplied.
struct Counter {
  std::string_view key;      ///< in files: "hbm_read_bytes"
  std::string_view label;    ///< in tables: "HBM read"
  std::string_view unit;     ///< "byte", "s", "%", "" ...
  std::string_view meaning;  ///< one line
  Better better = Better::neither;
  Kind kind = Kind::count;
  Total total = Total::sum;
  double floor = 1;  ///< what is below it counts as this much when two values are compared
};

/// All counters in the order of tables: those that are read, then those that follow from them.
std::span<const Counter> all_counters();
/// nullptr for a key that there is not.
const Counter* find_counter(std::string_view key);
/// ncu's names of a counter, with the factor to base units. Empty for a derived one.
struct NcuName {
  std::string_view name;
  double factor = 1;
};
std::vector<NcuName> ncu_names(std::string_view key);

/// What was counted in one launch of a kernel.
struct KernelCounters {
  std::string name;       ///< "scores_kernel"
  std::string signature;  ///< as ncu writes it
  std::string grid, block;
  std::map<std::string, double> values;  ///< by key, in base units; derived ones are not stored

  /// A counter, read or derived; nothing where it, or a part of it, was not collected.
  std::optional<double> value(std::string_view key) const;
};

/// One ncu CSV: the launches of one step.
struct CounterFile {
  std::string file;                ///< name without its folder
  std::string step;                ///< of CHAPTER.STEP.ncu.csv; else empty
  std::string compute_capability;  ///< "9.0"
  std::string gpu;                 ///< "NVIDIA H200" where the export states it
  std::string clocks;   ///< "none" or "base" where profile.sh says what ncu did to the clocks
  std::string problem;  ///< "forward B=1 ..." where profile.sh says it
  std::vector<KernelCounters> kernels;
  std::size_t processes = 1;  ///< that the kernels were launched by
};

/// Reads an export of `ncu --csv`, page details or raw, in UTF-8 or UTF-16. Messages of ncu and
/// output of the program may stand around its rows; processes may be mixed. profile.sh puts lines
/// before it, as `==profile.sh== clocks: none`. Throws InputError, in one line.
CounterFile read_counter_file(const std::filesystem::path&);

/// A step's launches as one: sums, ratios of sums, largest, or means weighted by time.
KernelCounters step_total(const std::vector<KernelCounters>&);

/// The element type that the kernels' template arguments name; empty where they name none, or
/// several.
std::string element_type(const std::vector<KernelCounters>&);

/// "void gpu::v1_global::scores_kernel<__nv_bfloat16>(const T1 *, ...)" -> "scores_kernel"
std::string short_kernel(std::string signature);

/// A value for people, with its unit: "4.07 GB", "16.50", "137.7 ms", or "n/a".
std::string value_text(const Counter&, std::optional<double>);

}  // namespace attn::report
