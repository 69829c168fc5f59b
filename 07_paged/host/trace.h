// Replays a trace of requests on this chapter's cache and on a contiguous one. No attention is
// computed.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace attn::paged {

// One line of a trace: arrival,prompt,output,samples,beams,system,system_tokens
struct Request {
  int64_t arrival;        // step of arrival; not before that of the line above
  int64_t prompt;         // prompt tokens after the system prompt
  int64_t output;         // generated tokens, of each sample or beam
  int64_t samples;        // parallel samples of the same prompt
  int64_t beams;          // beams of a beam search; samples or beams is 1
  int64_t system;         // id of its system prompt; 0: none
  int64_t system_tokens;  // length of the system prompt
  int64_t width() const { return samples * beams; }
};
using Trace = std::vector<Request>;

// Reads a CSV with that header. Throws InputError with the line.
Trace read_trace(std::istream&, const std::string& name);
void write_trace(std::ostream&, const Trace&);
// `requests` random ones: lengths as in chats, four system prompts, some parallel samples and
// beams.
Trace drawn_trace(int64_t requests, uint64_t seed);

// How the cache is divided.
struct Division {
  enum class Kind { pages, longest, known };
  Kind kind = Kind::pages;
  int page_size = 16;
  std::string text() const;
};
// tokens that `longest` reserves per sequence: the model's limit
constexpr int64_t kLongest = 2048;

struct Replayed {
  bool waited = false;    // whether requests ever waited; if not, the next three mean nothing
  double useful = 0;      // share of the reserved tokens that are stored
  double running = 0;     // average of concurrent sequences
  double shared = 0;      // share of the sequences' tokens that another sequence stores
  double hit_rate = 0;    // share of the prompt tokens found in the cache
  int64_t copied = 0;     // tokens copied at forks (copy-on-write)
  int64_t preempted = 0;  // restarted requests
  int64_t steps = 0;      // steps until all requests have finished
};
// Requests start in order, as soon as there is room: with pages, 1/32 of them must stay free. Each
// step generates one token for every running sequence. If pages run out, the youngest request is
// preempted and restarts later. `useful`, `running` and `shared` are averages over every 16th step
// in which some request waits.
Replayed replay(const Trace&, const Division&, int64_t capacity, uint64_t seed);

// Replays a trace with every division: a Markdown table and an SVG picture.
using ReplayedRows = std::vector<std::pair<Division, Replayed>>;
constexpr int64_t kDrawnRequests = 1000;  // if no file is given
ReplayedRows replay_all(const Trace&);
std::string table(const ReplayedRows&);
std::string picture(const ReplayedRows&);

// `07_paged --trace [FILE] [--svg FILE] [--save FILE]`.
int trace_command(const std::vector<std::string>& arguments);

}  // namespace attn::paged
