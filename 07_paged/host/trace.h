// What paging is good for: requests replayed on the cache of this chapter, and on one in which
// every sequence has its room in one piece. No attention is computed.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace attn::paged {

// One line of a trace: arrival,prompt,output,samples,beams,system,system_tokens
struct Request {
  int64_t arrival;  // the step of the server at which it arrives; none is before the one above
  int64_t prompt;   // tokens of its own, behind those of the system prompt
  int64_t output;   // tokens that it generates, each sample or beam as many
  int64_t samples;  // sequences that are sampled from the same prompt
  int64_t beams;    // sequences of a beam search; samples or beams is 1
  int64_t system;   // number of its system prompt; 0: none
  int64_t system_tokens;  // the length of that
  int64_t width() const { return samples * beams; }
};
using Trace = std::vector<Request>;

// A CSV with that header. Throws InputError with the line.
Trace read_trace(std::istream&, const std::string& name);
void write_trace(std::ostream&, const Trace&);
// `requests` drawn ones: lengths as of chats, four system prompts, some parallel samples and beams.
Trace drawn_trace(int64_t requests, uint64_t seed);

// How a cache is divided.
struct Division {
  enum class Kind { pages, longest, known };
  Kind kind = Kind::pages;
  int page_size = 16;
  std::string text() const;
};
constexpr int64_t kLongest = 2048;  // what `longest` reserves for a sequence: the model's limit

struct Replayed {
  bool waited = false;    // did requests, at some time? Else the next three say nothing
  double useful = 0;      // of the tokens that are reserved, the share that is there
  double running = 0;     // sequences at a time
  double shared = 0;      // of the tokens that sequences have, the share that another one stores
  double hit_rate = 0;    // of the tokens of prompts, the share that was there
  int64_t copied = 0;     // tokens, because a sequence went on in two ways
  int64_t preempted = 0;  // requests that had to begin again
  int64_t steps = 0;      // until all are done
};
// Requests are taken in their order, as soon as there is room: with pages, and a 32nd of them to
// spare. Each step every sequence that runs gets one token. Where there is no room left the
// youngest request begins again later. `useful`, `running` and `shared` are averages over every
// 16th step, of those in which some request waits.
Replayed replay(const Trace&, const Division&, int64_t capacity, uint64_t seed);

// The same trace with every division, as a table in Markdown and as a picture in SVG.
using ReplayedRows = std::vector<std::pair<Division, Replayed>>;
constexpr int64_t kDrawnRequests = 1000;  // without a file
ReplayedRows replay_all(const Trace&);
std::string table(const ReplayedRows&);
std::string picture(const ReplayedRows&);

// `07_paged --trace [FILE] [--svg FILE] [--save FILE]`.
int trace_command(const std::vector<std::string>& arguments);

}  // namespace attn::paged
