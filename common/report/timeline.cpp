#include "report/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "attn/error.h"
#include "emulator/trace.h"
#include "report/json_object.h"

namespace attn::report {
namespace {

using Track = TimelineEvents::Track;
using Span = TimelineEvents::Span;
using Flight = TimelineEvents::Flight;
using Point = TimelineEvents::Point;

// "k_full" of "k_full[1]"
std::string without_index(const std::string& name) { return name.substr(0, name.find('[')); }

constexpr double kNanosecond = 0.001;

TimelineEvents read_events(const nlohmann::json& all, const std::string& file) {
  TimelineEvents e;
  std::map<std::int64_t, Point> starts;
  std::map<std::int64_t, Flight> open;
  for (const nlohmann::json& value : all) {
    const Object event(value, file, "traceEvents[...]", "what a chapter program writes with "
                                                        "--timeline");
    const std::string phase = event.text("ph");
    if (phase == "M" || phase == "C") continue;
    const Track track{event.integer("pid", 0), event.integer("tid", 0)};
    const double at = value.at("ts").get<double>();
    const std::string name = event.text("name"), kind = event.text("cat");
    const auto argument = [&](const char* key) {
      return value.contains("args") ? value["args"].value(key, "") : std::string();
    };
    if (phase == "X") {
      const Span span{at, at + value.at("dur").get<double>(), name, argument("source")};
      auto& where = kind == "wait" ? e.waits : kind == "mark" ? e.marks : e.units;
      if (kind != "arrive" && kind != "exit") where[track].push_back(span);
      e.ends[track] = std::max(e.ends[track], span.end);
      const auto [begin, fresh] = e.begins.try_emplace(track.first, at);
      if (!fresh) begin->second = std::min(begin->second, at);
      e.end = std::max(e.end, span.end);
      continue;
    }
    const std::int64_t id = event.integer("id", 0);
    if (phase == "b")
      open[id] = {{at, at, name, argument("source")},
                  value.at("args").at("issuer").get<std::size_t>(),
                  argument("reads"), argument("writes")};
    else if (phase == "e" && open.contains(id))
      open[id].end = at, e.flights[track.first].push_back(open[id]);
    else if (phase == "s")
      starts[id] = {track, at};
    else if (phase == "f" && starts.contains(id))
      e.sources[track].emplace_back(at, starts[id]);
  }
  const auto sort = [](auto& tracks) {
    for (auto& [track, spans] : tracks)
      std::ranges::stable_sort(spans, [](const auto& a, const auto& b) { return a.end < b.end; });
  };
  sort(e.waits), sort(e.marks), sort(e.units), sort(e.flights);
  return e;
}

// Disjoint intervals.
using Intervals = std::vector<std::pair<double, double>>;
Intervals intervals(const std::vector<Span>& spans) {
  Intervals all;
  for (const Span& s : spans) all.emplace_back(s.begin, s.end);
  std::ranges::sort(all);
  Intervals merged;
  for (const auto& [begin, end] : all)
    if (!merged.empty() && begin <= merged.back().second)
      merged.back().second = std::max(merged.back().second, end);
    else
      merged.emplace_back(begin, end);
  return merged;
}
double sum(const Intervals& all) {
  double total = 0;
  for (const auto& [begin, end] : all) total += end - begin;
  return total;
}
Intervals both(const Intervals& a, const Intervals& b) {
  Intervals all;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const double begin = std::max(a[i].first, b[j].first);
    const double end = std::min(a[i].second, b[j].second);
    if (begin < end) all.emplace_back(begin, end);
    a[i].second < b[j].second ? ++i : ++j;
  }
  return all;
}

void add_units(const TimelineEvents& e, TimelineSummary& s) {
  double time = 0;
  std::map<std::size_t, std::map<std::string, Intervals>> units;
  for (const auto& [track, spans] : e.units)
    units[track.first][unit_name(track.second)] = intervals(spans);
  for (const auto& [block, begin] : e.begins) {
    double end = begin;
    for (const auto& [track, last] : e.ends)
      if (track.first == block) end = std::max(end, last);
    time += end - begin;
    for (const auto& [name, busy] : units[block]) {
      s.busy[name] += sum(busy);
      for (const auto& [other, also] : units[block])
        if (name < other) s.together[name + " and " + other] += sum(both(busy, also));
    }
  }
  s.block_us = time / static_cast<double>(std::max<std::size_t>(e.begins.size(), 1));
  for (auto* shares : {&s.busy, &s.together})
    for (auto& [name, share] : *shares) share /= time;
}

void add_waits(const TimelineEvents& e, TimelineSummary& s) {
  std::map<std::string, double> time;  // of the warps that wait there
  for (const auto& [track, spans] : e.waits) {
    std::map<std::string, double> here;
    for (const Span& w : spans) here[without_index(w.name)] += w.end - w.begin;
    for (const auto& [name, us] : here) {
      s.waits[name] += us;
      time[name] += e.ends.at(track) - e.begins.at(track.first);
    }
  }
  for (auto& [name, share] : s.waits) share /= time[name];
}

// The first warps of warpgroups stand for them.
void add_marks(const TimelineEvents& e, TimelineSummary& s) {
  struct OfWarps {
    double time = 0, warps = 0;
    std::map<std::size_t, std::vector<Intervals>> groups;  // by block
  };
  std::map<std::string, OfWarps> all;  // by name
  constexpr std::size_t kWarps = 4;
  for (const auto& [track, spans] : e.marks) {
    std::map<std::string, std::vector<Span>> named;
    for (const Span& m : spans) named[m.name].push_back(m);
    for (const auto& [name, some] : named) {
      const Intervals merged = intervals(some);
      all[name].time += sum(merged), ++all[name].warps;
      if ((track.second - 1) % kWarps == 0) all[name].groups[track.first].push_back(merged);
    }
  }
  for (const auto& [name, of] : all) {
    double any = 0, twice = 0;
    bool several = false;
    for (const auto& [block, groups] : of.groups) {
      several |= groups.size() > 1;
      std::vector<Span> spans, shared;
      for (const Intervals& g : groups)
        for (const auto& [begin, end] : g) spans.push_back({begin, end, ""});
      for (std::size_t i = 0; i < groups.size(); ++i)
        for (std::size_t j = i + 1; j < groups.size(); ++j)
          for (const auto& [begin, end] : both(groups[i], groups[j]))
            shared.push_back({begin, end, ""});
      any += sum(intervals(spans)), twice += sum(intervals(shared));
    }
    s.marks[name] = {of.time / of.warps, several ? twice / any : TimelineSummary::kOneWarpgroup};
  }
}

// Backwards from the last event: a warp runs since its last wait that something else has ended; the
// arrival, or the copy or product that ended it, is the next link. Before the start of a block it
// is the last event of a block that had ended.
class Chain {
 public:
  Chain(const TimelineEvents& e, TimelineSummary& s) : e_(e) {
    Point at = last_event(e.end);
    for (std::size_t n = 0; n < kMostLinks && at.at > kNanosecond; ++n) {
      if (const auto link = last_wait(at)) {
        ran(at.track, link->first.end, at.at);
        at = before(link->first, link->second, at.track);
        continue;
      }
      const double begin = e.begins.at(at.track.first);
      ran(at.track, begin, at.at);
      at = last_event(begin);
      if (at.at > 0 && begin - at.at > kNanosecond) add("until the next block", begin - at.at);
    }
    for (const auto& [what, part] : parts_) s.chain.push_back({what, part.first, part.second});
    std::ranges::stable_sort(s.chain, [](const auto& a, const auto& b) { return a.us > b.us; });
  }

 private:
  static constexpr std::size_t kMostLinks = 100'000;

  // Of a warp, by then.
  Point last_event(double then) const {
    Point last{};
    for (const auto& [track, end] : e_.ends)
      if (track.second < emulator::kTensorTrack && end > last.at && end <= then)
        last = {track, end};
    return last;
  }

  // The last wait on this track that ends by then and that a flow leads to.
  std::optional<std::pair<Span, Point>> last_wait(const Point& at) const {
    const auto waits = e_.waits.find(at.track);
    const auto flows = e_.sources.find(at.track);
    if (waits == e_.waits.end() || flows == e_.sources.end()) return std::nullopt;
    for (auto w = waits->second.rbegin(); w != waits->second.rend(); ++w) {
      if (w->end > at.at + kNanosecond / 2) continue;
      for (const auto& [to, from] : flows->second)
        if (to >= w->begin && to <= w->end && from.at < w->end) return std::pair(*w, from);
    }
    return std::nullopt;
  }

  // The point from which what ended the wait took its time.
  Point before(const Span& wait, const Point& from, const Track& track) {
    if (from.track.second < emulator::kTensorTrack) {
      add("from the arrival at " + without_index(wait.name), wait.end - from.at);
      return from;
    }
    const Flight* best = nullptr;
    if (const auto all = e_.flights.find(track.first); all != e_.flights.end())
      for (const Flight& f : all->second)
        if (f.begin <= from.at && f.end >= from.at &&
            (!best || std::abs(f.end - wait.end) < std::abs(best->end - wait.end)))
          best = &f;
    if (!best) {
      add(unit_name(from.track.second), wait.end - from.at);
      return {track, wait.begin};
    }
    add(without_index(best->name) + ", in flight", wait.end - best->begin);
    return {{track.first, best->issuer}, best->begin};
  }

  // Waits of a warp that no flow leads to, such as loads, and its instructions, by marks.
  void ran(const Track& track, double begin, double end) {
    double rest = end - begin;
    const Intervals here{{begin, end}};
    Intervals waits;
    if (const auto some = e_.waits.find(track); some != e_.waits.end()) {
      waits = both(intervals(some->second), here);
      for (const Span& w : some->second)
        if (const double us = sum(both({{w.begin, w.end}}, here)); us > 0) add(w.name, us);
      rest -= sum(waits);
    }
    if (const auto marks = e_.marks.find(track); marks != e_.marks.end())
      for (const Span& m : marks->second) {
        const Intervals inside = both({{m.begin, m.end}}, here);
        const double us = sum(inside) - sum(both(inside, waits));
        if (us <= 0 || us > rest + kNanosecond) continue;
        add("instructions in " + m.name, us);
        rest -= us;
      }
    if (rest > kNanosecond) add("instructions", rest);
  }

  void add(const std::string& what, double us) { ++parts_[what].first, parts_[what].second += us; }

  const TimelineEvents& e_;
  std::map<std::string, std::pair<int, double>> parts_;
};

double percent(double share) { return 100 * share; }

std::string title(const TimelineSummary& s) {
  return fmt::format("{} {}: {}\n{} blocks, {:.1f} us{}\n", s.chapter, s.step, s.problem,
                     s.all_blocks, s.all_us,
                     s.gpu.empty() ? " of a model, not a measurement" : ", measured on " + s.gpu) +
         (s.failed.empty() ? "" : "The launch failed: " + s.failed + "\n") +
         (s.warning.empty() ? "" : s.warning + ".\n") +
         (s.lost.empty() ? "" : s.lost + "\n") +
         (s.left_out.empty() ? ""
                             : "left out of the file: " + s.left_out +
                                   "; times and shares below are of the rest\n");
}

std::string origin(const TimelineSummary& a, const TimelineSummary& b) {
  if (a.gpu.empty() && b.gpu.empty())
    return "Both are a model of an H100 or H200, not measurements.\n";
  if (a.gpu == b.gpu) return "Both are measured on " + a.gpu + ".\n";
  const auto one = [](const char* which, const TimelineSummary& s) {
    return s.gpu.empty() ? fmt::format("{} is a model of an H100 or H200", which)
                         : fmt::format("{} is measured on {}", which, s.gpu);
  };
  return one("A", a) + ", " + one("B", b) + ": compare shares, not times.\n";
}

std::string short_title(const char* which, const TimelineSummary& s) {
  return fmt::format("{}  {} {}, {:.1f} us{}  ({})\n", which, s.chapter, s.step, s.all_us,
                     s.failed.empty() ? "" : ", failed", s.file);
}

// A row for every name of either map.
std::string rows(const std::map<std::string, double>& a, const std::map<std::string, double>& b,
                 const std::string& before) {
  std::map<std::string, double> names = a;
  names.insert(b.begin(), b.end());
  const auto cell = [](const std::map<std::string, double>& of, const std::string& name) {
    const auto found = of.find(name);
    return found == of.end() ? std::string("-") : fmt::format("{:.0f} %", percent(found->second));
  };
  std::string out;
  for (const auto& [name, unused] : names)
    if (a.contains(name) ? a.at(name) >= 0.005 || (b.contains(name) && b.at(name) >= 0.005)
                         : b.at(name) >= 0.005)
      out += fmt::format("{:<48} {:>7} {:>7}\n", before + name, cell(a, name), cell(b, name));
  return out;
}

std::map<std::string, double> at_once(const TimelineSummary& s) {
  std::map<std::string, double> all;
  for (const auto& [name, mark] : s.marks)
    if (mark.at_once >= 0) all[name] = mark.at_once;
  return all;
}

// The data of a page, or all of a file of JSON.
std::string data_of(std::istream& file) {
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const std::string_view begin = "id=\"data\">", end = "</script>";
  if (text.starts_with('{')) return text;
  const std::size_t from = text.find(begin);
  if (from == text.npos) return text;
  return text.substr(from + begin.size(), text.find(end, from) - from - begin.size());
}

}  // namespace

std::string unit_name(std::size_t track) {
  switch (track) {
    case emulator::kTensorTrack: return "tensor core";
    case emulator::kSpecialTrack: return "special-function unit";
    case emulator::kTmaTrack: return "TMA";
    case emulator::kLoadsTrack: return "cp.async";
  }
  return "unit";
}

TimelineSummary read_timeline(const std::string& path, TimelineEvents* events) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path))
    throw InputError(fmt::format("{}: cannot be read", path));
  const char* const accepted = "what a chapter program writes with --timeline";
  const nlohmann::json json = nlohmann::json::parse(data_of(file), nullptr, false);
  if (json.is_discarded() || !json.is_object() || !json.contains("traceEvents") ||
      !json.contains("otherData") || !json["traceEvents"].is_array())
    throw InputError(fmt::format("{}: is no timeline: must be {}", path, accepted));
  TimelineSummary s;
  const Object about(json["otherData"], path, "otherData", accepted);
  s.file = path, s.chapter = about.text("chapter"), s.step = about.text("step");
  s.problem = about.text("problem");
  for (const auto& [name, to] : {std::pair("left_out", &s.left_out), {"warning", &s.warning},
                                 {"lost", &s.lost}, {"failed", &s.failed}})
    if (json["otherData"].contains(name)) *to = about.text(name);
  // "measured on NVIDIA H200 (docs/timelines.md)"
  const std::string what = about.text("what"), measured = "measured on ";
  if (what.starts_with(measured))
    s.gpu = what.substr(measured.size(), what.rfind(" (") - measured.size());
  try {
    TimelineEvents e = read_events(json["traceEvents"], path);
    s.blocks = e.begins.size();
    s.us = e.end;
    const nlohmann::json& other = json["otherData"];
    s.all_blocks = other.value("blocks", s.blocks);
    s.all_us = other.value(s.gpu.empty() ? "modelled_us" : "measured_us", s.us);
    add_units(e, s);
    add_waits(e, s);
    add_marks(e, s);
    if (const auto sms = json["otherData"].find("sms"); sms != json["otherData"].end())
      for (const char* name : {"busy", "waiting", "idle"})
        s.sms[name] = sms->at(name).get<double>();
    const Chain chain(e, s);
    if (events) *events = std::move(e);
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: an event lacks a value: must be {}", path, accepted));
  } catch (const std::out_of_range&) {
    throw InputError(fmt::format("{}: an event is of a block without spans: must be {}", path,
                                 accepted));
  }
  return s;
}

std::string text(const TimelineSummary& s) {
  std::string out = title(s);
  const auto list = [&](const std::string& head, const std::map<std::string, double>& shares) {
    if (shares.empty()) return;
    out += "\n" + head + "\n";
    for (const auto& [name, share] : shares)
      out += fmt::format("  {:<40} {:>5.1f} %\n", name, percent(share));
  };
  list("all SMs", s.sms);
  list("units: busy, of the time of a block", s.busy);
  list("units: at the same time", s.together);
  list("waits, of the time of the warps that wait there", s.waits);
  if (!s.marks.empty()) {
    out += "\nmarks: time per warp; both warpgroups there, of the time that one or both are\n";
    for (const auto& [name, m] : s.marks)
      out += fmt::format("  {:<40} {:>7.2f} us{}\n", name, m.us,
                         m.at_once < 0 ? "" : fmt::format(" {:>5.1f} %", percent(m.at_once)));
  }
  out += "\nlongest chain through arrivals and waits, by what it consists of\n";
  constexpr double kLeast = 0.01;  // of its time
  for (const auto& part : s.chain)
    if (part.us >= kLeast * s.us)
      out += fmt::format("  {:<40} {:>7.2f} us in {} links\n", part.what, part.us, part.times);
  return out;
}

std::string text(const TimelineSummary& a, const TimelineSummary& b) {
  std::string out = short_title("A", a) + short_title("B", b) + origin(a, b);
  for (const auto& [which, s] : {std::pair<const char*, const TimelineSummary&>("A", a), {"B", b}})
    for (const std::string& text : {s.warning, s.lost})
      if (!text.empty()) out += fmt::format("{}: {}.\n", which, text);
  if (a.problem != b.problem)
    out += "The problems differ:\n  A " + a.problem + "\n  B " + b.problem + "\n";
  if (!a.left_out.empty() || !b.left_out.empty())
    out += "Parts are left out of a file: times and shares are of the rest.\n";
  out += fmt::format("\nA block takes {:.2f} us in A, {:.2f} us in B: {:.2f} of the time.\n",
                     a.block_us, b.block_us, b.block_us / a.block_us);
  constexpr double kMoved = 0.02;
  const auto words = [&](const auto& from, const auto& to, auto sentence) {
    auto names = from;
    names.insert(to.begin(), to.end());
    for (const auto& [name, unused] : names) {
      if (a.gpu.empty() != b.gpu.empty() && !(from.contains(name) && to.contains(name)))
        continue;  // a model and a GPU: of what only one of them knows there is no difference
      const double x = from.contains(name) ? from.at(name) : 0;
      const double y = to.contains(name) ? to.at(name) : 0;
      if (std::abs(y - x) >= kMoved)
        out += fmt::format("{}: {:.0f} % in A, {:.0f} % in B.\n",
                           sentence(name, y > x ? "more" : "less"), percent(x), percent(y));
    }
  };
  words(a.busy, b.busy, [](const std::string& name, const char* more) {
    return fmt::format("The {} is busy for {} of the time", name, more);
  });
  words(a.together, b.together, [](const std::string& name, const char* more) {
    return fmt::format("{} are busy at the same time for {} of it", name, more);
  });
  words(a.waits, b.waits, [](const std::string& name, const char* more) {
    return fmt::format("Warps that wait at {} do so for {} of their time", name, more);
  });
  // Only of marks that both have.
  auto once_a = at_once(a), once_b = at_once(b);
  std::erase_if(once_a, [&](const auto& mark) { return !at_once(b).contains(mark.first); });
  std::erase_if(once_b, [&](const auto& mark) { return !at_once(a).contains(mark.first); });
  words(once_a, once_b, [](const std::string& name, const char* more) {
    return fmt::format("Two warpgroups are in {} at once for {} of its time", name, more);
  });
  if (!a.chain.empty() && !b.chain.empty())
    out += fmt::format("The longest chain is mostly {} in A ({:.2f} us), {} in B ({:.2f} us).\n",
                       a.chain[0].what, a.chain[0].us, b.chain[0].what, b.chain[0].us);
  out += fmt::format("\n{:<48} {:>7} {:>7}\n", "", "A", "B");
  out += rows(a.sms, b.sms, "all SMs: ");
  out += rows(a.busy, b.busy, "busy: ");
  out += rows(a.together, b.together, "together: ");
  out += rows(a.waits, b.waits, "wait: ");
  out += rows(at_once(a), at_once(b), "two warpgroups at once: ");
  return out;
}

}  // namespace attn::report
