// Runs one version of a step (broken_step.h) in the emulator with race detection, under up to 36
// schedules (one if it is unchanged, three if it has two streams): copies are late in a third of
// them, early in a third, mixed in the others.
//
//     broken_v8_persistent 3   exits with 0 if the first failing schedule has the declared reason
//     broken_v8_persistent 0   the unchanged step: exits with 0 if it passes
//
// A report begins with "mismatch" or "damage" (a guard band, an input), or it is the emulator's own
// line: "race: ...", "deadlock: ...", "... calls wgmma at ... without wgmma_fence since the last
// wait".
#include "tests/broken_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "attn/mask.h"
#include "attn/sliding_tiles.h"
#include "check/failure_shape.h"
#include "check/inputs.h"
#include "ranks/emulated.h"
#include "run/diagnosis.h"
#include "run/schedule.h"
#include "run/session.h"

namespace attn {
[[gnu::weak]] const Chapter& chapter();  // linked if a step needs more than its launch
}

namespace {

using namespace attn;

// A step around a version's launch. For steps with a dynamic tile scheduler the counter is cleared.
Step step_of(const tests::Version& version) {
  Step step;
  if (chapter)
    for (const Step& s : chapter().steps)
      if (s.name == tests::kStep) step = s;
  if (version.prepare) step.prepare.emulated = version.prepare;
  if (!step.prepare)
    step.prepare.emulated = [](const Arguments& args) {
      if (args.in_or_null<unsigned>("tile_counter")) *args.out<unsigned>("tile_counter") = 0;
      return Status{};
    };
  step.launch.emulated = version.launch;
  step.refuses = [](const Problem&) { return std::nullopt; };
  if (chapter) return step;
  step.name = "version";
  step.operation = &forward();
  step.tiled = true;
  step.workspaces = [](const Problem&) {
    return std::vector<Workspace>{{"tile_counter", 4, true}};
  };
  return step;
}

// A mask of the kind that the step supports.
void give_mask(Problem& p) {
  // Some blocks closed, and the whole second query tile of head 1.
  std::vector<bool> open(24);
  for (std::size_t n = 0; n < open.size(); ++n) open[n] = n % 5 != 2 && n / 4 != 4;
  p.mask = std::make_shared<BlockMask>(128, 128, std::vector<int64_t>{1, 2, 3, 4}, open);
  for (const Step& s : chapter().steps)
    if (s.name == tests::kStep && !refusal(s, p)) return;
  // A canvas of 1 x 1 x 3 tiles, windows of one and of three tiles, and text.
  Problem canvas = p;
  canvas.seqlen_q = canvas.seqlen_k = 3 * 128 + 150;
  canvas.mask = std::make_shared<SlidingTiles>(Sides{6, 8, 8}, Sides{2, 8, 8},
                                               std::vector<Sides>{{2, 8, 8}, {6, 8, 8}}, 150);
  canvas.finish();
  for (const Step& s : chapter().steps)
    if (s.name == tests::kStep && !refusal(s, canvas)) {
      p = canvas;
      return;
    }
  // Head 0: a band of rows per key. Head 1: in the first block all rows except the last row of the
  // first tile; in the second block all rows, but none for its first key; in the others the last
  // row of a warp.
  std::vector<int64_t> begin, end;
  const auto hide = [&](int64_t from, int64_t to) { begin.push_back(from), end.push_back(to); };
  for (int64_t j = 0; j < p.seqlen_k; ++j) hide(j / 2, std::min<int64_t>(300, j / 2 + 129 + j % 3));
  for (int64_t j = 0; j < p.seqlen_k; ++j) {
    if (j < 128)
      hide(0, 127);
    else if (j < 256)
      hide(0, j == 128 ? 0 : 300);
    else
      hide(15, 16);
  }
  p.mask = std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 2, 1, p.seqlen_k}, begin, end);
}

// The fault of the step under this schedule, or "".
std::string run(const Step& step, const Problem& problem, Session& session,
                const std::vector<Expected>& expected) {
  if (const Status status = session.prepare(step); !status.ok()) return status.message;
  if (const Status status = session.launch(); !status.ok()) return status.message;
  if (const auto damage = session.damage()) return "damage: " + *damage;
  const HostTensors outputs = session.outputs();
  for (const Expected& e : expected)
    if (const Verdict v = examine(outputs.at(e.spec.name), e, problem, step); !v.pass)
      return "mismatch: " + failure_text(v);
  return "";
}

// The lines of a version's file that a message names: "v8_persistent/3.cu:120" is one.
std::vector<std::string> lines_named(const std::string& said, unsigned long number) {
  const std::string name = fmt::format("/{}.cu:", number);
  std::vector<std::string> named;
  for (std::size_t at = said.find(name); at != said.npos; at = said.find(name, at + 1)) {
    std::ifstream file(tests::kFolder + fmt::format("{}.cu", number));
    std::string line;
    for (unsigned long n = std::strtoul(said.c_str() + at + name.size(), nullptr, 10); n > 0; --n)
      std::getline(file, line);
    named.push_back(line);
  }
  return named;
}

// Whether the report matches the declared reason.
bool is_reason(const std::string& said, const std::string& reason, unsigned long number) {
  const std::size_t bar = reason.find(" | ");
  if (bar == reason.npos) return said.find(reason) != said.npos;
  const std::string word = "race: ", first = reason.substr(word.size(), bar - word.size()),
                    second = reason.substr(bar + 3);
  const std::vector<std::string> lines = lines_named(said, number);
  const auto holds = [](const std::string& line, const std::string& part) {
    return line.find(part) != line.npos;
  };
  return said.find(word) == 0 && lines.size() == 2 &&
         ((holds(lines[0], first) && holds(lines[1], second)) ||
          (holds(lines[0], second) && holds(lines[1], first)));
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = argc == 2 ? std::strtoul(argv[1], nullptr, 10) : tests::kVersions.size();
  if (number >= tests::kVersions.size()) {
    fmt::print(stderr, "{}: the number of a version, 0 to {}\n", argv[0],
               tests::kVersions.size() - 1);
    return 2;
  }
  const tests::Version& version = tests::kVersions[number];
  const Step step = step_of(version);
  Problem p;
  p.seqlen_q = 300, p.seqlen_k = 391, p.head_dim = 64, p.heads = 2, p.kv_heads = 1;
  if (const auto& dims = step.limits.head_dims; !dims.empty() && !std::ranges::count(dims, 64))
    p.head_dim = dims.front();
  p.dtype = quantises_to(step);
  // Each block runs several query tiles. V has two chunks: one of 32 key blocks, and one of as many
  // as V has buffers.
  if (step.name == "f6_smooth_v_chunks" || step.name == "q8_tuned")
    p.seqlen_q = 300, p.seqlen_k = 4096 + 300, p.kv_heads = 2;
  if (step.name == "f8_q_in_registers")
    p.head_dim = 128, p.seqlen_q = 600, p.seqlen_k = 300;  // several query tiles per block
  if (step.name == "b5_whole_heads") p.kv_heads = 2;  // a head for each of the emulator's SMs
  if (step.name == "b6_tuned")  // one visit per key tile: the producer runs tiles ahead
    p.heads = 1, p.seqlen_q = 100, p.seqlen_k = 1100;
  if (step.name == "b12_features")
    p.varlen_q = {100, 0, 140}, p.varlen_k = {150, 64, 130}, p.softcap = 15;
  if (step.name == "b16_issue_order")  // a key tile without visits, and five with
    p.seqlen_k = 647, p.window_left = 200, p.causal = true;
  if (step.name == "b14_softcap_d256") p.softcap = 1, p.causal = true;
  if (step.name == "b15_packed_d256")  // tiles past the end, then one that has keys
    p.varlen_q = {100, 0, 140}, p.varlen_k = {60, 64, 150}, p.softcap = 15;
  if (takes(step, "rotary")) p.own["rotary"] = {1};
  const Operation& op = *step.operation;
  if (op.few_queries > 0 && !op.complete) {  // decoding: an odd first key, mixed lengths
    p.seqlen_q = 4, p.heads = 8, p.kv_heads = 2, p.batch = 2;
    p.seqused_k = {391, 150}, p.window_left = 232, p.window_right = 0;
    if (p.dtype != DType::bf16)  // larger tiles: some warps have three
      p.seqlen_k = 591, p.seqused_k = {591, 150}, p.window_left = 532;
    if (step.name == "d9_kivi")  // fills its last stage, after the newest tokens
      p.seqlen_k = 2091, p.seqused_k = {2091, 150}, p.window_left = 2032;
  }
  if (op.few_queries > 0 && op.complete) {  // pages: pieces of a block, blocks of a piece
    p.seqlen_q = 1, p.batch = 2, p.seqused_k = {391, 70}, p.own["blocks"] = {3};
    // two alternating tiles: pieces of one and of five; two row tiles, and more than four parts
    if (step.name == "v16_mla_seesaw")
      p.seqlen_k = 1480, p.seqused_k = {60, 1480}, p.own["blocks"] = {12};
    // two groups of two, with two row tiles each; and a single one
    if (step.name == "v17_prefix_tma") {
      p.seqlen_q = 13, p.heads = 16, p.kv_heads = 2, p.batch = 5;
      p.seqused_k = {391, 340, 352, 391, 330}, p.own["shared_prefix"] = {300, 2}, p.causal = true;
    }
    op.complete(p, {});
    if (step.name == "v16_mla_seesaw") p.heads = 80;
  }
  if (takes(step, "keep")) {  // a field and text; some blocks are selected
    p.seqlen_q = p.seqlen_k = 4 * 8 * 16 + 60;
    p.own = {{"field", {4, 8, 16}}, {"similarity", {0.05}}, {"keep", {0.3}}};
    p.own["keep_sink"] = p.own["keep_diagonal"] = {1};
    if (takes(step, "skip_below")) p.own["skip_below"] = {6}, p.own["keep"] = {1};
    if (step.name == "s9_tuned") {  // more than the 32 key blocks of a window
      p.seqlen_q = 200, p.seqlen_k = 4096 + 391;
      p.own = {{"similarity", {0}}, {"keep", {0.95}}};
    }
  }
  if (takes(step, "devices")) {
    p.own["devices"] = {0, 1, 2, 3};
    p.causal = step.name != "p8_paged_shards", p.window_left = p.window_right = -1,
    p.seqused_k.clear();
    if (op.few_queries > 0)
      p.seqlen_k = 1000;  // each rank splits its keys
    else
      p.seqlen_q = p.seqlen_k;
    if (op.name == "backward")  // a launch per pair of parts
      p.own["devices"] = {0, 1, 2}, p.heads = 1, p.seqlen_q = p.seqlen_k = 101;
  }
  if (takes(step, "serial"))  // prompt chunks together with decoding sequences
    p.varlen_q = {300, 1, 3}, p.varlen_k = {391, 391, 70}, p.own["blocks"] = {2};
  else if (op.name == "paged_prefill")  // sequences that end within a page
    p.heads = 4, p.kv_heads = 2, p.varlen_q = {300, 3, 0}, p.varlen_k = {391, 70, 5};
  p.finish();
  if (takes(step, "mask")) give_mask(p);
  const HostTensors inputs = draw_inputs(p, op.inputs(p));
  const std::vector<Expected> expected = expected_of(step, p, inputs, {});
  // The unchanged step runs under many schedules in test_schedules.cpp, but not in two streams.
  const uint64_t schedules = !version.reason.empty() ? 36 : takes(step, "streams") ? 3 : 1;
  for (uint64_t schedule = 1; schedule <= schedules; ++schedule) {
    choose_schedule(schedule);
    // A second run finds the flags and the buffers of the first one. The buffers are right.
    if (takes(step, "devices")) ranks::planted.runs = 1 + static_cast<int>(schedule % 2);
    if (takes(step, "streams")) {  // two concurrent launches in half of the runs
      p.own.erase("streams");
      if ((schedule & 2) != 0) p.own["streams"] = {1};
    }
    emulator::find_races = emulator::find_global_races = true;
    Session session(p, op, Backend::emulated, inputs);
    const std::string wrong = run(step, p, session, expected);
    if (wrong.empty()) continue;
    const bool declared = !version.reason.empty() && is_reason(wrong, version.reason, number);
    for (const std::string& line : lines_named(wrong, number)) fmt::print("  line: {}\n", line);
    fmt::print("schedule {}: {}\n", schedule, wrong);
    // An unexpected failure is diagnosed, which takes many runs.
    if (declared)
      fmt::print("noticed\n");
    else
      fmt::print("  varied: {}\nnot the declared reason: {}\n",
                 varied_text(diagnose(step, p, Backend::emulated, schedule), wrong),
                 version.reason);
    return declared ? 0 : 1;
  }
  fmt::print("{} schedules pass\n", schedules);
  return version.reason.empty() ? 0 : 1;
}
