#include "check/variations.h"

#include <fmt/format.h>

#include <algorithm>
#include <regex>
#include <set>

#include "attn/error.h"
#include "attn/feature.h"
#include "check/operation.h"

namespace attn {

std::vector<Variation> variations(const Problem& p, const Operation& op,
                                  const std::optional<Tiling>& tiling) {
  const bool rows_alone = op.matrix;
  std::vector<Variation> all;
  const auto add = [&](std::string change, auto edit) {
    Problem varied = p;
    edit(varied);
    try {
      varied.finish();
    } catch (const InputError&) {  // the mask has another shape
      return;
    }
    all.push_back({std::move(change), std::move(varied)});
  };
  if (p.masked()) {
    const bool window = p.window_left >= 0 || p.window_right >= 0;
    add(fmt::format("without {}", p.causal && window ? "--causal and --window"
                                  : p.causal         ? "--causal"
                                                     : "--window"),
        [](Problem& v) { v.causal = false, v.window_left = v.window_right = -1; });
  }
  if (p.masked() && !p.varlen() &&
      p.seqlen_q != p.seqlen_k)  // tells the two causal alignments apart
    add(fmt::format("with equal lengths ({})", std::max(p.seqlen_q, p.seqlen_k)),
        [](Problem& v) { v.seqlen_q = v.seqlen_k = std::max(v.seqlen_q, v.seqlen_k); });
  if (p.mask) add("without its mask", [](Problem& v) { v.mask = nullptr; });
  for (const Feature& f : shared_features())
    if ((f.scores || f.factors) && !f.values(p).empty())
      add("without " + f.option(), [&](Problem& v) { f.give(v, {}); });
  const auto one_head = [](Problem& v) { v.heads = v.kv_heads = 1; };
  const auto one_sequence = [](Problem& v) {
    if (v.varlen()) {
      const auto longest = std::ranges::max_element(v.varlen_q) - v.varlen_q.begin();
      v.varlen_q = {v.varlen_q[static_cast<std::size_t>(longest)]};
      v.varlen_k = {v.varlen_k[static_cast<std::size_t>(longest)]};
    }
    if (!v.seqused_k.empty()) v.seqused_k = {std::ranges::max(v.seqused_k)};
    v.batch = 1;
  };
  if (rows_alone) {
    if (p.batch * p.heads * p.seqlen_q > 1)
      add("with one row", [](Problem& v) { v.batch = v.heads = v.kv_heads = v.seqlen_q = 1; });
  } else {
    if (p.heads > 1) add("with one head", one_head);
    if (p.batch > 1) add("with one sequence", one_sequence);
  }
  for (const Feature& f : op.own)
    if (f.vary)
      for (auto& [change, varied] : f.vary(p)) add(change, [&](Problem& v) { v = varied; });

  const int64_t tile_q = rows_alone ? 1
                         : tiling   ? tiling->block_m
                                    : 128,
                tile_k = tiling ? tiling->block_n : 128;
  const auto whole = [](int64_t& length, int64_t tile) {
    length = (length + tile - 1) / tile * tile;
  };
  Problem tiles = p;
  whole(tiles.seqlen_q, tile_q), whole(tiles.seqlen_k, tile_k);
  for (int64_t& length : tiles.varlen_q) whole(length, tile_q);
  for (int64_t& length : tiles.varlen_k) whole(length, tile_k);
  const std::string lengths = rows_alone ? fmt::format("{}", tiles.seqlen_k)
                                         : fmt::format("{}, {}", tiles.seqlen_q, tiles.seqlen_k);
  const bool longer = tiles.seqlen_q != p.seqlen_q || tiles.seqlen_k != p.seqlen_k;
  if (tiles.varlen_q != p.varlen_q || tiles.varlen_k != p.varlen_k)
    add("with lengths of whole tiles", [&](Problem& v) { v = tiles; });
  else if (longer)
    add(fmt::format("with {} ({})", rows_alone ? "columns" : "whole tiles", lengths),
        [&](Problem& v) { v = tiles; });
  return all;
}

std::string_view name(Varied::Outcome o) {
  switch (o) {
    case Varied::Outcome::pass:
      return "pass";
    case Varied::Outcome::fail:
      return "fail";
    case Varied::Outcome::stopped:
      return "stopped";
    case Varied::Outcome::unsupported:
      return "unsupported";
    case Varied::Outcome::not_tried:
      return "not tried";
  }
  return "?";
}

std::optional<Varied> not_varied(const Problem& p, bool rows_alone, Backend backend) {
  // Multiply-adds of one pass over Q and K; an exponential counts as 64. The emulator executes 5e7
  // of them in about a second, the reference 1e9.
  const double most = backend == Backend::gpu ? 1e9 : 5e7;
  const double work = p.total_pairs() * static_cast<double>(rows_alone ? 64 : p.head_dim);
  if (p.inputs == InputKind::files)
    return Varied{Varied::Outcome::not_tried, "the inputs are from files"};
  if (work > most)
    return Varied{
        Varied::Outcome::not_tried,
        fmt::format("the problem is {:.2g} times as large as any that is run again", work / most)};
  return std::nullopt;
}

namespace {
// The common part of similar failures: without the details after a semicolon, and without thread
// and block indices.
std::string cause(std::string_view reason) {
  // names the source lines
  if (const std::size_t race = reason.find("race: "); race != reason.npos) {
    static const std::regex lines(" at ([^ ]+:[0-9]+)");
    const std::string text(reason.substr(race));
    std::set<std::string> places;
    for (std::sregex_iterator i(text.begin(), text.end(), lines), end; i != end; ++i)
      places.insert((*i)[1]);
    std::string all = "race";
    for (const std::string& place : places) all += (all == "race" ? " of " : " and ") + place;
    return all;
  }
  return std::regex_replace(std::string(reason.substr(0, reason.find(';'))),
                            std::regex("\\([0-9,]+\\)"), "");
}
}  // namespace

std::string varied_text(const std::vector<Varied>& all, std::string_view failure) {
  std::string text;
  for (const Varied& v : all) {
    using Outcome = Varied::Outcome;
    std::string reason = v.reason.substr(0, v.reason.find(';'));
    if (reason.find("race: ") != reason.npos) reason = cause(reason);
    const bool likewise = v.outcome == Outcome::stopped && cause(failure).ends_with(cause(reason));
    if (!text.empty()) text += "; ";
    text += v.outcome == Outcome::pass          ? "passes"
            : v.outcome == Outcome::fail        ? "fails"
            : likewise                          ? "stops likewise"
            : v.outcome == Outcome::stopped     ? "stops"
            : v.outcome == Outcome::unsupported ? "cannot run"
                                                : "not tried";
    if (!v.change.empty()) text += " " + v.change;
    if (v.outcome != Outcome::pass && v.outcome != Outcome::fail && !likewise)
      text += " (" + reason + ")";
  }
  return text;
}

}  // namespace attn
