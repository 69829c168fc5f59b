#include "report/result_file.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

#include "attn/error.h"

namespace attn::report {
namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "attn-results-1";

// One line, and nothing in it that steers a terminal.
std::string printable(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  return text;
}

// An object of the file, and where it lies, for messages: "steps[2].time".
class Object {
 public:
  Object(const json& value, std::string file, std::string where)
      : value_(value), file_(std::move(file)), where_(std::move(where)) {
    if (!value_.is_object()) fail(where_, "is not an object");
  }

  std::string text(const char* key) const {
    const json& v = at(key);
    if (!v.is_string()) fail(name(key), "is not text");
    return printable(v.get<std::string>());
  }
  std::string choice(const char* key, std::initializer_list<std::string_view> accepted) const {
    const std::string t = text(key);
    for (const std::string_view a : accepted)
      if (t == a) return t;
    fail(name(key), fmt::format("is '{}', must be one of {}", t, fmt::join(accepted, ", ")));
  }
  int64_t integer(const char* key, int64_t lowest) const { return integer(at(key), name(key), lowest); }
  uint64_t seed(const char* key) const {
    const json& v = at(key);
    if (!v.is_number_unsigned()) fail(name(key), "must be a whole number from 0");
    return v.get<uint64_t>();
  }
  bool truth(const char* key) const {
    const json& v = at(key);
    if (!v.is_boolean()) fail(name(key), "is neither true nor false");
    return v.get<bool>();
  }
  double number(const char* key) const {
    const json& v = at(key);
    if (!v.is_number() || !std::isfinite(v.get<double>())) fail(name(key), "is not a number");
    return v.get<double>();
  }
  double positive(const char* key) const {
    const double x = number(key);
    if (!(x > 0)) fail(name(key), "must be above 0");
    return x;
  }
  bool has(const char* key) const { return !at(key).is_null(); }
  Object object(const char* key) const { return Object(at(key), file_, name(key)); }
  const json& array(const char* key) const {
    const json& v = at(key);
    if (!v.is_array()) fail(name(key), "is not a list");
    return v;
  }
  int64_t integer(const json& v, const std::string& where, int64_t lowest) const {
    // What is above int64_t is unsigned to the parser, and would wrap.
    const bool fits = v.is_number_unsigned() ? v.get<uint64_t>() <= uint64_t{INT64_MAX}
                                             : v.is_number_integer();
    if (!fits || v.get<int64_t>() < lowest)
      fail(where, fmt::format("must be a whole number from {}", lowest));
    return v.get<int64_t>();
  }
  std::string name(const char* key) const { return where_.empty() ? key : where_ + "." + key; }
  [[noreturn]] void fail(const std::string& where, std::string_view what) const {
    throw InputError(fmt::format("{}: {} {} (accepted: what a chapter program writes with --json)",
                                 file_, where.empty() ? "the file" : where, what));
  }

 private:
  const json& at(const char* key) const {
    const auto found = value_.find(key);
    if (found == value_.end()) fail(name(key), "is missing");
    return *found;
  }

  const json& value_;
  std::string file_, where_;
};

Problem read_problem(const Object& o) {
  Problem p;
  p.batch = o.integer("batch", 1);
  p.heads = o.integer("heads", 1);
  p.kv_heads = o.integer("kv_heads", 1);
  p.seqlen_q = o.integer("seqlen_q", 1);
  p.seqlen_k = o.integer("seqlen_k", 1);
  p.head_dim = o.integer("head_dim", 1);
  const std::string dtype = o.choice("dtype", {"fp32", "fp16", "bf16"});
  p.dtype = dtype == "fp32" ? DType::fp32 : dtype == "fp16" ? DType::fp16 : DType::bf16;
  p.causal = o.truth("causal");
  const json& window = o.array("window");
  if (window.size() != 2) o.fail(o.name("window"), "must be [left, right]");
  p.window_left = o.integer(window[0], o.name("window") + "[0]", -1);
  p.window_right = o.integer(window[1], o.name("window") + "[1]", -1);
  p.softmax_scale = o.number("softmax_scale");
  const std::string inputs = o.choice("inputs", {"random", "needle", "peaked", "outlier", "files"});
  for (const InputKind kind :
       {InputKind::random, InputKind::needle, InputKind::peaked, InputKind::outlier, InputKind::files})
    if (inputs == name(kind)) p.inputs = kind;
  p.seed = o.seed("seed");
  return p;
}

StepRow read_step(const Object& o) {
  StepRow s;
  s.name = o.text("name");
  s.operation = o.text("operation");
  s.outcome = o.choice("outcome", {"pass", "fail", "unchecked", "unsupported", "error"});
  s.reason = o.text("reason");
  s.binding = o.text("binding");
  if (o.has("time")) s.median_s = o.object("time").positive("median_s");
  if (o.has("share_of_roof")) s.share_of_roof = o.positive("share_of_roof");
  return s;
}

}  // namespace

ResultFile read_result_file(const std::filesystem::path& path) {
  const std::string file = printable(path.string());
  std::ifstream stream(path, std::ios::binary);
  std::string bytes;
  // A folder opens like a file and fails at the first read.
  if (stream && !std::filesystem::is_directory(path))
    bytes.assign(std::istreambuf_iterator<char>(stream), {});
  else
    stream.setstate(std::ios::failbit);
  if (!stream) throw InputError(fmt::format("{}: cannot be read", file));
  const json document = json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded())
    throw InputError(fmt::format("{}: is not JSON, or was not written to its end", file));

  const Object o(document, file, "");
  if (const std::string schema = o.text("schema"); schema != kSchema)
    o.fail("schema", fmt::format("is '{}', must be '{}'", schema, kSchema));
  ResultFile result;
  result.path = path;
  result.chapter = o.text("chapter");
  result.device = o.object("device").text("text");
  result.operation = o.text("operation");
  result.problem = read_problem(o.object("problem"));
  const json& steps = o.array("steps");
  for (std::size_t i = 0; i < steps.size(); ++i)
    result.steps.push_back(read_step(Object(steps[i], file, fmt::format("steps[{}]", i))));
  return result;
}

}  // namespace attn::report
