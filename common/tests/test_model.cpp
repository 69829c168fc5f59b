/// \file
/// The modelled tensor core operations of a step against those executed in the emulator. Linked
/// into every chapter's tests: tile sizes copied by hand into a model that drift apart fail here.
#include <cmath>
#include <filesystem>
#include <optional>
#include <sstream>

#include "report/code_keys.h"
#include "report/containers.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Tensor core operations of one launch.
double products_of(const Step& step, const Problem& p) {
  const Operation& op = *step.operation;
  emulator::schedule_seed = p.seed;
  Session session(p, op, Backend::emulated, draw_inputs(p, op.inputs(p)));
  REQUIRE(session.prepare(step).ok());
  const std::uint64_t before = emulator::tensor_flop;
  REQUIRE(session.launch().ok());
  return static_cast<double>(emulator::tensor_flop - before);
}

}  // namespace

TEST_CASE("models count the operations that tensor cores do", "[emulated][model]") {
  std::vector<Problem> problems;
  // Masks that skip tiles, and properties that change a launch's tiles. Lengths are multiples of
  // every step's tiles (768 of 192 and 256): in partial tiles some steps skip warps without rows,
  // which no model includes.
  for (const int64_t d : {32, 64, 128, 256}) {
    const int64_t n = d == 64 ? 768 : 256;
    Problem p = problem(n, n, d, DType::bf16);
    p.batch = 1, p.heads = p.kv_heads = 1;
    problems.push_back(p);
    p.causal = true;
    problems.push_back(p);
    p.softcap = 20;
    problems.push_back(p);
  }
  problems.push_back(problem(256, 512, 64, DType::fp16));
  problems.back().window_left = 100, problems.back().window_right = 7;
  for (const std::size_t n : {0, 3, 4, 7, 10})  // also in 8 bits
    for (const DType type : {DType::int8, DType::e4m3})
      problems.push_back(problems[n]), problems.back().dtype = type;
  int number = 0;
  for (Problem p : problems) {
    p.finish();
    ++number;
    for (const Step& step : chapter().steps) {
      if (refusal(step, p)) continue;
      // Softcap changes the tiles of the last steps only.
      if (p.softcap > 0 && !in_turn(step, number)) continue;
      double model = 0;
      for (const Phase& phase : cost_of(step, p)) model += phase.tensor_flop;
      if (model == 0) continue;
      const double done = products_of(step, p);
      if (done == 0) continue;  // computed by a library
      INFO(step.name << ": " << p.text());
      CHECK(model == done);
    }
  }
}

namespace {

const std::string kReports = std::string(ATTN_SOURCE_DIR) + "/docs/reports/h200";

// The number after `name` in "... B=8 Hq=16 ...".
int64_t number_after(const std::string& text, const std::string& name) {
  const std::size_t at = text.find(" " + name + "=");
  REQUIRE(at != text.npos);
  return std::stoll(text.substr(at + name.size() + 2));
}

// A counter of an ncu export, summed over all kernels; and the problem that profile.sh recorded
// there.
struct Counted {
  double bytes = 0;
  Problem problem;
};
std::optional<Counted> counted(const std::string& step, const std::string& counter) {
  std::istringstream file(
      report::contained_document(kReports + "/" + chapter().name + "." + step + ".ncu.csv"));
  if (file.str().empty()) return std::nullopt;
  Counted c;
  for (std::string line; std::getline(file, line);) {
    if (line.find("problem: ") != line.npos) {
      Problem& p = c.problem;
      p.batch = number_after(line, "B"), p.heads = number_after(line, "Hq"),
      p.kv_heads = number_after(line, "Hkv");
      p.seqlen_q = number_after(line, "seqlen_q"), p.seqlen_k = number_after(line, "seqlen_k");
      p.head_dim = number_after(line, "d"), p.causal = line.find(" causal") != line.npos;
      p.finish();
    }
    if (line.find("\"" + counter + "\"") == line.npos) continue;
    std::string number = line.substr(line.rfind(",\"") + 2);
    std::erase(number, ',');
    c.bytes += std::stod(number);
  }
  return c;
}

// Whether the kernel of a step has changed since it was profiled.
bool has_changed(const std::string& step) {
  static report::CodeKeys code(ATTN_SOURCE_DIR);
  for (const auto& line : report::read_lines(kReports + "/" + chapter().name + ".counters.csv"))
    if (line.name == chapter().name + "." + step)
      return line.json().at("keys").at("kernel").at(step) != code.kernel(chapter().name, step);
  return false;
}

// Whether a step has not been tested on a GPU yet, so that nothing of it can have been measured.
bool is_new(const std::string& step) {
  for (const auto& line : report::read_lines(kReports + "/parts.jsonl"))
    if (line.name == "tests " + chapter().name)
      return !line.json().at("keys").at("kernel").contains(step);
  return true;
}

}  // namespace

TEST_CASE("the order of tiles and the size of L2 say what is read from HBM", "[model]") {
  if (!std::filesystem::exists(kReports)) return skipped("an edition without reports");
  for (const Step& step : chapter().steps) {
    if (!step.tiled) continue;
    INFO(step.name);
    const auto c = counted(step.name, "dram__bytes_read.sum");
    CHECK((c || is_new(step.name)));
    if (!c || has_changed(step.name)) {
      skipped(step.name + (c ? " has changed since it was counted" : " has not been counted yet"));
      continue;
    }
    double model = 0;
    for (const Phase& phase : cost_of(step, c->problem)) model += phase.hbm_read;
    INFO(step.name << ": " << c->problem.text() << ": modelled " << model << ", counted "
                   << c->bytes);
    // When all heads run at once, K and V are loaded repeatedly. How often depends on how far
    // blocks drift apart, so the model is only accurate to 30 %.
    const Problem& p = c->problem;
    const double once = 2.0 * static_cast<double>(p.batch * p.head_dim) *
                        static_cast<double>(p.heads * p.seqlen_q + 2 * p.kv_heads * p.seqlen_k);
    CHECK(std::abs(model / c->bytes - 1) < (model > 1.5 * once ? 0.3 : 0.15));
  }
}
