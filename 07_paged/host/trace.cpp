#include "host/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <istream>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <stdexcept>

#include "attn/error.h"
#include "host/page_pool.h"
#include "host/radix_tree.h"

namespace attn::paged {
namespace {

constexpr const char* kHeader = "arrival,prompt,output,samples,beams,system,system_tokens";
constexpr int64_t kCapacity = 1 << 16;  // tokens: 8 GiB of a model with 128 KiB a token
constexpr int kSampleEvery = 16;        // steps between two samples of memory use
constexpr int kReserve = 32;            // one page of this many stays free when a request starts
constexpr int64_t kBeamSteps = 4;       // a beam forks from another one every so many steps
// offset of the ids of system-prompt tokens
constexpr int64_t kMaxPrompts = (int64_t{1} << 31) / kLongest;
constexpr int64_t kLastArrival = int64_t{1} << 53;  // limit, so that no count of steps overflows

double uniform(std::mt19937_64& random) { return (double(random() >> 11) + 0.5) * 0x1p-53; }
// Log-normal lengths with this mean, from 4 to 1024.
int64_t length(std::mt19937_64& random, double mean) {
  const double u = uniform(random), v = uniform(random);
  const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  constexpr double kSpread = 0.8;
  return std::clamp<int64_t>(
      std::llround(mean * std::exp(kSpread * normal - kSpread * kSpread / 2)), 4, 1024);
}

}  // namespace

Trace drawn_trace(int64_t requests, uint64_t seed) {
  std::mt19937_64 random(seed);
  Trace trace;
  for (int64_t n = 0, now = 0; n < requests; ++n) {
    now += std::llround(-2 * std::log(uniform(random)));  // one request per 2 steps
    Request r{now, length(random, 161), length(random, 338), 1, 1, 0, 0};
    const double what = uniform(random);
    if (what < 0.1) r.samples = 2 + static_cast<int64_t>(random() % 5);
    if (what > 0.95) r.beams = 4;
    r.system = static_cast<int64_t>(random() % 8);  // half of the requests have none
    r.system = r.system > 4 ? 0 : r.system;
    r.system_tokens = r.system * 96;
    trace.push_back(r);
  }
  return trace;
}

Trace read_trace(std::istream& in, const std::string& name) {
  Trace trace;
  std::string line;
  const auto next_line = [&] {  // CRLF line ends are accepted
    const bool there = bool(std::getline(in, line));
    if (there && line.ends_with('\r')) line.pop_back();
    return there;
  };
  const bool any = next_line();
  // a byte order mark, which editors do not show
  if (line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);
  if (!any || line != kHeader)
    throw InputError(fmt::format("{}: the first line must be {}", name, kHeader));
  std::set<int64_t> systems;
  for (int64_t number = 2; next_line(); ++number) {
    if (line.empty()) continue;
    Request r{};
    int64_t* const fields[] = {&r.arrival, &r.prompt, &r.output,       &r.samples,
                               &r.beams,   &r.system, &r.system_tokens};
    const char *at = line.data(), *const end = at + line.size();
    bool good = true;
    for (int64_t* const field : fields) {
      const auto [stop, error] = std::from_chars(at, end, *field);
      const bool last = field == fields[6];
      good = good && error == std::errc() && (last ? stop == end : stop < end && *stop == ',');
      at = good ? stop + !last : end;
    }
    const auto wrong = [&](const std::string& what) {
      throw InputError(fmt::format("{}: line {}: {}: {}", name, number, line, what));
    };
    if (!good) wrong("must be seven integers");
    if (r.prompt < 1 || r.output < 1) wrong("prompt and output must be at least 1");
    if (r.samples < 1 || r.beams < 1 || (r.samples > 1 && r.beams > 1))
      wrong("samples and beams must be at least 1, and one of them 1");
    if (r.system < 0 || r.system_tokens < 0 || (r.system == 0 && r.system_tokens > 0))
      wrong("a system prompt has a number from 1 on");
    if (std::max({r.system_tokens, r.prompt, r.output}) > kLongest ||
        r.system_tokens + r.prompt + r.output > kLongest)
      wrong("longer than the 2048 tokens of the model");
    if (std::max(r.samples, r.beams) > kCapacity / kLongest)
      wrong(fmt::format("does not fit into the cache: samples x beams x {} must be at most {}",
                        kLongest, kCapacity));
    if (r.arrival < 0) wrong("arrival must be at least 0");
    if (!trace.empty() && r.arrival < trace.back().arrival) wrong("arrives before the line above");
    if (r.arrival > kLastArrival) wrong("arrives after step 2^53");
    systems.insert(r.system);
    if (std::ssize(trace) + std::ssize(systems) >= kMaxPrompts)
      wrong(fmt::format("more than {} requests and system prompts", kMaxPrompts - 1));
    trace.push_back(r);
  }
  if (trace.empty()) throw InputError(name + ": no requests");
  return trace;
}

void write_trace(std::ostream& out, const Trace& trace) {
  out << kHeader << '\n';
  for (const Request& r : trace)
    out << fmt::format("{},{},{},{},{},{},{}\n", r.arrival, r.prompt, r.output, r.samples, r.beams,
                       r.system, r.system_tokens);
}

std::string Division::text() const {
  if (kind == Kind::longest) return fmt::format("contiguous, {} tokens", kLongest);
  if (kind == Kind::known) return "contiguous, length known";
  return page_size == 1 ? "pages of 1 token" : fmt::format("pages of {} tokens", page_size);
}

namespace {

// A running request.
struct Running {
  const Request* request;
  int64_t number;                        // index of the request in the trace
  // samples or beams; without pages in a contiguous cache
  std::vector<CachedSequence> sequences = {};
  RadixTree::Node* node = nullptr;       // locked
  int64_t generated = 0;
};

class Server {
 public:
  Server(const Division& division, int64_t capacity, uint64_t seed)
      : division_(division),
        random_(seed),
        pool_(division.kind == Division::Kind::pages
                  ? static_cast<int>(capacity / division.page_size)
                  : 0),
        tree_(pool_, division.page_size),
        seen_(static_cast<std::size_t>(pool_.num_pages())),
        capacity_(capacity) {}

  Replayed run(const Trace& trace) {
    std::size_t next = 0;
    for (const Request& r : trace) systems_.try_emplace(r.system, std::ssize(systems_));
    for (int64_t now = 0; next < trace.size() || !waiting_.empty() || !running_.empty(); ++now) {
      if (waiting_.empty() && running_.empty()) now = std::max(now, trace[next].arrival);
      for (; next < trace.size() && trace[next].arrival <= now; ++next)
        waiting_.push_back({&trace[next], static_cast<int64_t>(next)});
      while (!waiting_.empty() && begin(waiting_.front())) waiting_.pop_front();
      if (now % kSampleEvery == 0) look();
      for (std::size_t n = 0; n < running_.size(); ++n) generate(n);
      std::erase_if(running_, [&](Running& r) {
        if (r.generated < r.request->output) return false;
        end(r);
        return true;
      });
      result_.steps = now + 1;
    }
    tree_.evict(pool_.num_pages());
    if (pool_.free_pages() != pool_.num_pages() || in_use_ != 0)
      throw std::logic_error("replay: memory of requests that are done is not free");
    const auto share = [](double a, double b) { return b > 0 ? a / b : 0; };
    result_.useful = share(stored_, reserved_);
    result_.shared = 1 - share(stored_, logical_);
    result_.running = share(sequences_, looks_);
    result_.hit_rate = share(hits_, prompts_);
    return result_;
  }

 private:
  bool pages() const { return division_.kind == Division::Kind::pages; }
  static int64_t prompt_of(const Request& r) { return r.system_tokens + r.prompt; }
  int64_t reservation(const Request& r) const {
    return division_.kind == Division::Kind::longest ? kLongest : prompt_of(r) + r.output;
  }
  // Tokens of a system prompt are equal in all its requests; those of a request are unique.
  std::vector<Token> prompt_tokens(const Request& r, int64_t number) const {
    std::vector<Token> tokens;
    const auto add = [&](int64_t whose, int64_t count) {
      for (int64_t i = 0; i < count; ++i)
        tokens.push_back(static_cast<Token>(whose * kLongest + i));
    };
    add(systems_.at(r.system), r.system_tokens);
    add(std::ssize(systems_) + number, r.prompt);
    return tokens;
  }

  // Frees pages for `count` more tokens; evicts pages that only the tree references.
  std::optional<Appended> append_tokens(CachedSequence& s, int64_t count) {
    try {
      return append(pool_, division_.page_size, s, count);
    } catch (const OutOfPages& e) {
      const auto missing = static_cast<int>(e.wanted - e.free);
      if (tree_.evict(missing) < missing) return std::nullopt;
    }
    return append(pool_, division_.page_size, s, count);
  }

  // Whether this many pages are free, or referenced by the tree only.
  bool free_pages(int count) {
    if (count > pool_.free_pages()) tree_.evict(count - pool_.free_pages());
    return count <= pool_.free_pages();
  }

  //! [begin]
  bool begin(Running r) {
    const Request& request = *r.request;
    r.sequences.resize(1);
    r.generated = 0;
    if (pages()) {
      const std::vector<Token> tokens = prompt_tokens(request, r.number);
      // The last token of a prompt is always computed: it is the first query.
      const RadixTree::Match m = tree_.match("", std::span(tokens).first(tokens.size() - 1));
      const auto there = static_cast<int64_t>(m.pages.size()) * division_.page_size;
      tree_.lock(r.node = m.node);
      CachedSequence& s = r.sequences.front();
      for (const int page : m.pages) pool_.share(page);
      s = {m.pages, there};
      // Keep a reserve for tokens to come; otherwise a request that has just started is preempted.
      const int reserve = running_.empty() ? 0 : pool_.num_pages() / kReserve;
      if (!append_tokens(s, prompt_of(request) - there) || !free_pages(reserve)) {
        end(r);
        return false;
      }
      tree_.insert("", tokens, s.pages);
      tree_.unlock(r.node);
      tree_.lock(r.node = tree_.match("", tokens).node);
      hits_ += double(there);
    } else {
      const int64_t all = request.width() * reservation(request);
      if (in_use_ + all > capacity_) return false;
      in_use_ += all;
      r.sequences.front().length = prompt_of(request);
    }
    prompts_ += double(prompt_of(request));
    while (static_cast<int64_t>(r.sequences.size()) < request.width())
      r.sequences.push_back(again(r.sequences.front()));
    running_.push_back(std::move(r));
    return true;
  }
  //! [begin]

  CachedSequence again(const CachedSequence& s) {
    if (pages()) return fork(pool_, s);
    result_.copied += s.length;
    return s;
  }

  void generate(std::size_t n) {
    Running& r = running_[n];
    if (r.request->beams > 1 && r.generated % kBeamSteps == kBeamSteps - 1) {
      // One beam is dropped, another one forks.
      const auto beams = r.sequences.size(), from = random_() % beams,
                 to = (from + 1 + random_() % (beams - 1)) % beams;
      CachedSequence fresh = again(r.sequences[from]);
      if (pages()) drop(pool_, r.sequences[to]);
      r.sequences[to] = std::move(fresh);
    }
    for (CachedSequence& s : r.sequences) {
      if (!pages()) {
        ++s.length;
        continue;
      }
      std::optional<Appended> to = append_tokens(s, 1);
      while (!to && n + 1 < running_.size()) {  // preempt the youngest request
        preempt();
        to = append_tokens(s, 1);
      }
      if (!to) return preempt();  // it is this one
      if (to->copy) result_.copied += to->copy->tokens;
    }
    ++r.generated;
  }
  void preempt() {
    Running& r = running_.back();
    const Running again{r.request, r.number};
    end(r);
    running_.pop_back();
    waiting_.push_front(again);
    ++result_.preempted;
  }
  void end(Running& r) {
    if (!pages()) {
      in_use_ -= r.request->width() * reservation(*r.request);
      return;
    }
    for (CachedSequence& s : r.sequences) drop(pool_, s);
    tree_.unlock(r.node);
  }

  // Tokens of sequences, tokens stored, and tokens reserved.
  void look() {
    if (waiting_.empty()) return;  // memory does not limit the batch
    ++looks_;
    result_.waited = true;
    std::ranges::fill(seen_, 0);
    for (const Running& r : running_) {
      sequences_ += double(r.sequences.size());
      if (!pages()) reserved_ += double(r.request->width() * reservation(*r.request));
      for (const CachedSequence& s : r.sequences) {
        logical_ += double(s.length);
        if (!pages()) stored_ += double(s.length);
        for (std::size_t n = 0; n < s.pages.size(); ++n) {
          const auto size = static_cast<int64_t>(division_.page_size);
          const auto fill =
              static_cast<int>(std::min<int64_t>(size, s.length - static_cast<int64_t>(n) * size));
          int& seen = seen_[static_cast<std::size_t>(s.pages[n])];
          if (seen == 0) reserved_ += double(size);
          stored_ += std::max(0, fill - seen);
          seen = std::max(seen, fill);
        }
      }
    }
  }

  const Division division_;
  std::mt19937_64 random_;
  PagePool pool_;
  RadixTree tree_;
  std::vector<int> seen_;  // stored tokens per page
  const int64_t capacity_;
  std::map<int64_t, int64_t> systems_;  // system prompts, by their ids in the trace
  int64_t in_use_ = 0;                  // tokens reserved contiguously
  std::deque<Running> waiting_;
  std::vector<Running> running_;
  Replayed result_;
  double stored_ = 0, reserved_ = 0, logical_ = 0, sequences_ = 0, looks_ = 0, hits_ = 0,
         prompts_ = 0;
};

}  // namespace

Replayed replay(const Trace& trace, const Division& division, int64_t capacity, uint64_t seed) {
  return Server(division, capacity, seed).run(trace);
}

ReplayedRows replay_all(const Trace& trace) {
  std::vector<Division> divisions{{Division::Kind::longest}, {Division::Kind::known}};
  for (const int page_size : {1, 8, 16, 32, 64, 256})
    divisions.push_back({Division::Kind::pages, page_size});
  ReplayedRows rows;
  for (const Division& d : divisions) rows.emplace_back(d, replay(trace, d, kCapacity, 1));
  return rows;
}

std::string table(const ReplayedRows& rows) {
  std::string text =
      "| the cache is divided into | useful | sequences | shared | hits | copied | preempted | "
      "steps |\n|---|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const auto& [division, r] : rows) {
    text += fmt::format("| {} | ", division.text());
    text += r.waited ? fmt::format("{:.1f} % | {:.0f} | {:.1f} %", 100 * r.useful, r.running,
                                   100 * r.shared)
                     : "- | - | -";
    text += fmt::format(" | {:.1f} % | {} | {} | {} |\n", 100 * r.hit_rate, r.copied, r.preempted,
                        r.steps);
  }
  return text;
}

// One bar of the useful share per division.
std::string picture(const ReplayedRows& rows) {
  const int height = 74 + 30 * static_cast<int>(rows.size());
  std::string svg = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {0}" width="760" height="{0}"
  role="img" aria-labelledby="t d">
  <title id="t">Share of the reserved memory that holds tokens</title>
  <desc id="d">A bar for each way to divide the cache: in one piece a sequence, and in pages.</desc>
  <style>
    .bg {{ fill: #ffffff; stroke: #d9dfe5; }}
    text {{ font: 14px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1d2530; }}
    .b {{ font-weight: 600; }} .e {{ text-anchor: end; }}
    .room {{ fill: #eef3f8; stroke: #8496a9; }} .ok {{ fill: #bfe3c8; stroke: #3d8a54; }}
    @media (prefers-color-scheme: dark) {{
      .bg {{ fill: #1b2027; stroke: #323a44; }} text {{ fill: #dfe5ec; }}
      .room {{ fill: #27313c; stroke: #6d7f92; }} .ok {{ fill: #23492f; stroke: #7cc592; }}
    }}
  </style>
  <rect class="bg" x="0.5" y="0.5" width="759" height="{1}" rx="6"/>
  <text x="20" y="30" class="b">The share of the reserved memory that holds tokens</text>
)",
      height, height - 1);
  int y = 52;
  for (const auto& [division, r] : rows) {
    if (!r.waited) continue;
    svg += fmt::format(
        "  <text x=\"200\" y=\"{}\" class=\"e\">{}</text>\n"
        "  <rect class=\"room\" x=\"212\" y=\"{}\" width=\"460\" height=\"20\"/>\n"
        "  <rect class=\"ok\" x=\"212\" y=\"{}\" width=\"{:.1f}\" height=\"20\"/>\n"
        "  <text x=\"684\" y=\"{}\">{:.1f} %</text>\n",
        y + 15, division.text(), y, y, 460 * r.useful, y + 15, 100 * r.useful);
    y += 30;
  }
  return svg + "</svg>\n";
}

namespace {

void write(const std::string& option, const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw InputError(fmt::format("{} {}: could not be written", option, path));
}

}  // namespace

int trace_command(const std::vector<std::string>& arguments) {
  std::string from, svg, save;
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string& a = arguments[n];
    std::string* const to = a == "--svg" ? &svg : a == "--save" ? &save : nullptr;
    if (to && n + 1 < arguments.size())
      *to = arguments[++n];
    else if (from.empty() && !a.empty() && a.front() != '-')
      from = a;
    else
      throw InputError(fmt::format("--trace: {}: must be [FILE] [--svg FILE] [--save FILE]", a));
  }
  Trace trace;
  if (from.empty()) {
    trace = drawn_trace(kDrawnRequests, 1);
  } else {
    if (std::filesystem::is_directory(from))
      throw InputError(
          fmt::format("--trace {}: a folder; a file of lines {} is accepted", from, kHeader));
    std::ifstream file(from);
    if (!file)
      throw InputError(
          fmt::format("--trace {}: {}", from,
                      std::filesystem::exists(from) ? "cannot be read" : "no such file"));
    trace = read_trace(file, from);
  }
  if (!save.empty()) {
    std::ofstream file(save);
    write_trace(file, trace);
    file.close();
    if (!file) throw InputError(fmt::format("--save {}: could not be written", save));
  }
  const ReplayedRows rows = replay_all(trace);
  fmt::print(
      "{} requests, a cache of {} tokens; useful, sequences and shared: averages while requests "
      "wait\n\n{}",
      trace.size(), kCapacity, table(rows));
  if (!svg.empty()) write("--svg", svg, picture(rows));
  return 0;
}

}  // namespace attn::paged
