/// \file
/// Hardware counters: the CSV of Nsight Compute (ncu), the names that differ between its versions,
/// and the meaning of each counter. A counter missing from a file is absent here, never 0.
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

/// How the values of a step's launches are combined.
enum class Total { sum, largest, by_time };

/// The order of counters in a comparison: causes first.
enum class Kind {
  ratio,  ///< of two counts; independent of the problem size
  count,  ///< counted by the hardware
  rate,  ///< work per second: follows from the time
};

/// A counter of this suite. `names` are ncu's names, the newest first; a name with a factor ("x
/// 32") must be multiplied by it.
struct Counter {
  std::string_view key;      ///< in files: "hbm_read_bytes"
  std::string_view label;    ///< in tables: "HBM read"
  std::string_view unit;     ///< "byte", "s", "%", "" ...
  std::string_view meaning;  ///< one line
  Better better = Better::neither;
  Kind kind = Kind::count;
  Total total = Total::sum;
  double floor = 1;  ///< smaller values count as this in comparisons
};

/// All counters in table order: those that are read, then the derived ones.
std::span<const Counter> all_counters();
/// nullptr for an unknown key.
const Counter* find_counter(std::string_view key);
/// ncu's names of a counter, with the factor to base units. Empty for a derived one.
struct NcuName {
  std::string_view name;
  double factor = 1;
};
std::vector<NcuName> ncu_names(std::string_view key);

/// The counters of one launch of a kernel.
struct KernelCounters {
  std::string name;       ///< "scores_kernel"
  std::string signature;  ///< as ncu writes it
  std::string grid, block;
  std::map<std::string, double> values;  ///< by key, in base units; derived ones are not stored

  /// A counter, read or derived; nothing if it, or an operand of it, was not collected.
  std::optional<double> value(std::string_view key) const;
};

/// One ncu CSV: the launches of one step.
struct CounterFile {
  std::string file;                ///< name without its folder
  std::string step;  ///< from CHAPTER.STEP.ncu.csv; else empty
  std::string compute_capability;  ///< "9.0"
  std::string gpu;  ///< "NVIDIA H200" if the export states it
  std::string clocks;  ///< "none" or "base" if profile.sh recorded ncu's clock control
  std::string problem;  ///< "forward B=1 ..." if profile.sh recorded it
  std::vector<KernelCounters> kernels;
  std::size_t processes = 1;  ///< number of processes that launched the kernels
};

/// Reads an export of `ncu --csv`, page details or raw, in UTF-8 or UTF-16. ncu's messages and the
/// program's output may surround its rows; rows of several processes may be interleaved. profile.sh
/// adds lines such as `==profile.sh== clocks: none` in front. Throws InputError with one line.
CounterFile read_counter_file(const std::filesystem::path&);

/// Combines a step's launches into one: sums, ratios of sums, maxima, or means weighted by time.
KernelCounters step_total(const std::vector<KernelCounters>&);

/// The element type in the kernels' template arguments; empty if they name none, or several.
std::string element_type(const std::vector<KernelCounters>&);

/// "void gpu::v1_global::scores_kernel<__nv_bfloat16>(const T1 *, ...)" -> "scores_kernel"
std::string short_kernel(std::string signature);

/// A formatted value with its unit: "4.07 GB", "16.50", "137.7 ms", or "n/a".
std::string value_text(const Counter&, std::optional<double>);

}  // namespace attn::report
