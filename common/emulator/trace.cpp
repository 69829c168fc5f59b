// The file of a timeline: Chrome trace events, one per line.
#include "emulator/trace.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace attn::emulator {
namespace {

constexpr Cycles kAll = ~Cycles{0};

// Microseconds with three digits behind the point.
std::string microseconds(std::uint64_t ns) {
  const std::string rest = std::to_string(ns % 1000);
  return std::to_string(ns / 1000) + "." + std::string(3 - rest.size(), '0') + rest;
}

// {"ph":"X","pid":1,"tid":2,"ts":0.123, without the closing brace.
std::string head(const char* phase, std::size_t pid, std::size_t tid, std::uint64_t ns) {
  return std::string("{\"ph\":\"") + phase + "\",\"pid\":" + std::to_string(pid) +
         ",\"tid\":" + std::to_string(tid) + ",\"ts\":" + microseconds(ns);
}

std::string named(const std::string& begin, const char* kind, const std::string& name) {
  return begin + ",\"cat\":\"" + kind + "\",\"name\":" + quoted(name);
}

// ,"source":"06_flash_v3_hopper/v6_pingpong.cu:120","bytes":16384: members of "args".
std::string members(const Details& d) {
  std::string text;
  if (d.source.line > 0) text += ",\"source\":" + quoted(d.source.text());
  if (d.bytes > 0) text += ",\"bytes\":" + std::to_string(d.bytes);
  if (d.wgmma > 0)
    text += ",\"wgmma\":" + std::to_string(d.wgmma) + ",\"n\":" + std::to_string(d.columns);
  if (!d.reads.empty()) text += ",\"reads\":" + quoted(d.reads);
  if (!d.writes.empty()) text += ",\"writes\":" + quoted(d.writes);
  return text;
}

std::string arguments(const std::string& members) {
  return members.empty() ? "" : ",\"args\":{" + members.substr(1) + "}";
}

std::string track_name(std::size_t track) {
  switch (track) {
    case kTensorTrack: return "tensor core (quarter 0)";
    case kSpecialTrack: return "special-function unit (quarter 0)";
    case kTmaTrack: return "TMA";
    case kLoadsTrack: return "cp.async";
  }
  return "warp " + std::to_string(track - 1);
}

std::string metadata(const char* what, std::size_t pid, std::size_t tid, const std::string& value) {
  return std::string("{\"ph\":\"M\",\"pid\":") + std::to_string(pid) +
         ",\"tid\":" + std::to_string(tid) + ",\"name\":\"" + what + "\",\"args\":{" + value +
         "}},\n";
}

}  // namespace

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '<')
      out += "\\u003c";  // a page contains the text in a <script>
    else if (static_cast<unsigned char>(c) >= ' ')
      out += c;
  }
  return out + '"';
}

// Cycles in nanoseconds, which are the resolution of Perfetto.
std::uint64_t Trace::nanoseconds(Cycles cycles) const {
  return static_cast<std::uint64_t>(static_cast<double>(cycles) * 1000 / clock_mhz_);
}

std::size_t Trace::add_block(std::string name, std::size_t warps) {
  blocks_.push_back({std::move(name), warps, {}, {}, {}});
  return blocks_.size() - 1;
}

void Trace::span(std::size_t block, std::size_t track, const char* kind, const std::string& name,
                 Cycles begin, Cycles end, const Details& details) {
  blocks_[block].spans.push_back({track, kind, name, begin, end, details});
  end_ = std::max(end_, end);
}

void Trace::busy(std::size_t block, std::size_t track, const std::string& name, Cycles begin,
                 Cycles end, const Details& details) {
  // Other tracks' spans may lie between.
  std::vector<Span>& spans = blocks_[block].spans;
  constexpr std::size_t kLook = 16;
  for (std::size_t n = 0; n < std::min(kLook, spans.size()); ++n) {
    Span& last = spans[spans.size() - 1 - n];
    if (last.track != track) continue;
    if (last.end != begin || last.name != name || !(last.details.source == details.source)) break;
    last.end = end;
    last.details.bytes += details.bytes;
    last.details.wgmma += details.wgmma;
    end_ = std::max(end_, end);
    return;
  }
  span(block, track, "unit", name, begin, end, details);
}

void Trace::flight(std::size_t block, std::size_t issuer, const char* kind,
                   const std::string& name, Cycles begin, Cycles end, const Details& details) {
  blocks_[block].flights.push_back({issuer, kind, name, begin, end, ++ids_, details});
  end_ = std::max(end_, end);
}

void Trace::flow(const Source& from, std::size_t block, std::size_t track, Cycles to) {
  blocks_[block].flows.push_back({from, track, to, ++ids_});
}

// The events of a block that end by `until`; arrows from blocks that are not shown are left out
// together with those blocks.
std::string Trace::block_json(std::size_t number, std::size_t shown, Cycles until) const {
  const Block& b = blocks_[number];
  const std::size_t pid = number + 1;
  std::string text;
  const auto sort_index = [](std::size_t n) { return "\"sort_index\":" + std::to_string(n); };
  text += metadata("process_name", pid, 0, "\"name\":" + quoted(b.name));
  text += metadata("process_sort_index", pid, 0, sort_index(number));
  // Units first, then warps; the spans of a track in the order in which they nest.
  std::map<std::pair<bool, std::size_t>, std::vector<Span>> tracks;
  for (std::size_t w = 0; w < b.warps; ++w) tracks[{true, 1 + w}];
  for (const Span& s : b.spans)
    if (s.end <= until) tracks[{s.track < kTensorTrack, s.track}].push_back(s);
  std::size_t index = 0;
  for (auto& [key, spans] : tracks) {
    const std::size_t track = key.second;
    text += metadata("thread_name", pid, track, "\"name\":" + quoted(track_name(track)));
    text += metadata("thread_sort_index", pid, track, sort_index(index++));
    const auto sort = [&spans] {
      std::ranges::stable_sort(spans, [](const Span& a, const Span& c) {
        return std::pair(a.begin, ~a.end) < std::pair(c.begin, ~c.end);
      });
    };
    sort();
    // The first lane, whose marks are drawn, may come to a wait or an arrival after others of its
    // warp: a mark that begins in one and outlasts it begins with it, around it.
    const Span* wait = nullptr;
    for (Span& s : spans)
      if (std::strcmp(s.kind, "wait") == 0 || std::strcmp(s.kind, "arrive") == 0)
        wait = wait && wait->end > s.end ? wait : &s;
      else if (wait && std::strcmp(s.kind, "mark") == 0 && s.begin < wait->end &&
               s.end > wait->end)
        s.begin = wait->begin;
    sort();
    std::vector<std::uint64_t> open;  // ends of the spans around this one
    for (const Span& s : spans) {
      const std::uint64_t begin = nanoseconds(s.begin);
      std::uint64_t end = nanoseconds(s.end);
      while (!open.empty() && open.back() <= begin) open.pop_back();
      // Lanes of a warp that went different ways: what began inside a span ends inside.
      if (!open.empty()) end = std::min(end, open.back());
      open.push_back(end);
      text += named(head("X", pid, track, begin), s.kind, s.name) +
              ",\"dur\":" + microseconds(end - begin) + arguments(members(s.details)) + "},\n";
    }
  }
  const auto id = [](std::size_t n) { return ",\"id\":" + std::to_string(n); };
  for (const Flight& f : b.flights) {
    if (f.end > until) continue;
    text += named(head("b", pid, 0, nanoseconds(f.begin)), f.kind, f.name) + id(f.id) +
            arguments(",\"issuer\":" + std::to_string(f.issuer) + members(f.details)) + "},\n";
    text += named(head("e", pid, 0, nanoseconds(f.end)), f.kind, f.name) + id(f.id) + "},\n";
  }
  for (const Flow& f : b.flows) {
    if (std::max(f.to, f.from.span_end) > until || f.from.block >= shown) continue;
    const std::uint64_t begin = nanoseconds(f.from.at);
    text += named(head("s", f.from.block + 1, f.from.track, begin), "ends", "ends") + id(f.id) +
            "},\n";
    text += named(head("f", pid, f.track, nanoseconds(f.to) - 1), "ends", "ends") + id(f.id) +
            ",\"bp\":\"e\"},\n";
  }
  return text;
}

void Trace::sms(Cycles at, double busy, double waiting, double idle) {
  sms_.push_back({at, busy, waiting, idle});
}

// A stacked counter, as a process of its own. It is left out of a file that has no room for it.
std::string Trace::sms_json(std::size_t room) const {
  constexpr std::size_t kShare = 4;
  if (sms_.empty()) return {};
  std::string text = metadata("process_name", 0, 0, "\"name\":\"all SMs\"");
  const auto percent = [](double share) {
    return std::to_string(static_cast<int>(100 * share + 0.5));
  };
  for (const Sms& s : sms_)
    text += head("C", 0, 0, nanoseconds(s.at)) + ",\"name\":\"SMs, %\",\"args\":{\"busy\":" +
            percent(s.busy) + ",\"waiting\":" + percent(s.waiting) +
            ",\"idle\":" + percent(s.idle) + "}},\n";
  return text.size() <= room / kShare ? text : std::string();
}

std::string Trace::json(const std::string& about, std::size_t limit, std::string& left_out) const {
  constexpr std::size_t kRoom = 256;  // for what is left out
  const std::string begin = "{\"displayTimeUnit\":\"ns\",\n\"otherData\":";
  const std::string middle = ",\n\"traceEvents\":[\n", end = "\n]}\n";
  const std::size_t around = begin.size() + about.size() + middle.size() + end.size() + kRoom;
  const std::size_t all = limit > around ? limit - around : 0;
  const std::string counters = sms_json(all);
  const std::size_t room = all - counters.size();
  left_out.clear();
  std::string events;
  std::size_t shown = 0;
  for (; shown < blocks_.size(); ++shown) {
    std::string more = block_json(shown, blocks_.size(), kAll);
    if (shown > 0 && events.size() + more.size() > room) break;
    events += more;
  }
  if (shown < blocks_.size() || omitted_ > 0 || events.size() > room) {
    events.clear();  // again, without arrows from blocks that are not shown
    for (std::size_t n = 0; n < shown; ++n) events += block_json(n, shown, kAll);
    const std::size_t blocks = blocks_.size() + omitted_;
    left_out = std::to_string(blocks - shown) + " of " + std::to_string(blocks) + " blocks";
  }
  if (events.size() > room) {  // one block: as much of its time as there is room for
    Cycles low = 0, high = end_;
    while (low + 1 < high) {
      const Cycles until = low + (high - low) / 2;
      (block_json(0, 1, until).size() > room ? high : low) = until;
    }
    events = block_json(0, 1, low);
    left_out = (blocks_.size() + omitted_ > 1 ? left_out + " and " : std::string()) +
               "what ends after " + microseconds(nanoseconds(low)) + " us";
  }
  events = counters + events;
  if (events.size() >= 2) events.resize(events.size() - 2);  // the last comma
  std::string text = begin + about;
  if (!left_out.empty()) text.insert(text.size() - 1, ",\"left_out\":" + quoted(left_out));
  return text + middle + events + end;
}

}  // namespace attn::emulator
