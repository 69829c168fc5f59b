#include "run/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include <nlohmann/json.hpp>

#include "emulator/simt.h"
#include "emulator/timeline.h"
#include "run/timeline_page.h"

namespace attn {
namespace {

// A page has the text in a <script>: no '<' in JSON's strings.
std::string without_tags(const std::string& json) {
  std::string text;
  for (const char c : json) c == '<' ? text += "\\u003c" : text += c;
  return text;
}

}  // namespace

Status TimelineRecorder::record(Session& session) {
  // Asynchronous work happens in memory when a thread waits for it: the clocks alone say when.
  emulator::early_copies = emulator::mixed_copies = false;
  emulator::late_warps = emulator::LateWarps::in_turn;  // where the schedule asks for the clocks
  emulator::Timeline timeline(trace_);
  struct Modelled {
    explicit Modelled(emulator::Timeline& t) { emulator::timeline = &t; }
    ~Modelled() { emulator::timeline = nullptr; }
  } const modelled(timeline);
  return session.launch();
}

void TimelineRecorder::write(OutputFile& file) const {
  constexpr double kMega = 1e6;
  const double us = static_cast<double>(trace_.end()) / emulator::kClockMhz;
  if (trace_.blocks() == 0) {
    fmt::print("timeline: nothing was launched, and nothing is written\n");
    return;
  }
  nlohmann::ordered_json about;
  about["what"] = "a model of an H100 or H200, not a measurement (docs/timelines.md)";
  about["chapter"] = run_.chapter;
  about["step"] = run_.steps.front().step;
  about["operation"] = run_.operation;
  about["problem"] = run_.problem.text();
  about["clock_mhz"] = emulator::kClockMhz;
  about["modelled_us"] = static_cast<double>(static_cast<int64_t>(us * 1000)) / 1000;
  about["blocks"] = trace_.blocks();
  std::string left_out;
  const bool page = is_timeline_page(options_.timeline);
  const std::size_t limit = static_cast<std::size_t>(options_.timeline_limit * kMega);
  const std::size_t around = page ? kTimelinePageBegin.size() + kTimelinePageEnd.size() : 0;
  std::string text = trace_.json(without_tags(about.dump()), limit - std::min(limit, around),
                                 left_out);
  if (page) text = std::string(kTimelinePageBegin) + text + std::string(kTimelinePageEnd);
  file.write(text);
  fmt::print("timeline: {}, {:.2f} MB, {} blocks, {:.1f} us of a model, not a measurement\n",
             options_.timeline, static_cast<double>(text.size()) / kMega, trace_.blocks(), us);
  if (!left_out.empty())
    fmt::print("timeline: left out, to stay below {} MB (--timeline-limit): {}\n",
               options_.timeline_limit, left_out);
}

}  // namespace attn
