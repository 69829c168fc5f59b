#include "exercise/pipe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "attn/error.h"
#include "attn/sliding_tiles.h"

namespace attn {
namespace {

using nlohmann::json;

constexpr int64_t kLongestMessage = 2000, kMaxProbed = int64_t{1} << 26;

json to_json(const TensorSpec& t) {
  return {{"name", t.name}, {"shape", t.shape}, {"dtype", static_cast<int>(t.dtype)}};
}
TensorSpec tensor_spec(const json& j) {
  TensorSpec t{j.at("name"), {}, static_cast<DType>(j.at("dtype").get<int>())};
  j.at("shape").get_to(t.shape);
  return t;
}

// The fields of Shape, and the other properties of a problem that a launch reads.
json to_json(const Problem& p) {
  return {{"batch", p.batch},
          {"heads", p.heads},
          {"kv_heads", p.kv_heads},
          {"seqlen_q", p.seqlen_q},
          {"seqlen_k", p.seqlen_k},
          {"head_dim", p.head_dim},
          {"dtype", static_cast<int>(p.dtype)},
          {"causal", p.causal},
          {"window", {p.window_left, p.window_right}},
          {"scale", p.softmax_scale},
          {"softcap", p.softcap},
          {"alibi", p.alibi},
          {"dropout", p.dropout},
          {"top_k", p.top_k},
          {"matrix", p.matrix},
          {"seqused_k", p.seqused_k},
          {"varlen", {p.varlen_q, p.varlen_k}},
          {"own", p.own},
          {"inputs", static_cast<int>(p.inputs)},
          {"seed", p.seed}};
}
Problem problem(const json& j) {
  Problem p;
  j.at("batch").get_to(p.batch), j.at("heads").get_to(p.heads), j.at("kv_heads").get_to(p.kv_heads);
  j.at("seqlen_q").get_to(p.seqlen_q), j.at("seqlen_k").get_to(p.seqlen_k),
      j.at("head_dim").get_to(p.head_dim);
  p.dtype = static_cast<DType>(j.at("dtype").get<int>());
  j.at("causal").get_to(p.causal);
  p.window_left = j.at("window").at(0), p.window_right = j.at("window").at(1);
  j.at("scale").get_to(p.softmax_scale), j.at("softcap").get_to(p.softcap),
      j.at("alibi").get_to(p.alibi);
  j.at("dropout").get_to(p.dropout), j.at("top_k").get_to(p.top_k), j.at("seed").get_to(p.seed);
  j.at("varlen").at(0).get_to(p.varlen_q), j.at("varlen").at(1).get_to(p.varlen_k);
  p.inputs = static_cast<InputKind>(j.at("inputs").get<int>());
  j.at("matrix").get_to(p.matrix), j.at("seqused_k").get_to(p.seqused_k), j.at("own").get_to(p.own);
  return p;
}

// The properties of a mask that a launch reads, besides its tensors, which are among the inputs.
json to_json(const KeyMask* mask) {
  if (const auto* tiles = dynamic_cast<const SlidingTiles*>(mask))
    return {{"canvas", tiles->canvas_tiles()}, {"tile", tiles->block_m()}};
  if (dynamic_cast<const ColumnIntervals*>(mask)) return json::object();
  if (mask) throw InputError("an exercise takes only column masks and sliding tile masks");
  return nullptr;
}
std::shared_ptr<const KeyMask> mask_of(const json& j, const Request& r) {
  if (j.is_null()) return nullptr;
  if (!j.contains("canvas")) {
    const HostTensor& begin = r.inputs.at("hidden_begin");
    return std::make_shared<ColumnIntervals>(
        std::vector<int64_t>(std::begin(begin.spec.shape), std::end(begin.spec.shape)),
        begin.numbers, r.inputs.at("hidden_end").numbers);
  }
  // Tiles as lines: no launch reads their sides in tokens.
  const Sides tile{1, 1, j.at("tile")};
  const auto in_tokens = [&](const auto& tiles) {
    return Sides{tiles[0], tiles[1], tiles[2] * tile[2]};
  };
  const Sides canvas = in_tokens(j.at("canvas").get<Sides>());
  const std::vector<int64_t>& sides = r.inputs.at("tile_windows").numbers;
  std::vector<Sides> windows;
  for (std::size_t n = 0; n + 3 <= sides.size(); n += 3) windows.push_back(in_tokens(&sides[n]));
  return std::make_shared<SlidingTiles>(canvas, tile, windows,
                                        r.problem.seqlen_k - canvas[0] * canvas[1] * canvas[2]);
}

std::string encoded(const Request& r) {
  json head{{"what", static_cast<int>(r.what)},
            {"variant", r.variant},
            {"backend", static_cast<int>(r.backend)},
            {"schedule", r.schedule},
            {"launches", r.launches},
            {"quiet", r.quiet},
            {"timeline", r.timeline},
            {"title", r.title},
            {"problem", to_json(r.problem)},
            {"mask", to_json(r.problem.mask.get())},
            {"workspaces", json::array()},
            {"inputs", json::array()},
            {"outputs", json::array()}};
  for (const Workspace& w : r.workspaces)
    head["workspaces"].push_back({{"name", w.name}, {"bytes", w.bytes}, {"saved", w.saved}});
  for (const TensorSpec& t : r.input_specs) head["inputs"].push_back(to_json(t));
  for (const TensorSpec& t : r.output_specs) head["outputs"].push_back(to_json(t));
  const std::string text = head.dump();
  const auto length = static_cast<int64_t>(text.size());
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
  bytes += text;
  for (const TensorSpec& t : r.input_specs) {
    const std::vector<std::byte> data = to_bytes(r.inputs.at(t.name));
    bytes.append(reinterpret_cast<const char*>(data.data()), data.size());
  }
  return bytes;
}

// Reads `bytes`, or fewer at the end of the file.
std::size_t read_whole(int file, void* to, std::size_t bytes) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n = read(file, static_cast<char*>(to) + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  return done;
}
void read_or_throw(int file, void* to, std::size_t bytes) {
  if (read_whole(file, to, bytes) != bytes) throw std::runtime_error("the request is cut off");
}

void write_whole(int file, const void* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = write(file, static_cast<const char*>(from) + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::runtime_error("the judge has gone");
    done += static_cast<std::size_t>(n);
  }
}

// Output of another process as one line.
std::string one_line(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < 32 || c == 127; }, ' ');
  return text;
}

// A probe also returns numbers; only the exercise knows how many.
int64_t most_bytes(const Request& r) { return r.expected().value_or(kMaxProbed); }

}  // namespace

std::optional<int64_t> Request::expected() const {
  if (what == What::probe) return std::nullopt;
  int64_t count = 0;
  if (what != What::profile)
    for (const TensorSpec& t : output_specs) count += t.bytes();
  return count;
}

Reply Reply::failure(std::string why) {
  Reply reply;
  reply.message = why.empty() ? "failed" : std::move(why);
  if (reply.message.size() > kLongestMessage) reply.message.resize(kLongestMessage);
  return reply;
}

HostTensors Reply::outputs(const Request& request) const {
  HostTensors result;
  auto next = bytes.begin();
  for (const TensorSpec& spec : request.output_specs) {
    const auto end = next + spec.bytes();
    result.emplace(spec.name, from_bytes(spec, {next, end}));
    next = end;
  }
  return result;
}

std::vector<float> Reply::probed() const {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

std::optional<Request> read_request(int file) {
  int64_t length = 0;
  const std::size_t got = read_whole(file, &length, sizeof length);
  if (got == 0) return std::nullopt;
  if (got != sizeof length) throw std::runtime_error("the request is cut off");
  std::string text(static_cast<std::size_t>(length), '\0');
  read_or_throw(file, text.data(), text.size());
  const json head = json::parse(text);
  Request r;
  r.what = static_cast<Request::What>(head.at("what").get<int>());
  head.at("variant").get_to(r.variant);
  r.backend = static_cast<Backend>(head.at("backend").get<int>());
  head.at("schedule").get_to(r.schedule);
  head.at("launches").get_to(r.launches);
  head.at("quiet").get_to(r.quiet);
  head.at("timeline").get_to(r.timeline);
  head.at("title").get_to(r.title);
  r.problem = problem(head.at("problem"));
  for (const json& w : head.at("workspaces"))
    r.workspaces.push_back({w.at("name"), w.at("bytes"), w.at("saved")});
  for (const json& t : head.at("outputs")) r.output_specs.push_back(tensor_spec(t));
  for (const json& t : head.at("inputs")) {
    const TensorSpec spec = r.input_specs.emplace_back(tensor_spec(t));
    std::vector<std::byte> bytes(static_cast<std::size_t>(spec.bytes()));
    read_or_throw(file, bytes.data(), bytes.size());
    r.inputs.emplace(spec.name, from_bytes(spec, bytes));
  }
  r.problem.mask = mask_of(head.at("mask"), r);
  return r;
}

void write_reply(int file, const Reply& r) {
  const auto message = static_cast<int64_t>(r.message.size()),
             count = static_cast<int64_t>(r.bytes.size());
  write_whole(file, &message, sizeof message);
  write_whole(file, r.message.data(), r.message.size());
  write_whole(file, &r.seconds, sizeof r.seconds);
  write_whole(file, &count, sizeof count);
  write_whole(file, r.bytes.data(), r.bytes.size());
}

StudentProcess::StudentProcess(const std::string& program, std::string variant, double seconds)
    : program_(program),
      variant_(std::move(variant)),
      limit_(seconds),
      end_(std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(
               std::chrono::duration<double>(seconds))) {
  if (access(program.c_str(), X_OK) != 0) throw InputError(program + ": no such program");
  // Keeps other processes of the same user from reading the memory of this one, which holds the
  // right results.
  prctl(PR_SET_DUMPABLE, 0);
  signal(SIGPIPE, SIG_IGN);
  start();
}

void StudentProcess::start() {
  const std::string& program = program_;
  int request[2], reply[2];
  if (pipe2(request, O_CLOEXEC) != 0 || pipe2(reply, O_CLOEXEC) != 0)
    throw InputError(program + ": " + std::strerror(errno));
  const pid_t judge = getpid();
  process_ = fork();
  if (process_ < 0) throw InputError(program + ": " + std::strerror(errno));
  if (process_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != judge) _exit(127);
    signal(SIGPIPE, SIG_DFL);
    // 0: requests; 3: answers; standard output goes to our standard error.
    const int answers = fcntl(reply[1], F_DUPFD, 10);
    if (dup2(request[0], 0) == 0 && dup2(2, 1) == 1 && dup2(answers, 3) == 3) {
      close(answers);
      execl(program.c_str(), program.c_str(), "--serve", static_cast<char*>(nullptr));
    }
    _exit(127);
  }
  setpgid(process_, process_);  // parent and child both call it; whichever runs first
  close(request[0]), close(reply[1]);
  to_ = request[1], from_ = reply[0];
  fcntl(to_, F_SETFL, O_NONBLOCK), fcntl(from_, F_SETFL, O_NONBLOCK);
}

void StudentProcess::hurry(double seconds) {
  const auto span = std::chrono::duration<double>(seconds);
  end_ = std::min(end_, std::chrono::steady_clock::now() +
                            std::chrono::duration_cast<std::chrono::steady_clock::duration>(span));
}

bool StudentProcess::restart() {
  if (process_ >= 0) return true;
  if (late_ || std::chrono::steady_clock::now() >= end_) return false;
  if (to_ >= 0) close(to_);
  if (from_ >= 0) close(from_);
  to_ = from_ = -1;
  start();
  return true;
}

StudentProcess::~StudentProcess() {
  if (to_ >= 0) close(to_);
  if (from_ >= 0) close(from_);
  if (process_ > 0) {
    kill(-process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
}

// Waits until a pipe is readable or writable, at most until the time limit.
bool StudentProcess::ready(int file, short events) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end_ - std::chrono::steady_clock::now());
    if (left.count() <= 0) return late_ = true, false;
    pollfd p{file, events, 0};
    const int n = poll(&p, 1, static_cast<int>(std::min<int64_t>(left.count(), 60000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

bool StudentProcess::send(const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    if (!ready(to_, POLLOUT)) return false;
    const ssize_t n = write(to_, bytes.data() + done, bytes.size() - done);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

bool StudentProcess::receive(void* to, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    if (!ready(from_, POLLIN)) return false;
    const ssize_t n = read(from_, static_cast<char*>(to) + done, bytes - done);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return true;
}

// Ends the process; reports how it ended if it ended by itself.
Reply StudentProcess::gone(const std::string& why) {
  int status = 0;
  const bool itself = !late_ && why.empty();
  // The process has closed its end of the pipe: it is about to end, or has closed the wrong file.
  for (int i = 0; itself && i < 200 && waitpid(process_, &status, WNOHANG) == 0; ++i) usleep(10000);
  const bool ended = itself && waitpid(process_, &status, WNOHANG) != 0;
  kill(-process_, SIGKILL);
  if (!ended) waitpid(process_, nullptr, 0);
  process_ = -1;
  if (late_) return Reply::failure(fmt::format("did not end in {:.0f} s", limit_));
  if (!why.empty()) return Reply::failure(why);
  if (ended && WIFSIGNALED(status))
    return Reply::failure(fmt::format("the program crashed: {}", strsignal(WTERMSIG(status))));
  if (ended && WIFEXITED(status))
    return Reply::failure(fmt::format(
        "the program ended with status {} before it had given an answer", WEXITSTATUS(status)));
  return Reply::failure("the program gave no answer");
}

Reply StudentProcess::ask(Request request) {
  if (process_ < 0) return Reply::failure("the program has ended");
  request.variant = variant_;
  Reply reply;
  int64_t length = 0, count = 0;
  if (!send(encoded(request)) || !receive(&length, sizeof length)) return gone("");
  if (length < 0 || length > kLongestMessage) return gone("gave an answer that cannot be read");
  reply.message.resize(static_cast<std::size_t>(length));
  if (!receive(reply.message.data(), reply.message.size()) ||
      !receive(&reply.seconds, sizeof reply.seconds) || !receive(&count, sizeof count))
    return gone("");
  if (!reply.message.empty()) return Reply::failure(one_line(reply.message));
  if (count < 0 || count > most_bytes(request) || count != request.expected().value_or(count))
    return gone(fmt::format("gave {} bytes where the outputs have {}", count, most_bytes(request)));
  reply.bytes.resize(static_cast<std::size_t>(count));
  if (!receive(reply.bytes.data(), reply.bytes.size())) return gone("");
  return reply;
}

}  // namespace attn
