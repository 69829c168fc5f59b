#include "run/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "device/device.h"
#include "device/recording.h"
#include "emulator/simt.h"
#include "emulator/timeline.h"
#include "run/timeline_page.h"

namespace attn {
namespace {

constexpr double kMega = 1e6;
constexpr double kMostCost = 0.05;  // of recording, without a warning

double rounded(double x) { return static_cast<double>(std::llround(x * 1000)) / 1000; }

// A page has the text in a <script>: no '<' in JSON's strings.
std::string without_tags(const std::string& json) {
  std::string text;
  for (const char c : json) c == '<' ? text += "\\u003c" : text += c;
  return text;
}

}  // namespace

Status TimelineRecorder::record(Session& session, const Step& step) {
  return run_.backend == Backend::gpu ? record_gpu(session, step) : record_model(session);
}

Status TimelineRecorder::record_model(Session& session) {
  // Asynchronous work happens in memory when a thread waits for it: the clocks alone say when.
  emulator::early_copies = emulator::mixed_copies = false;
  emulator::late_warps = emulator::LateWarps::in_turn;  // where the schedule asks for the clocks
  if (is_timeline_page(options_.timeline))
    shared_.emplace(static_cast<std::size_t>(options_.timeline_limit * kMega));
  emulator::Timeline timeline(trace_, shared_ ? &*shared_ : nullptr);
  struct Modelled {
    explicit Modelled(emulator::Timeline& t) { emulator::timeline = &t; }
    ~Modelled() { emulator::timeline = nullptr; }
  } const modelled(timeline);
  return session.launch();
}

// The last of some timed launches is recorded. All are timed in the same way (GpuTimer).
Status TimelineRecorder::record_gpu(Session& session, const Step& step) {
  constexpr int kWarmUp = 3, kTimed = 11;
  GpuTimer timer;
  Sample sample;
  const auto median = [&](double& us) {
    std::vector<double> all;
    for (int n = -kWarmUp; n < kTimed; ++n) {
      if (const Status s = session.time(timer, sample); !s.ok()) return s;
      if (n >= 0) all.push_back(sample.seconds * kMega);
    }
    std::ranges::nth_element(all, all.begin() + kTimed / 2);
    us = all[kTimed / 2];
    return Status::success();
  };
  Measured& m = measured_.emplace();
  RecordedLaunch launch;
  Recording recording(Backend::gpu);
  recorded_ = step;
  recorded_.launch.gpu = step.launch.recorded;
  Status status = median(m.plain_us);
  if (status.ok()) status = session.prepare(recorded_);
  if (status.ok()) status = session.launch();  // makes the rings
  if (status.ok()) status = median(m.recorded_us);
  if (status.ok()) status = recording.clear();
  if (status.ok()) status = recording.sample_clocks();
  if (status.ok()) session.poison();  // what is checked is of the launch that is recorded
  if (status.ok()) status = session.time(timer, sample);
  if (status.ok()) status = recording.sample_clocks();
  if (status.ok()) status = recording.read(launch);
  if (!status.ok()) return status;
  const SmClocks clocks(launch.samples);
  m.clock_mhz = clocks.mhz, m.residual_ns = clocks.residual_ns;
  m.resolution_ns = clocks.resolution_ns;
  trace_ = emulator::Trace(1000);  // nanoseconds
  step_file_ = run_.chapter + "/" + step.name + ".cu";
  m.of = add_to_trace(launch, step_file_.c_str(),
                      static_cast<std::size_t>(options_.timeline_limit * kMega), trace_);
  for (std::size_t n = 0; n < m.of.over_time.size(); ++n) {
    const SmShares& s = m.of.over_time[n];
    trace_.sms(m.of.end_ns * n / m.of.over_time.size(), s.busy, s.waiting, s.idle);
  }
  return status;
}

void TimelineRecorder::print_measured() const {
  const Measured& m = *measured_;
  fmt::print("timeline: a launch takes {:.1f} us when recorded, {:.1f} us otherwise: recording "
             "costs {:.1f} % (medians)\n",
             m.recorded_us, m.plain_us, 100 * m.cost());
  if (m.cost() > kMostCost)
    fmt::print("timeline: *** RECORDING COSTS MORE THAN {:.0f} %: see what overlaps, not how long "
               "it takes ***\n",
               100 * kMostCost);
  fmt::print("timeline: SM clocks of {:.0f} MHz, mapped to %globaltimer, which changes by {:.0f} "
             "ns; residual up to {:.0f} ns; moved by up to {:.0f} ns to the begin of blocks, then "
             "{:.0f} ns off there\n",
             m.clock_mhz, m.resolution_ns, m.residual_ns, m.of.moved_ns, m.of.begins_off_ns);
  fmt::print("timeline: {} SMs: busy {:.0f} %, waiting {:.0f} %, idle {:.0f} % of the time\n",
             m.of.sms, 100 * m.of.shares.busy, 100 * m.of.shares.waiting,
             100 * m.of.shares.idle);
  if (!m.of.lost.empty()) fmt::print("timeline: {}\n", m.of.lost);
}

// The element with what happens to shared memory. It gets the room that spans leave, and at least a
// third.
std::string TimelineRecorder::shared_json(const std::string& about, std::size_t room,
                                          std::string& left_out) {
  const std::string begin = "</script>\n<script type=\"application/json\" id=\"memory\">";
  std::string ignored;
  constexpr std::size_t kLeftOut = 512;  // for what the file says of it
  const std::size_t spans = trace_.json(about, room, ignored).size() + kLeftOut;
  const std::size_t own = std::max(room - std::min(room, spans), room / 3);
  const std::string text =
      shared_->json(trace_.clock_mhz(), own - std::min(own, begin.size()), left_out);
  return text.empty() ? "" : begin + text;
}

void TimelineRecorder::write(OutputFile& file) {
  const double us = static_cast<double>(measured_ ? measured_->of.end_ns : trace_.end()) /
                    trace_.clock_mhz();
  if (trace_.blocks() == 0) {
    fmt::print("timeline: nothing was launched, and nothing is written\n");
    return;
  }
  nlohmann::ordered_json about;
  const std::string what = measured_ ? "measured on " + gpu_info().name
                                     : "of a model, not a measurement";
  about["what"] = measured_ ? what + " (docs/timelines.md)"
                            : "a model of an H100 or H200, not a measurement (docs/timelines.md)";
  about["chapter"] = run_.chapter;
  about["step"] = run_.steps.front().step;
  about["operation"] = run_.operation;
  if (run_.steps.front().outcome == StepResult::Outcome::fail)
    about["failed"] = run_.steps.front().reason;
  about["problem"] = run_.problem.text();
  about["clock_mhz"] = measured_ ? rounded(measured_->clock_mhz) : emulator::kClockMhz;
  about[measured_ ? "measured_us" : "modelled_us"] = rounded(us);
  about["blocks"] = measured_ ? measured_->of.blocks : trace_.blocks();
  if (measured_) {
    const Measured& m = *measured_;
    about["launch_us"] = {{"recorded", rounded(m.recorded_us)}, {"plain", rounded(m.plain_us)}};
    if (m.cost() > kMostCost)
      about["warning"] = fmt::format("Recording costs {:.0f} % of the time", 100 * m.cost());
    about["timer_resolution_ns"] = rounded(m.resolution_ns);
    about["clock_residual_ns"] = rounded(m.residual_ns);
    about["sms"] = {{"count", m.of.sms}, {"busy", rounded(m.of.shares.busy)},
                    {"waiting", rounded(m.of.shares.waiting)},
                    {"idle", rounded(m.of.shares.idle)}};
    if (!m.of.lost.empty()) about["lost"] = m.of.lost;
  }
  std::string left_out;
  const bool page = is_timeline_page(options_.timeline);
  const std::size_t limit = static_cast<std::size_t>(options_.timeline_limit * kMega);
  const std::size_t around = page ? kTimelinePageBegin.size() + kTimelinePageEnd.size() : 0;
  const std::size_t room = limit - std::min(limit, around);
  std::string text, shared, shared_left_out;
  if (shared_) shared = shared_json(without_tags(about.dump()), room, shared_left_out);
  text = trace_.json(without_tags(about.dump()), room - shared.size(), left_out);
  if (!shared_left_out.empty()) left_out += (left_out.empty() ? "" : "; ") + shared_left_out;
  if (page)
    text = std::string(kTimelinePageBegin) + text + shared + std::string(kTimelinePageEnd);
  file.write(text);
  fmt::print("timeline: {}, {:.2f} MB, {} blocks, {:.1f} us{}{}\n", options_.timeline,
             static_cast<double>(text.size()) / kMega, about["blocks"].get<std::size_t>(), us,
             measured_ ? ", " : " ", what);
  if (!left_out.empty())
    fmt::print("timeline: left out, to stay below {} MB (--timeline-limit): {}\n",
               options_.timeline_limit, left_out);
  if (measured_) print_measured();
}

std::optional<std::string> cannot_record(const Chapter& chapter, const Step& step) {
  if (step.launch.recorded) return std::nullopt;
  std::string others;
  for (const Step& s : chapter.steps)
    if (s.launch.recorded) others += (others.empty() ? "" : ", ") + s.name;
  return step.name + " has no marks (ATTN_SPAN) and cannot be recorded on a GPU: " +
         (others.empty() ? "no step of this chapter can, all can with --device emulated"
                         : others + " can, all steps can with --device emulated");
}

}  // namespace attn
