#include "report/counters.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "attn/error.h"
#include "report/json_object.h"

namespace attn::report {
namespace {

constexpr std::string_view kAccepted = "what ncu writes with --csv, page details or raw";

[[noreturn]] void fail(const std::string& file, std::size_t line, std::string_view what) {
  throw InputError(line > 0
                       ? fmt::format("{}: line {}: {} (accepted: {})", file, line, what, kAccepted)
                       : fmt::format("{}: {} (accepted: {})", file, what, kAccepted));
}

struct Record {
  std::size_t line = 0;
  std::vector<std::string> fields;
};

// Splits CSV into records: fields in quotes or bare, "" for a quote, line breaks inside quotes.
class Reader {
 public:
  Reader(const std::string& text, const std::string& file) : text_(text), file_(file) {}

  // Moves to the first line that begins with the column ID: ncu's own messages may come before it,
  // and what profile.sh says of the run.
  bool find_header(CounterFile& out) {
    while (at_ < text_.size()) {
      const std::string_view rest = std::string_view(text_).substr(at_);
      if (rest.starts_with("\"ID\",") || rest.starts_with("ID,")) return true;
      const auto said = [&](std::string_view what) -> std::string {
        const std::string start = fmt::format("==profile.sh== {}: ", what);
        if (!rest.starts_with(start)) return "";
        const std::string_view value = rest.substr(start.size());
        return printable(std::string(value.substr(0, value.find_first_of("\r\n"))));
      };
      if (const std::string s = said("clocks"); !s.empty()) out.clocks = s;
      if (const std::string s = said("problem"); !s.empty()) out.problem = s;
      next_line();
    }
    return false;
  }

  bool next(Record& record) {
    while (at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r' || message()))
      next_line();
    if (at_ >= text_.size()) return false;
    record = {line_, {""}};
    bool quoted = false;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == '"' && quoted && at_ + 1 < text_.size() && text_[at_ + 1] == '"') {
        record.fields.back() += '"';
        ++at_;
      } else if (c == '"') {
        quoted = !quoted;
      } else if (c == ',' && !quoted) {
        record.fields.emplace_back();
      } else if (c == '\n' && !quoted) {
        ++at_;
        break;
      } else if (c != '\r') {
        record.fields.back() += c;
      }
    }
    if (quoted)
      fail(file_, record.line, "a quote that nothing closes: it was not written to its end");
    for (std::string& f : record.fields) f = printable(std::move(f));
    return true;
  }

 private:
  bool message() const { return std::string_view(text_).substr(at_).starts_with("=="); }
  void next_line() {
    const std::size_t end = text_.find('\n', at_);
    at_ = end == text_.npos ? text_.size() : end + 1;
    ++line_;
  }

  const std::string& text_;
  const std::string& file_;
  std::size_t at_ = 0, line_ = 1;
};

// "35,433,480,192" or "95.30"; nothing for "n/a" and the like. A comma that is no separator of
// thousands ("95,30") is no number either: read as one it would be a hundred times too much.
std::optional<double> number(std::string text, const std::string& file, std::size_t line) {
  if (text.empty() || text.find("n/a") != text.npos || text == "nan") return std::nullopt;
  const std::string original = text;
  const std::size_t point = std::min(text.find('.'), text.size());
  bool good = true;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == ',') good = good && i > 0 && i < point && (point - i) % 4 == 0;
  std::erase(text, ',');
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (!good || error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) ||
      value < 0)
    fail(file, line, fmt::format("'{}' is not a number", original));
  return value;
}

// From a unit of ncu to seconds and bytes: "ns", "usecond", "Kbyte/block", "%".
double unit_factor(std::string_view unit) {
  const std::string_view base = unit.substr(0, unit.find('/'));
  const auto prefixed = [&](std::string_view name) {
    return base.size() == name.size() + 1 && base.ends_with(name);
  };
  if (prefixed("byte")) switch (base[0]) {
      case 'K':
        return 1e3;
      case 'M':
        return 1e6;
      case 'G':
        return 1e9;
      case 'T':
        return 1e12;
      default:
        return 1;
    }
  if (prefixed("s") || prefixed("second")) switch (base[0]) {
      case 'n':
        return 1e-9;
      case 'u':
        return 1e-6;
      case 'm':
        return 1e-3;
      default:
        return 1;
    }
  return 1;
}

// What stands under ncu's names, in base units, becomes what this suite calls it.
void take_values(const std::map<std::string, double>& by_name, KernelCounters& kernel) {
  for (const Counter& c : all_counters())
    for (const NcuName& n : ncu_names(c.key))
      if (const auto found = by_name.find(std::string(n.name)); found != by_name.end()) {
        kernel.values.emplace(c.key, found->second * n.factor);
        break;
      }
}

class Columns {
 public:
  Columns(const Record& header, const std::string& file) : header_(header), file_(file) {}
  std::optional<std::size_t> find(std::string_view name) const {
    const auto& f = header_.fields;
    const auto found = std::find(f.begin(), f.end(), name);
    return found == f.end() ? std::nullopt : std::optional<std::size_t>(found - f.begin());
  }
  std::size_t at(std::string_view name) const {
    if (const auto column = find(name)) return *column;
    fail(file_, header_.line, fmt::format("has no column '{}'", name));
  }

 private:
  const Record& header_;
  const std::string& file_;
};

KernelCounters kernel_of(const Record& r, const Columns& columns) {
  KernelCounters k;
  k.signature = r.fields[columns.at("Kernel Name")];
  k.name = short_kernel(k.signature);
  if (const auto grid = columns.find("Grid Size")) k.grid = r.fields[*grid];
  if (const auto block = columns.find("Block Size")) k.block = r.fields[*block];
  return k;
}

void check_width(const Record& r, const Record& header, const std::string& file) {
  if (r.fields.size() != header.fields.size())
    fail(file, r.line,
         fmt::format("{} fields, not {} as its header", r.fields.size(), header.fields.size()));
}

// A line a counter.
void read_details(Reader& reader, const Record& header, const std::string& file, CounterFile& out) {
  const Columns columns(header, file);
  const std::size_t id = columns.at("ID"), metric = columns.at("Metric Name"),
                    unit = columns.at("Metric Unit"), value = columns.at("Metric Value");
  const auto cc = columns.find("CC");
  std::string last_id;
  std::map<std::string, double> values;
  const auto finish = [&] {
    if (!out.kernels.empty()) take_values(values, out.kernels.back());
    values.clear();
  };
  for (Record r; reader.next(r);) {
    check_width(r, header, file);
    if (out.kernels.empty() || r.fields[id] != last_id) {
      finish();
      out.kernels.push_back(kernel_of(r, columns));
      last_id = r.fields[id];
      if (cc) out.compute_capability = r.fields[*cc];
    }
    const std::string& name = r.fields[metric];
    if (name.empty()) continue;  // advice, not a counter
    bool wanted = false;
    for (const Counter& c : all_counters())
      for (const NcuName& n : ncu_names(c.key)) wanted |= n.name == name;
    if (!wanted) continue;  // there are texts among the others
    if (const auto x = number(r.fields[value], file, r.line))
      values.emplace(name, *x * unit_factor(r.fields[unit]));
  }
  finish();
}

// A line a kernel, a column a counter; the line below the header holds the units.
void read_raw(Reader& reader, const Record& header, const std::string& file, CounterFile& out) {
  const Columns columns(header, file);
  columns.at("Kernel Name");
  const auto cc = columns.find("CC"), gpu = columns.find("device__attribute_display_name");
  Record units;
  if (!reader.next(units)) fail(file, 0, "holds no kernel");
  check_width(units, header, file);
  for (Record r; reader.next(r);) {
    check_width(r, header, file);
    out.kernels.push_back(kernel_of(r, columns));
    if (cc) out.compute_capability = r.fields[*cc];
    if (gpu) out.gpu = r.fields[*gpu];
    std::map<std::string, double> values;
    for (const Counter& c : all_counters())
      for (const NcuName& n : ncu_names(c.key))
        if (const auto column = columns.find(n.name))
          if (const auto x = number(r.fields[*column], file, r.line))
            values.emplace(n.name, *x * unit_factor(units.fields[*column]));
    take_values(values, out.kernels.back());
  }
}

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
    // An export for one element type lacks the other.
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

CounterFile read_counter_file(const std::filesystem::path& path) {
  const std::string file = printable(path.string());
  const std::string bytes = read_bytes(path);
  CounterFile out;
  out.file = printable(path.filename().string());
  Reader reader(bytes, file);
  Record header;
  if (!reader.find_header(out) || !reader.next(header))
    fail(file, 0, "is no export of ncu: no line begins with the column \"ID\"");
  if (!out.clocks.empty() && out.clocks != "none" && out.clocks != "base")
    fail(file, 0, fmt::format("says 'clocks: {}', must be none or base", out.clocks));
  const bool details = Columns(header, file).find("Metric Name").has_value();
  (details ? read_details : read_raw)(reader, header, file, out);
  if (out.kernels.empty()) fail(file, 0, "holds no kernel");
  if (std::all_of(out.kernels.begin(), out.kernels.end(), [](auto& k) { return k.values.empty(); }))
    fail(file, 0,
         "holds no counter that attn_report knows; common/scripts/profile.sh collects them");
  // CHAPTER.STEP.ncu.csv
  constexpr std::string_view suffix = ".ncu.csv";
  if (const auto dot = out.file.find('.');
      out.file.ends_with(suffix) && dot + suffix.size() < out.file.size())
    out.step = out.file.substr(dot + 1, out.file.size() - suffix.size() - dot - 1);
  return out;
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
    // Only what stands between < and > before the parameters: those are pointers of many types.
    const std::string head = k.signature.substr(0, k.signature.find('('));
    const auto open = head.find('<');
    if (open == head.npos) continue;
    const std::string arguments = head.substr(open);
    for (const auto& [word, name] : kTypes) {
      const auto at = arguments.find(word);
      // "__nv_bfloat16" holds "float" too.
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
