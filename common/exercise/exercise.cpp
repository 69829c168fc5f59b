#include "exercise/exercise.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "check/failure_shape.h"
#include "attn/error.h"
#include "attn/sliding_tiles.h"
#include "attn/tiling.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "check/variations.h"
#include "run/mask_option.h"

namespace attn {
namespace {

// Small enough for the emulator, with a partial tile in every dimension; needles at tile edges and
// scores up to 1e4.
std::vector<Problem> attention_cases(const Step& step, uint64_t seed) {
  std::vector<Problem> all;
  uint64_t n = 0;
  for (const int64_t length : {1, 3, 31, 33, 64, 65, 113, 129, 203})
    for (const InputKind inputs : {InputKind::needle, InputKind::random, InputKind::peaked}) {
      Problem p;
      p.seqlen_q = p.seqlen_k = length;
      if (n % 4 == 1) p.seqlen_k = length + 37;
      if (n % 4 == 3) p.seqlen_q = length + 5;  // causal: fully masked rows
      p.causal = n % 2 == 1;
      if (n % 5 == 4) p.window_left = 9, p.window_right = 4;
      p.heads = n % 3 == 0 ? 4 : 2;
      p.kv_heads = n % 3 == 0 ? 2 : p.heads;
      p.head_dim = n % 2 == 0 ? 64 : 40;
      p.dtype = n % 3 == 2 ? DType::fp32 : DType::bf16;
      p.inputs = inputs;
      if (quantises_to(step) != DType::bf16) p.dtype = quantises_to(step);
      if (takes(step, "dropout") && n % 5 == 2) p.dropout = 0.25;
      if (takes(step, "tree")) p.own["tree"] = {1}, p.seqlen_k = std::max(p.seqlen_q, p.seqlen_k);
      p.seed = seed + n++;
      p.finish();
      for (const int64_t other : {32, 64})  // for steps that support few head dims only
        if (p.head_dim != 64 && refusal(step, p)) p.head_dim = other;
      if (!refusal(step, p)) all.push_back(p);
    }
  // Steps without small head dims have tiles of 128 keys. These lengths use each of two pipeline
  // stages three times.
  for (const int64_t keys : {391, 700, 580, 650, 520, 777}) {
    Problem p;
    p.seqlen_q = 130, p.seqlen_k = keys;
    p.heads = 2, p.kv_heads = 1;
    p.head_dim = 32;
    if (n % 3 == 0) p.causal = true;
    // begins after the first KV tile
    if (n % 3 == 1) p.window_left = 300, p.window_right = 40;
    p.inputs = n % 3 == 0 ? InputKind::needle : n % 3 == 1 ? InputKind::random : InputKind::peaked;
    p.dtype = quantises_to(step);
    p.seed = seed + n++;
    if (takes(step, "tree")) p.own["tree"] = {1};
    p.finish();
    if (!refusal(step, p)) continue;
    p.head_dim = 64;
    if (!refusal(step, p)) all.push_back(p);
  }
  // Each case of a step that quantises takes a second: those with the most blocks of keys first.
  if (quantises_to(step) != DType::bf16) std::ranges::reverse(all);
  return all;
}

// For steps with masks of their own, with tiles of 128: windows in the middle of a canvas, at its
// edges and as large as it; tiles of one block and of two; with text that ends within a block, and
// without text.
std::vector<Problem> canvas_cases(const Step& step, uint64_t seed) {
  struct Canvas {
    Sides sides, tile;
    std::vector<Sides> windows;  // in tiles, as the sides
    int64_t text;
  };
  const Sides small{2, 8, 8}, large{4, 8, 8};
  const Canvas canvases[] = {{{1, 1, 5}, small, {{1, 1, 3}, {1, 1, 1}}, 0},
                             {{1, 5, 1}, small, {{1, 1, 1}, {1, 3, 1}}, 0},
                             {{5, 1, 1}, small, {{3, 1, 1}, {5, 1, 1}}, 70},
                             {{1, 1, 7}, small, {{1, 1, 5}}, 0},
                             {{1, 3, 4}, small, {{1, 1, 3}, {1, 3, 1}}, 0},
                             {{2, 2, 3}, small, {{1, 2, 1}, {2, 1, 3}}, 100},
                             {{1, 1, 3}, large, {{1, 1, 1}, {1, 1, 3}}, 256},
                             {{4, 1, 3}, small, {{3, 1, 1}}, 1}};
  std::vector<Problem> all;
  uint64_t n = 0;
  for (const auto& [sides, tile, windows, text] : canvases) {
    const auto in_tokens = [&](const Sides& s) {
      return Sides{s[0] * tile[0], s[1] * tile[1], s[2] * tile[2]};
    };
    const Sides canvas = in_tokens(sides);
    std::vector<Sides> window;
    for (const Sides& w : windows) window.push_back(in_tokens(w));
    Problem p;
    p.seqlen_q = p.seqlen_k = canvas[0] * canvas[1] * canvas[2] + text;
    p.heads = static_cast<int64_t>(windows.size()), p.kv_heads = 1;
    p.head_dim = 64;
    p.inputs = n % 2 == 0 ? InputKind::random : InputKind::peaked;
    p.seed = seed + n++;
    p.mask = std::make_shared<SlidingTiles>(canvas, tile, window, text);
    p.finish();
    if (!refusal(step, p)) all.push_back(p);
  }
  return all;
}

// FlashMask's training and inference masks; then intervals that end at query tile boundaries, or
// one row before or after them. In head 0 they form a band of rows per key, in head 1 the rows of
// the second tile or most of them.
std::vector<Problem> column_cases(const Step& step, uint64_t seed) {
  constexpr const char* kNames[] = {"causal_document",       "document",         "share_question",
                                    "global_sliding_window", "causal_blockwise", "prefix_lm_causal",
                                    "prefix_lm_document",    "qk_sparse",        "random_eviction"};
  std::vector<Problem> all;
  uint64_t n = 0;
  const auto add = [&](int64_t queries, int64_t keys, bool causal, auto mask) {
    Problem p;
    p.seqlen_q = queries, p.seqlen_k = keys;
    p.heads = 2, p.kv_heads = 1;
    p.head_dim = 64;
    p.causal = causal;
    p.inputs = n % 2 == 0 ? InputKind::random : InputKind::needle;
    p.seed = seed + n++;
    p.finish();
    p.mask = mask(p);
    if (!refusal(step, p)) all.push_back(p);
  };
  for (const std::string name : kNames) {
    constexpr const char* kNotCausal[] = {"document", "global_sliding_window", "prefix_lm_causal",
                                          "prefix_lm_document"};
    const int64_t length = 270 + 60 * static_cast<int64_t>(n);
    add(length, length, std::ranges::find(kNotCausal, name) == std::end(kNotCausal),
        [&](const Problem& p) { return read_mask("flashmask:" + name, p); });
  }
  for (const int64_t around : {0, -1, 1})
    add(300, 400, around == 0, [&](const Problem& p) {
      std::vector<int64_t> begin, end;
      for (int64_t j = 0; j < p.seqlen_k; ++j)
        begin.push_back(j / 2), end.push_back(std::min<int64_t>(300, j / 2 + 129 + j % 3));
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        const bool hides = j < 256 || j == 300;  // of the third block one key, of the fourth none
        begin.push_back(hides ? 128 + (j < 128 ? around : 0) : 0);
        end.push_back(hides ? 256 + (j < 128 ? 0 : around) : 0);
      }
      return std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 2, 1, p.seqlen_k}, begin,
                                               end);
    });
  return all;
}

// Rows with fewer and with more elements than a block has threads, that begin inside a vector.
// Masks leave -inf at one end, and some rows are fully masked.
std::vector<Problem> row_cases(const Step& step, uint64_t seed) {
  std::vector<Problem> all;
  uint64_t n = 0;
  for (const int64_t cols : {1, 3, 31, 33, 257, 513, 1000, 1025, 2049, 5003})
    for (const InputKind inputs : {InputKind::needle, InputKind::random, InputKind::peaked}) {
      Problem p;
      p.heads = p.kv_heads = 1;
      p.seqlen_q = 5;
      p.seqlen_k = cols;
      p.matrix = true;
      if (n % 4 == 1) p.seqlen_q = cols % 7 + 5, p.causal = true;
      if (n % 4 == 3) p.window_left = 0, p.window_right = 16;
      p.dtype = n % 3 == 2 ? DType::fp32 : n % 3 == 1 ? DType::fp16 : DType::bf16;
      p.inputs = inputs;
      p.seed = seed + n++;
      p.finish();
      if (!refusal(step, p)) all.push_back(p);
    }
  return all;
}

// A few queries, with caches of which some are partly or completely unused: some splits are empty.
// The rows that share keys are fewer than a tile of 16, or more. A step that quantises gets
// problems of its type.
std::vector<Problem> decode_cases(const Step& step, uint64_t seed) {
  constexpr int64_t kHeads[][2] = {{4, 1}, {2, 2}, {6, 2}, {8, 1}, {3, 1}};
  constexpr int64_t kQueries[] = {1, 3, 2, 5};
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked};
  constexpr double kPageSizes[] = {16, 5, 1, 64};  // of a paged cache
  std::vector<Problem> all;
  uint64_t n = 0;
  for (const int64_t room : {1, 15, 17, 64, 65, 113, 129, 203, 391, 580, 700})
    for (const int64_t in_use : {room, room / 2, int64_t{0}}) {
      Problem p;
      p.dtype = quantises_to(step);
      p.head_dim = 64;
      p.heads = kHeads[n % 5][0], p.kv_heads = kHeads[n % 5][1];
      p.seqlen_q = kQueries[n % 4], p.seqlen_k = room;
      if (n % 3 == 1) p.causal = true;
      if (n % 7 == 3) p.window_left = 70, p.window_right = 0;
      if (in_use < room) p.batch = 2, p.seqused_k = {in_use, room - room / 3};
      if (n == 5) p.seqused_k = {0, 0};
      for (const Feature& f : step.operation->own)
        if (f.name == "page_size") f.give(p, {kPageSizes[n % 4]});
      for (std::size_t r = 0; takes(step, "devices") && r < 1 + n % 4; ++r)
        p.own["devices"].push_back(static_cast<double>(r));
      // The step's own heuristic would not split so few keys.
      if (takes(step, "num_splits")) p.own["num_splits"] = {static_cast<double>(1 + n % 6)};
      p.inputs = kInputs[n % 3];
      p.seed = seed + n++;
      p.finish();
      if (!refusal(step, p)) all.push_back(p);
    }
  return all;
}

// For a step with one launch for prefill and decoding: prompt chunks, sequences that decode, and
// one without queries.
std::vector<Problem> mixed_cases(const Step& step, uint64_t seed) {
  struct Batch {
    std::vector<int64_t> queries, keys;
  };
  const Batch batches[] = {{{70, 1, 0, 1}, {70, 203, 9, 65}},
                           {{1, 130, 17, 3}, {391, 200, 17, 0}},
                           {{5, 33}, {580, 33}},
                           {{1, 1, 200, 2}, {129, 64, 300, 17}}};
  std::vector<Problem> all;
  uint64_t n = 0;
  for (const auto& [queries, keys] : batches) {
    Problem p;
    p.varlen_q = queries, p.varlen_k = keys;
    p.heads = 4, p.kv_heads = n % 2 == 0 ? 1 : 2;
    p.head_dim = 64;
    p.causal = n % 2 == 0;
    p.own["page_size"] = {n % 2 == 0 ? 16.0 : 5.0};
    p.inputs = n % 2 == 0 ? InputKind::random : InputKind::needle;
    p.seed = seed + n++;
    p.finish();
    if (!refusal(step, p)) all.push_back(p);
  }
  return all;
}

std::vector<Problem> cases(const Step& step, uint64_t seed) {
  if (step.operation->few_queries > 0) return decode_cases(step, seed);
  if (step.operation->matrix) return row_cases(step, seed);
  std::vector<Problem> all = attention_cases(step, seed);
  if (takes(step, "serial")) {
    const std::vector<Problem> more = mixed_cases(step, seed);
    all.insert(all.begin(), more.begin(), more.end());
  }
  if (takes(step, "mask"))
    for (const auto& more : {canvas_cases(step, seed), column_cases(step, seed)})
      all.insert(all.end(), more.begin(), more.end());
  return all;
}

// The result of a request: a pass, wrong numbers with their shape, or the reason why there are
// none.
Varied answer_of(const Step& step, const Problem& p, const Request& request,
                 StudentProcess& student) {
  const Reply reply = student.ask(request);
  if (!reply.message.empty()) return {Varied::Outcome::stopped, reply.message};
  const HostTensors out = reply.outputs(request);
  for (const Expected& e : expected_of(step, p, request.inputs, {}))
    if (const Verdict v = examine(out.at(e.spec.name), e, p, step); !v.pass)
      return {Varied::Outcome::fail, failure_text(v, "        ")};
  return {Varied::Outcome::pass, ""};
}
// The same for a problem. `turn`: another schedule, for a variation.
Varied answered(const Step& step, const Problem& p, Backend backend, StudentProcess& student,
                std::optional<uint64_t> turn = {}, const std::string& timeline = "",
                const std::string& title = "") {
  Request request = request_for(step, p, backend);
  request.timeline = timeline, request.title = title;
  if (!timeline.empty()) request.problem.inputs = p.inputs, request.problem.seed = p.seed;
  request.schedule += turn.value_or(0);
  request.quiet = turn.has_value();
  add_inputs(request, step, p);
  return answer_of(step, p, request, student);
}

// For a step whose launch leaves data for the next launch: which of the three launches was wrong.
std::string launch_text(const Step& step, const Problem& p, Backend backend,
                        StudentProcess& student) {
  Request request = request_for(step, p, backend);
  std::vector<std::string> kept;
  for (const Workspace& w : request.workspaces)
    if (w.saved) kept.push_back(w.name);
  if (kept.empty()) return "";
  request.quiet = true;
  add_inputs(request, step, p);
  const auto passes = [&](int launches) {
    request.launches = launches;
    return answer_of(step, p, request, student).outcome == Varied::Outcome::pass;
  };
  if (!student.restart()) return "";
  if (!passes(1)) return "the first launch is wrong";
  if (!student.restart()) return "";
  const bool third = passes(2);
  return fmt::format("{} wrong: it begins with what {} left in {}",
                     third ? "the first two launches are right, the third is"
                           : "the first launch is right, the second is",
                     third ? "they" : "the first", fmt::join(kept, ", "));
}

// The same problem with one change, in the emulator under three schedules.
std::vector<Varied> varied(const Step& step, const Problem& p, Backend backend,
                           StudentProcess& student) {
  constexpr double kSeconds = 20;
  std::vector<Varied> all;
  student.hurry(kSeconds);
  for (const Variation& variation : variations(p, *step.operation, tiling_of(step, p))) {
    Varied v;
    if (const auto reason = refusal(step, variation.problem))
      v = {Varied::Outcome::unsupported, *reason};
    for (uint64_t turn = 0;
         v.outcome == Varied::Outcome::not_tried || v.outcome == Varied::Outcome::pass; ++turn) {
      if (turn == (backend == Backend::emulated ? 3 : 1)) break;
      if (!student.restart()) {
        v = {Varied::Outcome::not_tried, "no time is left"};
        break;
      }
      v = answered(step, variation.problem, backend, student, turn);
    }
    v.change = variation.change;
    all.push_back(std::move(v));
  }
  return all;
}

// Derives the emulator's schedule from the problem's seed, so that a kernel's arguments reveal
// nothing about how its inputs were drawn.
uint64_t schedule_of(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull;  // SplitMix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<Exercise>& exercises() {
  static std::vector<Exercise> all;
  return all;
}
bool add_exercise(Exercise e) {
  exercises().push_back(std::move(e));
  return true;
}

const Step& shipped_step(const Exercise& e) {
  const auto& steps = chapter().steps;
  return *std::find_if(steps.begin(), steps.end(), [&](const Step& s) { return s.name == e.step; });
}

Request request_for(const Step& step, const Problem& p, Backend backend) {
  const Operation& op = *step.operation;
  Request r;
  r.backend = backend;
  // Of three successive seeds each has another kind of schedule (run/schedule.h).
  r.schedule = schedule_of(p.seed) / 3 * 3 + p.seed % 3;
  r.problem = p;
  r.problem.inputs = InputKind::random;
  if (p.dropout == 0) r.problem.seed = 0;
  r.workspaces = step.workspaces(p);
  r.input_specs = op.inputs(p);
  r.output_specs = op.outputs(p);
  return r;
}

void add_inputs(Request& request, const Step& step, const Problem& p) {
  request.inputs = draw(*step.operation, p).tensors;
  if (!step.plan) return;
  for (auto& [name, tensor] : step.plan(p, request.inputs)) {
    request.input_specs.push_back(tensor.spec);
    request.inputs.emplace(name, std::move(tensor));
  }
}

bool run_exercise(const Exercise& e, StudentProcess& student, uint64_t seed,
                  std::optional<int> only, const std::string& timeline) {
  const Step& step = shipped_step(e);
  const std::string judge = std::filesystem::canonical("/proc/self/exe").string();
  const auto print_see_it = [&](int number) {
    if (timeline.empty())
      fmt::print("      see it: {} {} --seed {} --case {} --timeline {}.html\n", judge, e.name,
                 seed, number, e.name);
  };
  fmt::print("{} ({}, {})\n", e.name, e.kind, e.step);
  std::fflush(stdout);  // before the output of the student's program
  if (e.judge && timeline.empty()) {
    Request request;
    request.what = Request::What::probe;
    const Reply reply = student.ask(request);
    const auto verdict = reply.message.empty() ? e.judge(reply.probed()) : reply.message;
    if (verdict) {
      fmt::print("FAIL  {}\n", *verdict);
      // The first case, or the first one of the head dim that the verdict names.
      const std::vector<Problem> all = cases(step, seed);
      const auto named = std::ranges::find_if(all, [&](const Problem& p) {
        return verdict->starts_with(fmt::format("head dim {}: ", p.head_dim));
      });
      print_see_it(named == all.end() ? 1 : 1 + int(named - all.begin()));
      return false;
    }
  }
  std::vector<Backend> backends{Backend::emulated};
  if (gpu_info().available && step.launch.gpu && timeline.empty() && !takes(step, "devices"))
    backends.push_back(Backend::gpu);  // a step on ranks needs a GPU each: emulated ranks only
  int number = 0, passed = 0;
  for (const Backend backend : backends)
    for (const Problem& p : cases(step, seed)) {
      ++number;
      if (only && *only != number) continue;
      const Varied answer =
          answered(step, p, backend, student, {}, timeline, fmt::format("{} ({})", e.name, e.step));
      const char* where = backend == Backend::gpu ? "gpu" : "emulated";
      if (answer.reason == kNoGpuKernel && !only) {
        fmt::print("not run on the GPU: {}\n", kNoGpuKernel);
        break;
      }
      if (answer.outcome != Varied::Outcome::pass) {
        fmt::print("FAIL  {}: {}\n      {}\n", where, p.text(), answer.reason);
        std::fflush(stdout);
        if (!timeline.empty()) return false;
        if (const std::string launch = launch_text(step, p, backend, student); !launch.empty())
          fmt::print("        launch: {}\n", launch);
        if (const auto again = varied_text(varied(step, p, backend, student), answer.reason);
            !again.empty())
          fmt::print("        varied: {}\n", again);
        fmt::print("      again: {} {} --seed {} --case {}\n", judge, e.name, seed, number);
        if (backend == Backend::emulated) print_see_it(number);
        return false;
      }
      fmt::print("ok    {}: {}\n", where, p.text());
      std::fflush(stdout);
      ++passed;
    }
  if (only && passed == 0) {
    throw InputError(fmt::format("--case {}: must be from 1 to {}", *only, number));
  }
  fmt::print("{} pass\n",
             only ? fmt::format("case {}:", *only) : fmt::format("all {} cases", passed));
  return true;
}

}  // namespace attn
