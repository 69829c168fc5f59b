// The CSV of Nsight Compute, as printed by ncu or modified by shells and other programs.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>

#include "attn/error.h"
#include "report/counters.h"
#include "report/encoding.h"
#include "report/json_object.h"

namespace attn::report {
namespace {

constexpr std::string_view kAccepted =
    "one export of ncu --csv, page details or raw, in the C locale";

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

  // The header: the first line that begins with the column ID. ncu's messages, the program's output
  // and the lines of profile.sh may precede it.
  Record header(CounterFile& out) {
    std::string complaint;
    std::size_t complaint_line = 0;
    for (; at_ < text_.size(); next_line()) {
      if (is_header()) {
        Record record;
        next(record);
        return record;
      }
      const std::string line = this->line();
      const auto said = [&](std::string_view what) -> std::string {
        const std::string start = fmt::format("==profile.sh== {}: ", what);
        return line.starts_with(start) ? line.substr(start.size()) : "";
      };
      if (const std::string s = said("clocks"); !s.empty()) out.clocks = s;
      if (const std::string s = said("problem"); !s.empty()) out.problem = s;
      if (line.starts_with("==ERROR==") || line.find("No kernels were profiled") != line.npos)
        complaint = line, complaint_line = line_;
    }
    if (!complaint.empty())
      fail(file_, complaint_line, fmt::format("no launch was profiled: '{}'", complaint));
    fail(file_, 0,
         text_.empty() ? "is empty"
                       : "is not an export of ncu: no line begins with the column \"ID\"");
  }

  // The next row. Lines of ncu's messages and of the profiled program may stand between rows: a row
  // begins with a quote, a digit or an empty field.
  bool next(Record& record) {
    while (at_ < text_.size() && !is_header() && !begins_row()) next_line();
    if (at_ >= text_.size()) return false;
    record = {line_, {""}};
    for (bool more = true; more;) more = take_field(record);
    for (std::string& f : record.fields) f = printable(std::move(f));
    return true;
  }

 private:
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  std::string line() const {
    const std::string_view r = rest();
    return printable(std::string(r.substr(0, r.find_first_of("\r\n"))));
  }

  bool is_header() {
    const std::string_view r = rest();
    const std::size_t width = r.starts_with("\"ID\"") ? 4 : r.starts_with("ID") ? 2 : 0;
    if (width == 0 || r.size() <= width) return false;
    if (r[width] == ';' || r[width] == '\t')
      fail(file_, line_,
           fmt::format("columns separated by {}: a localized export, whose numbers "
                       "cannot be read for certain",
                       r[width] == ';' ? "';'" : "tabs"));
    return r[width] == ',';
  }

  bool begins_row() const {
    const char c = text_[at_];
    return c == '"' || c == ',' || (c >= '0' && c <= '9');
  }

  // Appends to the last field; true if another field follows in this record.
  bool take_field(Record& record) {
    std::string& field = record.fields.back();
    if (at_ < text_.size() && text_[at_] == '"') {
      for (++at_;; ++at_) {
        if (at_ >= text_.size())
          fail(file_, record.line, "a quote that nothing closes: it was not written to its end");
        if (text_[at_] == '"' && (++at_ >= text_.size() || text_[at_] != '"')) break;
        if (text_[at_] == '\n') ++line_;
        field += text_[at_];
      }
    }
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == ',') {
        ++at_;
        record.fields.emplace_back();
        return true;
      }
      if (c == '\n' || c == '\r') {
        next_line();
        return false;
      }
      if (c == '"' || (at_ > 0 && text_[at_ - 1] == '"'))
        fail(file_, record.line, "a quote within a field: the row is damaged");
      field += c;
    }
    return false;
  }

  // Lines end in LF, CR LF or CR.
  void next_line() {
    const std::size_t end = text_.find_first_of("\r\n", at_);
    at_ = end == text_.npos ? text_.size() : end + 1;
    if (end != text_.npos && text_[end] == '\r' && at_ < text_.size() && text_[at_] == '\n') ++at_;
    ++line_;
  }

  const std::string& text_;
  const std::string& file_;
  std::size_t at_ = 0, line_ = 1;
};

bool all_digits(std::string_view s) {
  return std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Parses "35,433,480,192" or "95.30"; nothing for "n/a" and the like. Other locales are refused:
// "95,30" would be read as a value 100 times too large, "1.250" as one 1000 times too small.
std::optional<double> number(const std::string& original, const std::string& file,
                             std::size_t line) {
  std::string text = original;
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (text.empty()) return std::nullopt;
  for (const char* nothing : {"n/a", "nan", "no data"})  // "(!) n/a"
    if (text.find(nothing) != text.npos) return std::nullopt;
  const std::size_t point = std::min(text.find('.'), text.size());
  bool good = true;
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == ',') good = good && i > 0 && i < point && (point - i) % 4 == 0;
  if (good && point >= 1 && point <= 3 && text[0] != '0' && text.size() == point + 4 &&
      all_digits(text.substr(0, point)) && all_digits(text.substr(point + 1)))
    fail(file, line,
         fmt::format("'{}' may be {}{} of a locale with points between thousands", original,
                     text.substr(0, point), text.substr(point + 1)));
  std::erase(text, ',');
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (!good || error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) ||
      value < 0)
    fail(file, line, fmt::format("'{}' is not a number", original));
  return value;
}

enum class Dimension { time, bytes, percent, number };

// "Mbyte" -> 1e6 for "byte"; nothing where `unit` is not `word` with a prefix.
std::optional<double> scale_of(std::string_view unit, std::string_view word) {
  if (!unit.ends_with(word)) return std::nullopt;
  const std::string_view prefix = unit.substr(0, unit.size() - word.size());
  if (prefix.empty()) return 1;
  constexpr std::string_view kPrefixes = "KMGTP";
  const std::size_t power = kPrefixes.find(prefix[0] == 'k' ? 'K' : prefix[0]);
  if (power == kPrefixes.npos) return std::nullopt;
  const double exponent = static_cast<double>(power) + 1;
  if (prefix.size() == 1) return std::pow(1000., exponent);
  if (prefix.substr(1) == "i") return std::pow(1024., exponent);
  return std::nullopt;
}

// The factor from an ncu unit to seconds, bytes, percent or a plain number: "ns", "Kbyte/block",
// "%", "Minst". Nothing for other units: ncu scales units to the value, so an unknown unit must not
// count as the base unit.
std::optional<double> unit_factor(std::string_view unit, Dimension dimension) {
  const auto slash = unit.find('/');
  const std::string_view base = unit.substr(0, slash);
  if (slash != unit.npos) {
    constexpr std::array<std::string_view, 5> kPer = {"block", "thread", "warp", "inst", "request"};
    const std::string_view per = unit.substr(slash + 1);
    if (dimension == Dimension::time || std::find(kPer.begin(), kPer.end(), per) == kPer.end())
      return std::nullopt;
  }
  switch (dimension) {
    case Dimension::time: {
      constexpr std::pair<std::string_view, double> kTimes[] = {
          {"ns", 1e-9},      {"nsecond", 1e-9}, {"us", 1e-6},  {"usecond", 1e-6},
          {"\u00b5s", 1e-6}, {"\u03bcs", 1e-6}, {"ms", 1e-3},  {"msecond", 1e-3},
          {"s", 1},          {"sec", 1},        {"second", 1}, {"min", 60},
          {"minute", 60},    {"h", 3600},       {"hr", 3600},  {"hour", 3600}};
      for (const auto& [name, factor] : kTimes)
        if (base == name) return factor;
      return std::nullopt;
    }
    case Dimension::bytes:
      for (const char* word : {"byte", "B"})
        if (const auto scale = scale_of(base, word)) return scale;
      return std::nullopt;
    case Dimension::percent: return base == "%" ? std::optional(1.) : std::nullopt;
    case Dimension::number:
      for (const char* word : {"sector", "inst", "instruction", "request", "register", "warp",
                               "thread", "cycle", "wavefront", "op", ""})
        if (const auto scale = scale_of(base, word)) return scale;
      return std::nullopt;
  }
  return std::nullopt;
}

// The dimension of an ncu name that maps to one of our counters; nothing for other names.
std::optional<Dimension> dimension_of(std::string_view name) {
  for (const Counter& c : all_counters())
    for (const NcuName& n : ncu_names(c.key)) {
      if (n.name != name) continue;
      if (n.factor != 1) return Dimension::number;  // sectors converted to bytes
      return c.unit == "s"      ? Dimension::time
             : c.unit == "byte" ? Dimension::bytes
             : c.unit == "%"    ? Dimension::percent
                                : Dimension::number;
    }
  return std::nullopt;
}

// A launch whose rows are being read.
struct Launch {
  KernelCounters kernel;
  std::map<std::string, double> by_name;      // in base units, by ncu's name
  std::map<std::string, std::string> places;  // sections that show a name
};

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

// The launches of one export.
class Export {
 public:
  Export(Reader& reader, const Record& header, const std::string& file, CounterFile& out)
      : reader_(reader), header_(header), file_(file), columns_(header_, file), out_(out) {}

  void read() {
    columns_.at("Kernel Name");
    columns_.find("Metric Name") ? read_details() : read_raw();
    for (Launch& l : launches_) {
      // Maps ncu's names, in base units, to the counters of this suite.
      for (const Counter& c : all_counters())
        for (const NcuName& n : ncu_names(c.key))
          if (const auto found = l.by_name.find(std::string(n.name)); found != l.by_name.end()) {
            l.kernel.values.emplace(c.key, found->second * n.factor);
            break;
          }
      out_.kernels.push_back(std::move(l.kernel));
    }
    out_.processes = processes_.size();
  }

 private:
  // The next row of this export. Two exports in one file are refused: the sum of two runs or two
  // steps would be the time of neither.
  bool next(Record& r) {
    if (!reader_.next(r)) return false;
    if (r.fields[0] == "ID")
      fail(file_, r.line, "a second export begins: split the file before this line");
    if (r.fields.size() != header_.fields.size())
      fail(file_, r.line,
           fmt::format("{} fields, not {} as its header", r.fields.size(), header_.fields.size()));
    return true;
  }

  std::string field(const Record& r, std::string_view column) const {
    const auto at = columns_.find(column);
    return at ? r.fields[*at] : "";
  }

  // The launch of a row. Processes number their launches independently, and their rows may be
  // interleaved.
  Launch& launch_of(const Record& r) {
    const std::string& id = r.fields[columns_.at("ID")];
    if (id.empty() || !all_digits(id))
      fail(file_, r.line, fmt::format("'{}' is not a launch ID", id));
    const std::string process =
        fmt::format("{}\n{}", field(r, "Host Name"), field(r, "Process ID"));
    processes_.insert(process);
    const std::string key = process + "\n" + id;
    const std::string kernel = field(r, "Kernel Name");
    const auto [found, fresh] = index_.emplace(key, launches_.size());
    if (fresh) {
      Launch l;
      l.kernel.signature = kernel;
      l.kernel.name = short_kernel(kernel);
      l.kernel.grid = field(r, "Grid Size");
      l.kernel.block = field(r, "Block Size");
      launches_.push_back(l);
    } else if (launches_[found->second].kernel.signature != kernel) {
      fail(file_, r.line,
           fmt::format("launch {} was of '{}' before, not of '{}'", id,
                       launches_[found->second].kernel.signature, kernel));
    }
    const std::string cc = field(r, "CC");
    if (!out_.compute_capability.empty() && !cc.empty() && out_.compute_capability != cc)
      fail(file_, r.line,
           fmt::format("compute capability {}, not {} as the rows before", cc,
                       out_.compute_capability));
    if (!cc.empty()) out_.compute_capability = cc;
    return launches_[found->second];
  }

  // `section` distinguishes a counter shown in several sections from one that was counted twice.
  void take(Launch& l, const std::string& name, const std::string& unit, const std::string& value,
            const std::string& section, std::size_t line) {
    const auto dimension = dimension_of(name);
    if (!dimension) return;  // some values are texts
    const auto x = number(value, file_, line);
    if (!x && *dimension == Dimension::time)
      fail(file_, line, fmt::format("{} of this launch is '{}': it has no time", name, value));
    if (!x) return;
    const auto factor = unit_factor(unit, *dimension);
    if (!factor) fail(file_, line, fmt::format("{} in '{}', a unit that is not known", name, unit));
    const auto [found, fresh] = l.by_name.emplace(name, *x * *factor);
    std::string& places = l.places[name];
    if (!fresh &&
        (found->second != *x * *factor || places.find("\n" + section + "\n") != places.npos))
      fail(file_, line,
           fmt::format("{} of this launch stood in a row before: two exports "
                       "without a header between them?",
                       name));
    places += "\n" + section + "\n";
  }

  // One line per counter.
  void read_details() {
    for (const char* column : {"ID", "Metric Name", "Metric Unit", "Metric Value"})
      columns_.at(column);
    for (Record r; next(r);) {
      Launch& l = launch_of(r);
      // A row without a metric name is advice, not a counter.
      take(l, field(r, "Metric Name"), field(r, "Metric Unit"), field(r, "Metric Value"),
           field(r, "Section Name"), r.line);
    }
  }

  // One line per kernel, one column per counter; the line below the header holds the units.
  void read_raw() {
    Record units;
    if (!next(units)) return;
    if (!units.fields[columns_.at("ID")].empty())
      fail(file_, units.line, "a launch where the line of units must be");
    for (Record r; next(r);) {
      const std::size_t before = launches_.size();
      Launch& l = launch_of(r);
      if (launches_.size() == before)
        fail(file_, r.line, fmt::format("launch {} has a row already", r.fields[0]));
      if (const std::string gpu = field(r, "device__attribute_display_name"); !gpu.empty())
        out_.gpu = gpu;
      for (std::size_t i = 0; i < r.fields.size(); ++i)
        take(l, header_.fields[i], units.fields[i], r.fields[i], std::to_string(i), r.line);
    }
  }

  Reader& reader_;
  const Record& header_;
  const std::string& file_;
  Columns columns_;
  CounterFile& out_;
  std::vector<Launch> launches_;
  std::map<std::string, std::size_t> index_;
  std::set<std::string> processes_;
};

}  // namespace

CounterFile read_counter_file(const std::filesystem::path& path) {
  const std::string file = printable(path.string());
  const std::string text = utf8_text(read_bytes(path), file);
  CounterFile out;
  out.file = printable(path.filename().string());
  Reader reader(text, file);
  const Record header = reader.header(out);
  if (!out.clocks.empty() && out.clocks != "none" && out.clocks != "base")
    fail(file, 0, fmt::format("says 'clocks: {}', must be none or base", out.clocks));
  Export(reader, header, file, out).read();
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

}  // namespace attn::report
