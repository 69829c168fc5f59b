// The main() of a chapter's quizzes: answers in a text file, one "name = value" per line.
//
//     quiz_01_naive --answers student/ex01d.txt --key d.key               a detective exercise
//     quiz_01_naive --answers student/ex01e.txt --task e.task --seal F    a prediction
//
// Numbers may be arithmetic, 4 * 4096^2 * 128. Invalid answers are refused before anything is
// sealed or shown. A key holds the choices and a hash of each right answer, so reading it reveals
// nothing. A prediction is sealed before the truth is shown: later runs score the sealed answers,
// even if the file has changed. Exit status: 0 passed, 1 not passed (or not all answered), 2
// invalid file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "attn/error.h"
#include "check/operation.h"
#include "exercise/quiz_answers.h"
#include "run/results.h"
#include "run/session.h"

namespace attn {
namespace {

// FNV-1a, 64 bits: hides an answer from a reader, but does not protect against trying all answers.
uint64_t hash(const std::string& text) {
  uint64_t h = 14695981039346656037ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return h;
}
std::string hash_of_answer(const std::string& name, std::string value) {
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return fmt::format("{:016x}", hash("attention " + name + " " + value));
}

// A line of a key: the hash of the right answer, and the possible answers.
struct KeyLine {
  std::string hash, kind;
  explicit KeyLine(const std::string& text)
      : hash(text.substr(0, text.find(' '))),
        kind(text.substr(std::min(text.size(), hash.size() + 1))) {}
};
std::vector<Question> questions_of(const Answers& key, const std::string& path) {
  std::vector<Question> questions;
  try {
    for (const auto& [name, text] : key)
      questions.push_back(Question::from_text(name, KeyLine(text).kind));
  } catch (const std::invalid_argument& e) {
    throw InputError(path + ": " + e.what());
  }
  return questions;
}

int detective(const std::string& answers_path, const std::string& key_path) {
  const Answers key = read_answers(key_path);
  const Answers answers =
      understood(read_answers(answers_path), questions_of(key, key_path), answers_path);
  if (!all_answered(answers)) return 1;
  int right = 0;
  for (const auto& [name, line] : key) {
    const bool good = hash_of_answer(name, answer_to(answers, name)) == KeyLine(line).hash;
    fmt::print("{:<5} {} = {}\n", good ? "right" : "wrong", name, answer_to(answers, name));
    right += good;
  }
  fmt::print("{} of {} right\n", right, key.size());
  return right == static_cast<int>(key.size()) ? 0 : 1;
}

// Prints the key for these right answers; the possible answers come from the old key.
void print_key(const std::string& answers_path, const std::string& key_path) {
  const Answers key = read_answers(key_path);
  const Answers answers =
      understood(read_answers(answers_path), questions_of(key, key_path), answers_path);
  for (const auto& [name, line] : key)
    fmt::print("{} = {} {}\n", name, hash_of_answer(name, answer_to(answers, name)),
               KeyLine(line).kind);
}

double number(const Answers& a, const std::string& name, const std::string& path) {
  const auto value = arithmetic(answer_to(a, name));
  if (!value)
    throw InputError(fmt::format("{}: {} = {}: must be a number", path, name, answer_to(a, name)));
  return *value;
}

// "ask = overlap": how a Hopper step uses an SM. Times of MMAs and exponentials without overlap, or
// of 8-bit MMAs; what fits into shared memory, with a Q tile (`tile_rows`) and pipeline stages of K
// and V (`tile_keys`), at head dim `wide` and at that of the problem; and how many tiles each CTA
// processes with one CTA per SM.
const std::vector<std::string> kOverlapNames{"exp_milliseconds",
                                             "without_overlap",
                                             "fp8_milliseconds",
                                             "shared_bytes",
                                             "stages",
                                             "rounds",
                                             "idle"};
std::vector<double> overlap_truth(const Problem& p, const Cost& cost, const GpuSpec& gpu,
                                  const Answers& task, const std::string& task_path) {
  const auto given = [&](const char* name) { return number(task, name, task_path); };
  const Phase& phase = cost.front();
  const Roofs roofs = datasheet_roofs(gpu);
  const double mmas = phase.tensor_flop / roofs.tensor(p.dtype).rate,
               exp = phase.exp / roofs.exp.rate;
  Cost with_fp8 = cost;
  with_fp8.front().tensor_flop =
      phase.tensor_flop * roofs.tensor(p.dtype).rate / gpu.tensor_fp8_flops;
  const double element = double(size_of(p.dtype)), q = given("tile_rows") * element;
  const double k_and_v = 2 * given("tile_keys") * element, d = double(p.head_dim);
  const double tiles =
      double(p.batch * p.heads) * std::ceil(double(p.seqlen_q) / given("tile_rows"));
  const double sms = gpu.num_sms, rounds = std::ceil(tiles / sms);
  return {exp * 1e3,
          100 * mmas / (mmas + exp),
          predict(with_fp8, roofs, p.dtype).seconds * 1e3,
          given("wide") * (q + given("stages") * k_and_v),
          std::floor((double(gpu.shared_bytes_per_block) - d * q) / (d * k_and_v)),
          rounds,
          100 * (1 - tiles / (rounds * sms))};
}

// "ask = decode": how many CTAs of a row read the same keys compared with one CTA per 16 rows; the
// splits and partial results of the step "against"; how many SMs are busy with one CTA per query;
// the bytes in flight that an SM needs to read at the datasheet's rate when a load takes
// `latency_ns`; and how many rows of a K/V head CUDA cores process in the time that reading its
// keys and values takes.
const std::vector<std::string> kDecodeNames{"readers", "num_splits", "partial_bytes",
                                            "busy",    "in_flight",  "rows"};
std::vector<double> decode_truth(const Problem& p, const Step& against, const GpuSpec& gpu,
                                 double latency_ns) {
  const double rows = double(p.group() * p.seqlen_q);
  const double sms = gpu.num_sms, blocks = double(p.batch * p.heads * p.seqlen_q);
  double partial = 0, splits = 0;
  for (const Workspace& w : against.workspaces(p)) {
    partial += double(w.bytes);
    if (w.name == "lse_partial") splits = double(w.bytes) / (4 * blocks);
  }
  return {rows / std::ceil(rows / 16),
          splits,
          partial,
          100 * std::min(1.0, blocks / sms),
          gpu.hbm_bytes_per_s * latency_ns * 1e-9 / sms,
          gpu.fp32_flops / gpu.hbm_bytes_per_s * double(size_of(p.dtype)) / 2};
}

int predict_exercise(const std::string& answers_path, const std::string& task_path,
                     const std::string& seal) {
  const Answers task = read_answers(task_path);
  const bool sealed = !seal.empty() && std::filesystem::exists(seal);
  if (sealed && read_text(seal) != read_text(answers_path))
    fmt::print("{} has changed since it was sealed; what was sealed is scored\n", answers_path);
  const std::string scored = sealed ? seal : answers_path;
  Problem p;
  const auto integer = [&](const char* name) {
    return static_cast<int64_t>(number(task, name, task_path));
  };
  const auto& steps = chapter().steps;
  const auto step_of = [&](const char* name) {
    return std::find_if(steps.begin(), steps.end(),
                        [&](const Step& s) { return s.name == answer_to(task, name); });
  };
  const auto step = step_of("step"), against = step_of("against");
  const GpuSpec* gpu = find_gpu(answer_to(task, "gpu"));
  if (step == steps.end() || gpu == nullptr ||
      (against == steps.end() &&
       (!answer_to(task, "against").empty() || answer_to(task, "ask") == "decode")))
    throw InputError(task_path + ": names an unknown step or GPU");
  const bool rows = step->operation->matrix;
  p.matrix = rows;
  if (rows) {
    p.heads = p.kv_heads = 1;
    p.seqlen_q = integer("rows"), p.seqlen_k = integer("cols");
  } else {
    p.batch = integer("batch"), p.heads = integer("heads"), p.kv_heads = p.heads;
    p.seqlen_q = p.seqlen_k = integer("seqlen"), p.head_dim = integer("head_dim");
    if (!answer_to(task, "kv_heads").empty()) p.kv_heads = integer("kv_heads");
    if (step->operation->few_queries > 0) p.seqlen_q = step->operation->few_queries;
  }
  Problem full = p;
  p.causal = answer_to(task, "causal") == "yes";
  p.finish();
  full.finish();
  // The two sides of a ratio: "against" and the step, or, with "causal = yes", the causal and the
  // full problem.
  std::optional<std::pair<Cost, Cost>> compared;
  if (against != steps.end()) compared = {step->cost(p), against->cost(p)};
  if (p.causal) compared = {step->cost(full), step->cost(p)};
  // A softmax has no matrix products: its work is the exponentials.
  std::vector<std::string> names{rows ? "exponentials" : "operations", "hbm_bytes", "bound",
                                 "milliseconds"};
  const bool decoding = answer_to(task, "ask") == "decode";
  if (decoding) compared.reset();
  if (compared) names.push_back("speedup");
  // "ask = l2_bytes": where a step's tiles determine the traffic between L2 and the SMs. "ask =
  // tiles": also how many tiles of S (`tile_rows` x `tile_keys`) a head has, and the average work
  // of each of the `warps` of a block.
  const bool tiles = answer_to(task, "ask") == "tiles",
             l2 = tiles || answer_to(task, "ask") == "l2_bytes";
  if (l2) names.push_back("l2_bytes");
  if (l2 && compared) names.push_back("l2_ratio");
  if (tiles) names.push_back("tiles"), names.push_back("warp_operations");
  const bool overlap = answer_to(task, "ask") == "overlap";
  if (overlap) names.insert(names.end(), kOverlapNames.begin(), kOverlapNames.end());
  if (decoding) names.insert(names.end(), kDecodeNames.begin(), kDecodeNames.end());
  std::vector<Question> questions;
  for (const std::string& name : names)
    questions.push_back(
        name == "bound"
            ? Question{name, Question::Kind::choice, {"HBM", "L2", "FP32", "tensor", "exp"}}
            : Question{name, Question::Kind::number, {}});
  const Answers written = read_answers(scored), answers = understood(written, questions, scored);
  if (!all_answered(answers)) return 1;

  if (!seal.empty() && !sealed) {
    if (!confirmed(answers, written)) {
      fmt::print("nothing is sealed\n");
      return 1;
    }
    std::ofstream(seal, std::ios::binary) << read_text(answers_path);
    fmt::print("sealed: {:016x}\n", hash(read_text(answers_path)));
  }

  const Cost cost = step->cost(p);
  const auto predicted = [&](const Cost& c) { return predict(c, datasheet_roofs(*gpu), p.dtype); };
  const Prediction prediction = predicted(cost);
  const Operation& op = *step->operation;
  const auto sum = [](const Cost& c, double Phase::*what) {
    double all = 0;
    for (const Phase& phase : c) all += phase.*what;
    return all;
  };
  std::vector<double> truth{rows ? sum(cost, &Phase::exp) : op.flop(p), modelled_bytes(cost), 0,
                            prediction.seconds * 1e3};
  if (compared)
    truth.push_back(predicted(compared->first).seconds / predicted(compared->second).seconds);
  if (l2) truth.push_back(sum(cost, &Phase::l2_bytes));
  if (l2 && compared)
    truth.push_back(sum(compared->first, &Phase::l2_bytes) /
                    sum(compared->second, &Phase::l2_bytes));
  if (tiles) {
    const double heads = double(p.batch * p.heads), tile = number(task, "tile_rows", task_path);
    truth.push_back(sum(cost, &Phase::exp) / (heads * tile * number(task, "tile_keys", task_path)));
    const double warps =
        heads * std::ceil(double(p.seqlen_q) / tile) * number(task, "warps", task_path);
    truth.push_back(sum(cost, &Phase::tensor_flop) / warps);
  }
  if (overlap)
    for (const double value : overlap_truth(p, cost, *gpu, task, task_path)) truth.push_back(value);
  if (decoding)
    for (const double value :
         decode_truth(p, *against, *gpu, number(task, "latency_ns", task_path)))
      truth.push_back(value);
  fmt::print("{} on {}, {}\n", step->name, gpu->full_name, p.text());
  double score = 0;
  bool passed = true;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string given = answer_to(answers, names[i]);
    if (names[i] == "bound") {
      const bool right = given == prediction.binding;
      fmt::print("{:<16} {:>12}  expected {:>12}  {}\n", names[i], given, prediction.binding,
                 right ? "right" : "wrong");
      score += right;
      passed = passed && right;
      continue;
    }
    // Full points for the right value, half at a factor of 1.4, none from a factor of 2.
    const double value = number(answers, names[i], scored);
    const double off = value > 0 ? std::abs(std::log2(value / truth[i])) : 9;
    fmt::print("{:<16} {:>12.4g}  expected {:>12.4g}  off by {:.0f} %\n", names[i], value, truth[i],
               100 * (value / truth[i] - 1));
    score += std::max(0.0, 1 - off);
    passed = passed && off < (names[i] == "milliseconds" ? 0.5 : 0.1);
  }
  fmt::print(
      "score {:.2f} of {} ({}: each number within 7 %, the time within 40 %, the bound right)\n",
      score, names.size(), passed ? "passed" : "not passed");
  return passed ? 0 : 1;
}

}  // namespace
}  // namespace attn

int main(int argc, char** argv) {
  CLI::App app("checks the answers of a written exercise", "quiz");
  std::string answers, key, task, seal;
  app.add_option("--answers", answers, "the student's file")->required();
  app.add_option("--key", key, "hashes of the right answers (a detective exercise)");
  app.add_option("--task", task, "step, problem and GPU (a prediction)");
  app.add_option("--seal", seal, "where the first complete prediction is kept");
  bool make_key = false;
  app.add_flag("--make-key", make_key, "print the key for which these answers are right");
  try {
    app.parse(argc, argv);
    if (make_key) {
      if (key.empty())
        throw attn::InputError("--make-key: needs --key, which says what may be an answer");
      attn::print_key(answers, key);
      return 0;
    }
    if (!key.empty()) return attn::detective(answers, key);
    if (!task.empty()) return attn::predict_exercise(answers, task, seal);
    throw attn::InputError("one of --key and --task is needed");
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& e) {
    fmt::print(stderr, "quiz: {}\n", e.what());
  } catch (const attn::InputError& e) {
    fmt::print(stderr, "quiz: {}\n", e.what());
  }
  return 2;
}
