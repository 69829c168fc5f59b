#include "report/counters.h"

#include <fmt/format.h>

#include <algorithm>

namespace attn::report {
namespace {

std::optional<double> quotient(std::optional<double> a, std::optional<double> b,
                               double factor = 1) {
  if (!a || !b || *b == 0) return std::nullopt;
  return factor * *a / *b;
}

std::optional<double> plus(std::optional<double> a, std::optional<double> b) {
  return a && b ? std::optional(*a + *b) : std::nullopt;
}

}  // namespace

std::string short_kernel(std::string name) {
  name = name.substr(0, name.find('('));
  name = name.substr(0, name.find('<'));
  for (const char* separator : {" ", "::"})
    if (const auto at = name.rfind(separator); at != name.npos)
      name = name.substr(at + std::string(separator).size());
  return name.rfind("nvjet", 0) == 0 ? "cuBLAS" : name;
}

std::optional<double> KernelCounters::value(std::string_view key) const {
  if (const auto found = values.find(std::string(key)); found != values.end()) return found->second;
  if (key == "ld_sectors_per_request") return quotient(value("ld_sectors"), value("ld_requests"));
  if (key == "st_sectors_per_request") return quotient(value("st_sectors"), value("st_requests"));
  if (key == "bank_conflict_pct")
    return quotient(plus(value("shared_ld_conflicts"), value("shared_st_conflicts")),
                    value("shared_wavefronts"), 100);
  if (key == "hbm_bytes") return plus(value("hbm_read_bytes"), value("hbm_write_bytes"));
  if (key == "hbm_per_l2_pct") return quotient(value("hbm_bytes"), value("l2_bytes"), 100);
  if (key == "tensor_ops") {
    // An export for one element type lacks the other counter.
    const auto bf16 = value("tensor_bf16_ops"), fp16 = value("tensor_fp16_ops");
    return bf16 && fp16 ? plus(bf16, fp16) : bf16 ? bf16 : fp16;
  }
  if (key == "operations") {
    const auto ffma = value("ffma");
    return plus(value("tensor_ops"), plus(plus(ffma, ffma), plus(value("fadd"), value("fmul"))));
  }
  if (key == "tensor_ops_per_inst") return quotient(value("tensor_ops"), value("instructions"));
  for (const char* work : {"hbm_bytes", "l2_bytes", "tensor_ops"})
    if (key == std::string(work) + "_per_s") return quotient(value(work), value("time_s"));
  return std::nullopt;
}

KernelCounters step_total(const std::vector<KernelCounters>& kernels) {
  KernelCounters total;
  total.name = "step";
  for (const Counter& c : all_counters()) {
    if (ncu_names(c.key).empty()) continue;
    double sum = 0, weights = 0;
    bool all = !kernels.empty();
    for (const KernelCounters& k : kernels) {
      const auto x = k.value(c.key), time = k.value("time_s");
      all = all && x && (c.total != Total::by_time || time);
      if (!all) break;
      if (c.total == Total::largest) sum = std::max(sum, *x);
      if (c.total == Total::sum) sum += *x;
      if (c.total == Total::by_time) sum += *x * *time, weights += *time;
    }
    if (c.total == Total::by_time) all = all && weights > 0;
    if (all) total.values.emplace(c.key, c.total == Total::by_time ? sum / weights : sum);
  }
  return total;
}

std::string element_type(const std::vector<KernelCounters>& kernels) {
  constexpr std::pair<std::string_view, std::string_view> kTypes[] = {
      {"__nv_bfloat16", "bf16"}, {"__half", "fp16"}, {"float", "fp32"}};
  std::string type;
  for (const KernelCounters& k : kernels) {
    // Only the template arguments before the parameter list: parameters are pointers of many types.
    const std::string head = k.signature.substr(0, k.signature.find('('));
    const auto open = head.find('<');
    if (open == head.npos) continue;
    const std::string arguments = head.substr(open);
    for (const auto& [word, name] : kTypes) {
      const auto at = arguments.find(word);
      // "__nv_bfloat16" contains "float".
      if (at == arguments.npos || (name == "fp32" && at > 0 && arguments[at - 1] == 'b')) continue;
      if (!type.empty() && type != name) return "";
      type = name;
    }
  }
  return type;
}

std::string value_text(const Counter& c, std::optional<double> x) {
  if (!x) return "n/a";
  if (c.unit == "s") {
    if (*x < 1e-3) return fmt::format("{:.2f} us", *x * 1e6);
    return fmt::format("{:.3f} ms", *x * 1e3);
  }
  if (c.unit == "%") return fmt::format("{:.1f} %", *x);
  if (c.kind == Kind::ratio && c.unit != "byte")
    return fmt::format("{:.{}f}", *x, c.total == Total::largest ? 0 : 2);
  std::string_view unit = c.unit == "byte" ? "B" : c.unit == "byte/s" ? "B/s" : c.unit;
  double scaled = *x;
  std::string prefix;
  for (const char* next : {"k", "M", "G", "T"})
    if (scaled >= 999.5) scaled /= 1000, prefix = next;
  const std::string digits = fmt::format("{:.{}f}", scaled,
                                         prefix.empty() ? 0
                                         : scaled < 10  ? 2
                                                        : 1);
  if (prefix.empty() && unit.empty()) return digits;
  return fmt::format("{} {}{}", digits, prefix, unit);
}

}  // namespace attn::report
