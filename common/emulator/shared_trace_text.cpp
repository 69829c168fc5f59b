// The memory panel's data as JSON: columns with one entry per access of a warp.
#include <fmt/format.h>

#include <algorithm>

#include "emulator/shared_trace.h"

namespace attn::emulator {
namespace {

constexpr Cycles kAll = ~Cycles{0};
constexpr std::int64_t kLine = 128;  // bytes of 32 banks

std::uint64_t nanoseconds(Cycles cycles, double clock_mhz) {
  return static_cast<std::uint64_t>(static_cast<double>(cycles) * 1000 / clock_mhz);
}

// [1,2,3] of text(n) for all n of a range.
template <class Range, class Text>
std::string list(const Range& range, Text text) {
  std::string all = "[";
  for (const auto& one : range) all.append(all.size() > 1 ? "," : "").append(text(one));
  return all + "]";
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::read: return "read";
    case Kind::write: return "write";
    case Kind::atomic: return "atomic";
    case Kind::atomic_read: return "atomic read";
  }
  return "";
}

bool has_banks(Kind kind, std::size_t bytes) {
  return !is_atomic(kind) &&
         (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16);
}

}  // namespace

// The shapes and sites of the accesses of a file, numbered in the order of their first use. A shape
// is a pattern of addresses with its size and its place among the banks: all that wavefronts
// depend on.
struct SharedTrace::Shapes {
  std::map<std::tuple<std::uint32_t, std::size_t, std::size_t>, std::uint32_t> ids;
  std::map<std::uint32_t, std::uint32_t> sites;
  std::vector<std::string> shapes, site_texts;

  std::uint32_t site(SharedTrace& trace, std::uint32_t site) {
    const auto [id, is_new] =
        sites.try_emplace(site, static_cast<std::uint32_t>(site_texts.size()));
    if (is_new) {
      const Instruction& i = trace.sites_[site].of;
      site_texts.push_back(fmt::format("[{},\"{}\",{},{}]", quoted(trace.source_of(site)),
                                       name_of(i.kind), i.bytes, quoted(i.what ? i.what : "")));
    }
    return id->second;
  }
  std::uint32_t shape(const SharedTrace& trace, const Access& a) {
    const Instruction& i = trace.sites_[a.site].of;
    const bool banks = has_banks(i.kind, i.bytes);
    const auto [id, is_new] =
        ids.try_emplace({a.pattern, banks ? i.bytes : 0, banks ? a.base % kLine : 0},
                        static_cast<std::uint32_t>(shapes.size()));
    if (is_new) shapes.push_back(text(trace.patterns_[a.pattern], banks, i, a.base % kLine));
    return id->second;
  }
  // [offsets, wavefronts, ideal, [[extra, [[lane, first bank], ...]], ...]]: no wavefronts for what
  // is no single instruction on a GPU.
  static std::string text(const Pattern& p, bool banks, const Instruction& i, std::size_t base) {
    std::array<std::int64_t, 32> address{};
    bool aligned = true;
    for (std::size_t lane = 0; lane < p.size(); ++lane) {
      address[lane] = p[lane] < 0 ? -1 : p[lane] + static_cast<std::int64_t>(base);
      aligned = aligned && (p[lane] < 0 || address[lane] % static_cast<int>(i.bytes) == 0);
    }
    const BankRows rows =
        banks && aligned ? bank_rows(address, static_cast<int>(i.bytes)) : BankRows{};
    std::string each;
    for (std::size_t row = 0; row < rows.rows.size(); ++row)
      each.append(row > 0 ? ",[" : "[")
          .append(rows.extra[row] ? "1," : "0,")
          .append(list(rows.rows[row], [&](int lane) {
            const std::int64_t byte = address[static_cast<std::size_t>(lane)] % kLine;
            return fmt::format("[{},{}]", lane, byte / 4);
          }))
          .append("]");
    return fmt::format("[{},{},{},[{}]]",
                       list(p, [](std::int32_t o) { return std::to_string(o); }), rows.wavefronts,
                       rows.ideal, each);
  }
};

// ,"bytes":8192,"members":[["sQ",0,4096,2,[64,32]]]
std::string SharedTrace::layout_json(const Block& b) const {
  std::string text;
  std::size_t at = 0;
  const auto add = [&](const std::string& name, std::size_t first, std::size_t bytes,
                       std::size_t element, const auto& extents) {
    text += fmt::format("{}[{},{},{},{},{}]", text.empty() ? "" : ",", quoted(name), first, bytes,
                        element, list(extents, [](std::size_t n) { return std::to_string(n); }));
  };
  const std::vector<std::size_t> none;
  for (const StaticShared& v : b.variables) {
    add(v.name, at, v.bytes, 1, none);
    at += v.bytes;
  }
  if (b.members.empty() && b.dynamic_bytes > 0) add("shared memory", at, b.dynamic_bytes, 1, none);
  for (const Member& m : b.members) {
    std::vector<std::size_t> extents;
    for (const std::size_t n : m.extents)
      if (n > 0) extents.push_back(n);
    add(m.name, at + m.offset, m.bytes, m.element_bytes, extents);
  }
  return ",\"bytes\":" + std::to_string(at + b.dynamic_bytes) + ",\"members\":[" + text + "]";
}

std::string SharedTrace::block_json(std::size_t number, double mhz, Cycles until, Shapes& shapes) {
  const Block& b = blocks_[number];
  const auto time = [&](Cycles at) { return std::to_string(nanoseconds(at, mhz)); };
  std::string t, u, w, s, q, base;
  std::uint64_t last = 0;
  for (const Access& a : b.accesses) {
    if (a.at > until) break;
    const char* const comma = t.empty() ? "" : ",";
    const std::uint64_t now = nanoseconds(a.at, mhz);
    t.append(comma).append(std::to_string(now - last));
    u.append(comma);
    u += a.group < 0 ? "0" : std::to_string(nanoseconds(a.until, mhz) - now);
    w.append(comma).append(std::to_string(a.warp));
    s.append(comma).append(std::to_string(shapes.site(*this, a.site)));
    q.append(comma).append(std::to_string(shapes.shape(*this, a)));
    base.append(comma).append(std::to_string(a.base));
    last = now;
  }
  std::string flights;
  for (const Flight& f : b.flights) {
    if (f.begin > until) continue;
    const std::string ranges =
        list(f.ranges, [](const Range& r) { return fmt::format("[{},{}]", r.first, r.second); });
    flights += fmt::format("{}[{},{},{},{:d},{},{},{}]", flights.empty() ? "" : ",", time(f.begin),
                           time(f.end), f.warp, f.writes, quoted(f.what),
                           quoted(f.place.text()), ranges);
  }
  const auto side = [&](const RaceSide& r) {
    return "{\"warp\":" + (r.in_block ? std::to_string(r.thread / 32) : "-1") +
           ",\"lane\":" + std::to_string(r.thread % 32) +
           ",\"at\":" + (r.known ? time(r.at) : "-1") + ",\"kind\":\"" + name_of(r.kind) +
           "\",\"what\":" + quoted(r.what) + ",\"source\":" + quoted(r.source) + "}";
  };
  const std::string races = list(b.races, [&](const Race& r) {
    return "{\"text\":" + quoted(r.text) + ",\"byte\":" + std::to_string(r.byte) +
           (r.first.source.empty() ? "" : ",\"first\":" + side(r.first)) +
           ",\"second\":" + side(r.second) + "}";
  });
  return "{\"pid\":" + std::to_string(number + 1) + layout_json(b) +
         (b.cut || until != kAll ? ",\"cut\":true" : "") + ",\n\"t\":[" + t + "],\n\"u\":[" + u +
         "],\n\"w\":[" + w + "],\n\"s\":[" + s + "],\n\"q\":[" + q + "],\n\"b\":[" + base +
         "],\n\"flights\":[" + flights + "],\n\"races\":" + races + "}";
}

// The first `shown` of some blocks.
std::string SharedTrace::all_json(double clock_mhz, const std::vector<std::size_t>& blocks,
                                  std::size_t shown, Cycles until) {
  Shapes shapes;
  std::string text;
  for (std::size_t n = 0; n < shown; ++n)
    text.append(n == 0 ? "" : ",\n").append(block_json(blocks[n], clock_mhz, until, shapes));
  const auto same = [](const std::string& s) { return s; };
  return "{\"sites\":" + list(shapes.site_texts, same) + ",\n\"shapes\":" +
         list(shapes.shapes, same) + ",\n\"blocks\":[" + text + "]}\n";
}

std::string SharedTrace::json(double clock_mhz, std::size_t limit, std::string& left_out) {
  constexpr std::size_t kLeftOut = 128;  // for what is left out
  const std::size_t room = limit - std::min(limit, kLeftOut);
  left_out.clear();
  if (std::ranges::all_of(blocks_, [](const Block& b) { return b.dynamic_bytes == 0 &&
                                                               b.variables.empty(); }))
    return {};  // no shared memory
  std::vector<std::size_t> blocks;  // those with a race first
  for (std::size_t n = 0; n < blocks_.size(); ++n)
    if (blocks_[n].kept) blocks.push_back(n);
  std::ranges::stable_partition(blocks, [&](std::size_t n) { return !blocks_[n].races.empty(); });
  std::size_t kept = blocks.size();
  std::string text = all_json(clock_mhz, blocks, kept, kAll);
  if (text.size() > room && kept > 1) {  // how many blocks: their sizes are about the same
    std::size_t low = 1, high = kept;
    while (low + 1 < high) {
      const std::size_t middle = low + (high - low) / 2;
      (all_json(clock_mhz, blocks, middle, kAll).size() > room ? high : low) = middle;
    }
    kept = low;
    text = all_json(clock_mhz, blocks, kept, kAll);
  }
  if (kept < blocks_.size())
    left_out = "shared memory of " + std::to_string(blocks_.size() - kept) + " of " +
               std::to_string(blocks_.size()) + " blocks";
  std::string after;
  const Block& only = blocks_[blocks[0]];
  if (text.size() > room) {
    Cycles low = 0, high = 0;
    for (const Access& a : only.accesses) high = std::max(high, a.at);
    while (low + 1 < high) {
      const Cycles middle = low + (high - low) / 2;
      (all_json(clock_mhz, blocks, 1, middle).size() > room ? high : low) = middle;
    }
    text = all_json(clock_mhz, blocks, 1, low);
    after = std::to_string(nanoseconds(low, clock_mhz));
  } else if (only.cut && !only.accesses.empty()) {
    after = std::to_string(nanoseconds(only.accesses.back().at, clock_mhz));
  }
  if (!after.empty())
    left_out += (left_out.empty() ? "accesses to shared memory after " : " and accesses after ") +
                after + " ns";
  if (!left_out.empty()) text.insert(1, "\"left_out\":" + quoted(left_out) + ",\n");
  return text.size() > room + kLeftOut ? std::string() : text;
}

}  // namespace attn::emulator
