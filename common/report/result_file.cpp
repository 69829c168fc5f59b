#include "report/result_file.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

#include "attn/mask.h"
#include "attn/tensor.h"
#include "report/containers.h"
#include "report/encoding.h"
#include "report/json_object.h"

namespace attn::report {
namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "attn-results-1";

// The lengths of a varlen batch.
std::vector<int64_t> read_lengths(const Object& o, const char* key, int64_t batch) {
  std::vector<int64_t> lengths;
  for (const json& length : o.array(key))
    lengths.push_back(o.integer(length, fmt::format("{}[{}]", o.name(key), lengths.size()), 0));
  if (static_cast<int64_t>(lengths.size()) != batch)
    o.fail(o.name(key),
           fmt::format("has {} lengths, must have {}, one per sequence", lengths.size(), batch));
  return lengths;
}

// The operation's own options.
std::map<std::string, std::vector<double>> read_own(const Object& o) {
  std::map<std::string, std::vector<double>> own;
  for (const std::string& key : o.keys())
    for (const json& value : o.array(key.c_str())) {
      if (!value.is_number()) o.fail(o.name(key.c_str()), "is not a list of numbers");
      own[key].push_back(value.get<double>());
    }
  return own;
}

// A mask of which a file records only the name.
class RecordedMask : public KeyMask {
 public:
  explicit RecordedMask(std::string text) : text_(std::move(text)) {}
  void for_each_range(int64_t, int64_t, int64_t, KeyRange,
                      const std::function<void(KeyRange)>&) const override {}
  void fits(const Problem&) const override {}
  std::string text() const override { return text_; }
  std::vector<HostTensor> tensors() const override { return {}; }

 private:
  std::string text_;
};

Problem read_problem(const Object& o) {
  Problem p;
  p.batch = o.integer("batch", 0);
  p.heads = o.integer("heads", 1);
  p.kv_heads = o.integer("kv_heads", 1);
  p.seqlen_q = o.integer("seqlen_q", 0);
  p.seqlen_k = o.integer("seqlen_k", 0);
  p.head_dim = o.integer("head_dim", 1);
  const std::string dtype = o.choice("dtype", {"fp32", "fp16", "bf16", "int8", "e4m3", "int4"});
  p.dtype = dtype == "fp32"   ? DType::fp32
            : dtype == "fp16" ? DType::fp16
            : dtype == "int8" ? DType::int8
            : dtype == "e4m3" ? DType::e4m3
            : dtype == "int4" ? DType::int4
                              : DType::bf16;
  p.causal = o.truth("causal");
  const json& window = o.array("window");
  if (window.size() != 2) o.fail(o.name("window"), "must be [left, right]");
  p.window_left = o.integer(window[0], o.name("window") + "[0]", -1);
  p.window_right = o.integer(window[1], o.name("window") + "[1]", -1);
  p.softmax_scale = o.number("softmax_scale");
  const std::string inputs = o.choice("inputs", {"random", "needle", "peaked", "outlier", "files"});
  for (const InputKind kind : {InputKind::random, InputKind::needle, InputKind::peaked,
                               InputKind::outlier, InputKind::files})
    if (inputs == name(kind)) p.inputs = kind;
  p.seed = o.seed("seed");
  // In older files without this field, problems on rows of scores have no head dim.
  p.matrix = o.contains("matrix") ? o.truth("matrix") : p.head_dim == 1;
  if (o.contains("seqused_k")) p.seqused_k = read_lengths(o, "seqused_k", p.batch);
  if (o.contains("mask")) p.mask = std::make_shared<RecordedMask>(o.text("mask"));
  if (o.contains("own")) p.own = read_own(o.object("own"));
  if (o.contains("varlen_q")) {
    p.varlen_q = read_lengths(o, "varlen_q", p.batch);
    p.varlen_k = read_lengths(o, "varlen_k", p.batch);
  }
  if (o.contains("softcap")) p.softcap = o.positive("softcap");
  if (o.contains("alibi")) p.alibi = o.truth("alibi");
  if (o.contains("dropout")) p.dropout = o.number("dropout");
  if (o.contains("top_k")) p.top_k = o.integer("top_k", 1);
  return p;
}

Time read_time(const Object& o) {
  Time t;
  t.median = o.positive("median_s");
  t.q1 = o.positive("q1_s");
  t.q3 = o.positive("q3_s");
  t.count = static_cast<int>(o.integer("count", 1));
  if (t.q1 > t.median || t.median > t.q3)
    o.fail(o.name("median_s"), "does not lie between q1_s and q3_s");
  return t;
}

PhaseRow read_phase(const Object& o) {
  PhaseRow p;
  p.name = o.text("name");
  p.binding = o.text("binding");
  p.predicted_s = o.at_least_zero("predicted_s");
  p.tensor_flop = o.at_least_zero("tensor_flop");
  p.fp32_flop = o.at_least_zero("fp32_flop");
  p.exp = o.at_least_zero("exp");
  p.hbm_read = o.at_least_zero("hbm_read");
  p.hbm_write = o.at_least_zero("hbm_write");
  if (o.has("l2_bytes")) p.l2_bytes = o.at_least_zero("l2_bytes");
  if (o.has("time")) p.time = read_time(o.object("time"));
  return p;
}

std::vector<RoofRow> read_roofs(const Object& o) {
  std::vector<RoofRow> roofs;
  for (const char* name :
       {"hbm_copy", "hbm_read", "l2", "fp32", "tensor_fp16", "tensor_bf16", "tensor_e4m3", "exp"})
    if (o.contains(name) && o.has(name)) {
      const Object roof = o.object(name);
      roofs.push_back({name, roof.positive("per_second"), roof.text("source")});
    }
  return roofs;
}

VerdictRow read_verdict(const Object& o) {
  VerdictRow v;
  v.tensor = o.text("tensor");
  v.pass = o.truth("pass");
  v.rows_checked = o.integer("rows_checked", 0);
  v.worst_row_error = o.maybe_number("worst_row_error");
  v.bound = o.maybe_number("bound");
  v.failure = o.text("failure");
  if (o.contains("shape")) v.shape = o.texts("shape");
  return v;
}

std::string read_varied(const std::vector<Object>& variations) {
  std::string text;
  for (const Object& v : variations) {
    const std::string change = v.text("change");
    text += fmt::format("{}{}{}{}", text.empty() ? "" : "; ", v.text("outcome"),
                        change.empty() ? "" : " ", change);
  }
  return text;
}

}  // namespace

StepRow read_step(const Object& o) {
  StepRow s;
  s.name = o.text("name");
  s.operation = o.text("operation");
  s.outcome = o.choice("outcome", {"pass", "fail", "unchecked", "unsupported", "error"});
  s.reason = o.text("reason");
  s.binding = o.text("binding");
  if (o.has("time")) s.time = read_time(o.object("time"));
  if (s.time) s.median_s = s.time->median;
  if (o.has("share_of_roof")) s.share_of_roof = o.positive("share_of_roof");
  s.flop = o.at_least_zero("flop");
  s.modelled_bytes = o.at_least_zero("modelled_bytes");
  s.predicted_s = o.at_least_zero("predicted_s");
  if (o.contains("memory_bytes") && o.has("memory_bytes"))
    s.memory_bytes = o.at_least_zero("memory_bytes");
  for (const Object& p : o.objects("phases")) s.phases.push_back(read_phase(p));
  for (const Object& v : o.objects("verdicts")) s.verdicts.push_back(read_verdict(v));
  if (o.contains("variations")) s.varied = read_varied(o.objects("variations"));
  return s;
}

std::string read_bytes(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path))
    if (std::string document = contained_document(path); !document.empty()) return document;
  std::ifstream stream(path, std::ios::binary);
  std::string bytes;
  // A folder can be opened like a file, but the first read fails.
  std::error_code ignored;
  if (stream && !std::filesystem::is_directory(path, ignored))
    bytes.assign(std::istreambuf_iterator<char>(stream), {});
  else
    stream.setstate(std::ios::failbit);
  if (!stream) throw InputError(fmt::format("{}: cannot be read", printable(path.string())));
  return bytes;
}

json parse_json(const std::string& bytes, const std::string& file) {
  json document = json::parse(utf8_text(bytes, file), nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded())
    throw InputError(
        fmt::format("{}: is not JSON, or was not written to its end", printable(file)));
  return document;
}

ResultFile read_run(const Object& o, const std::filesystem::path& path) {
  ResultFile result;
  result.path = path;
  result.chapter = o.text("chapter");
  const Object device = o.object("device");
  result.device = device.text("text");
  result.on_gpu = device.choice("backend", {"gpu", "emulated"}) == "gpu";
  if (result.on_gpu) {
    result.gpu = device.text("name");
    const json& cc = device.array("compute_capability");
    const std::string where = device.name("compute_capability");
    if (cc.size() != 2) device.fail(where, "must be [major, minor]");
    result.compute_capability =
        fmt::format("{}.{}", device.integer(cc[0], where, 1), device.integer(cc[1], where, 0));
    result.cuda_driver = static_cast<int>(device.integer("cuda_driver", 0));
    result.cuda_runtime = static_cast<int>(device.integer("cuda_runtime", 0));
  }
  result.operation = o.text("operation");
  result.problem = read_problem(o.object("problem"));
  const Object roofs = o.object("roofs");
  result.roofs_of = roofs.text("gpu");
  result.roofs = read_roofs(roofs);
  return result;
}

std::string problem_text(const ResultFile& r) {
  return r.problem.text();
}

ResultFile read_result_file(const std::filesystem::path& path) {
  const std::string file = printable(path.string());
  const json document = parse_json(read_bytes(path), file);
  const Object o(document, file, "");
  if (const std::string schema = o.text("schema"); schema != kSchema)
    o.fail("schema", fmt::format("is '{}', must be '{}'", schema, kSchema));
  ResultFile result = read_run(o, path);
  for (const Object& s : o.objects("steps")) result.steps.push_back(read_step(s));
  return result;
}

}  // namespace attn::report
