#include "host/rank_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <utility>

#include "attn/error.h"
#include "check/operation.h"
#include "device/gpus.h"
#include "ranks/sharded.h"
#include "run/options.h"

namespace attn::rank_model {
namespace {

using namespace ranks;

double pairs_of(const Sharding& s, int rank, int owner) {
  double pairs = 0;
  for (const ShardBlock& b : blocks_of(s.whole, s.q[std::size_t(rank)], s.k[std::size_t(owner)])) {
    // a triangle where the mask cuts, instead of a sum over all rows
    const Problem p = problem_of(s.whole, b);
    const double full = double(b.nq) * double(b.nk);
    pairs += b.window_left < 0 && b.window_right >= 0 && b.window_right < b.nq
                 ? full - 0.5 * double(std::min(b.nq, b.nk) - b.window_right) *
                              double(std::min(b.nq, b.nk) - b.window_right - 1)
             : p.masked() ? p.sequence(0).visible_pairs()
                          : full;
  }
  return pairs;
}

// What a ring computes.
struct RingWork {
  double flop_per_pair, flop_per_s;
  double bytes_per_row, bytes_per_key;  // of accumulators that a launch reads and writes
  double messages;                      // bytes sent per byte of K and V
};
// Accumulators of the forward pass, O in fp32. A row is of all heads.
RingWork forward_ring(const Problem& p, const Machine& m) {
  const double d = double(p.head_dim), heads = double(p.batch * p.heads);
  return {4 * d * heads, m.forward_flops, 8 * d * heads, 0, 1};
}
// Five products. Gradients in 16 bits are added to fp32. K and V are sent in the elements' type, dK
// and dV in fp32, one hop behind, the last ones next to a block of the rank's own keys.
RingWork backward_ring(const Problem& p, const Machine& m) {
  const double d = double(p.head_dim), heads = double(p.batch * p.heads);
  const double kv_heads = double(p.batch * p.kv_heads);
  return {10 * d * heads, m.backward_flops, 10 * d * heads, 2 * 10 * d * kv_heads, 3};
}

double seconds_of(const Sharding& s, const Machine& m, const RingWork& w, int rank, int owner,
                  bool first) {
  const double pairs = pairs_of(s, rank, owner);
  if (pairs <= 0) return 0;
  double bytes = 0, launches = 0;
  for (const ShardBlock& b : blocks_of(s.whole, s.q[std::size_t(rank)], s.k[std::size_t(owner)]))
    bytes += w.bytes_per_row * double(b.nq) + w.bytes_per_key * double(b.nk), ++launches;
  if (first && w.bytes_per_key == 0) bytes = 0;  // nothing is accumulated yet
  return pairs * w.flop_per_pair / w.flop_per_s + bytes / m.read_bytes_per_s +
         launches * m.launch_s;
}

// Every rank does hop h when it has done hop h - 1 and has received the keys of hop h. A message
// begins when both of its ranks have begun the hop before.
Prediction ring(const Sharding& s, const Machine& m, const RingWork& w) {
  const int world = s.world();
  std::vector<double> free(std::size_t(world), 0), begun(std::size_t(world), 0);
  Prediction all;
  std::vector<double> work(std::size_t(world), 0);
  for (int hop = 0; hop < world; ++hop) {
    std::vector<double> arrived(std::size_t(world), 0), next = free;
    for (int r = 0; r < world; ++r) {
      const double seconds = seconds_of(s, m, w, r, (r - hop + world) % world, hop == 0);
      begun[std::size_t(r)] = free[std::size_t(r)];
      next[std::size_t(r)] = free[std::size_t(r)] + seconds;
      work[std::size_t(r)] += seconds;
    }
    for (int r = 0; r < world && hop + 1 < world; ++r) {
      const int from = (r + world - 1) % world, owner = (r - hop - 1 + 2 * world) % world;
      const double bytes = w.messages * double(s.kv_bytes(owner));
      const double of_kv = double(s.kv_bytes(owner));  // gradients are a message of their own
      const double seconds = m.transfer_s(of_kv) + m.transfer_s(bytes - of_kv) + m.message_s;
      arrived[std::size_t(r)] = std::max(begun[std::size_t(r)], begun[std::size_t(from)]) + seconds;
      if (r == 0) all.transfer_s += seconds, all.bytes += bytes;
    }
    for (int r = 0; r < world; ++r)
      free[std::size_t(r)] = std::max(next[std::size_t(r)], arrived[std::size_t(r)]);
  }
  all.compute_s = *std::ranges::max_element(work);
  all.total_s = *std::ranges::max_element(free);
  return all;
}

// The share of all keys that the fullest rank has, if the room for keys is cut into equal parts.
double largest_share(const Problem& p, int world) {
  const int64_t room = (p.seqlen_k + world - 1) / world;
  double all = 0, most = 0;
  for (int r = 0; r < world; ++r) {
    double keys = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t used = p.seqused_k.empty() ? p.seqlen_k : p.seqused_k[std::size_t(b)];
      keys += double(std::clamp<int64_t>(used - r * room, 0, room));
    }
    all += keys, most = std::max(most, keys);
  }
  return all > 0 ? most / all : 0;
}
// `share`: of the keys, on the rank with the most. `exchange_s`: latencies.
Prediction decode(const Problem& p, int world, const Machine& m, double share, double exchange_s) {
  const double rows = double(p.batch * p.heads * p.seqlen_q);
  Prediction all;
  all.compute_s = m.read_s(attn::decode().useful_bytes(p) * share);
  all.bytes = double(world - 1) * rows * double(p.head_dim + 1) * 4;
  all.transfer_s = world > 1 ? m.transfer_s(all.bytes) + exchange_s : 0;
  all.total_s = all.compute_s + all.transfer_s;
  return all;
}

}  // namespace

const Machine& nvlink_copies() {
  static const Machine machine;
  return machine;
}
const Machine& nvlink_nccl() {
  static const Machine machine{.name = "NVLink, NCCL",
                               .small_bytes_per_s = 80e9,
                               .link_bytes_per_s = 147e9,
                               .message_s = 7.5e-6,
                               .next_message_s = 0};
  return machine;
}
const Machine& infiniband() {
  static const Machine machine{.name = "InfiniBand 400 Gbit/s per GPU",
                               .small_bytes_per_s = 50e9,
                               .link_bytes_per_s = 50e9,
                               .message_s = 30e-6,
                               .next_message_s = 0};
  return machine;
}

Machine with_memory_of(Machine m, const std::string& gpu) {
  std::istringstream words(gpu);
  std::string vendor, card;
  words >> vendor >> card;
  if (const GpuSpec* spec = find_gpu(card))
    m.read_bytes_per_s *= spec->hbm_bytes_per_s / find_gpu("h200")->hbm_bytes_per_s;
  return m;
}

std::optional<Prediction> predict(const std::string& step, const Problem& p, int world,
                                  const Machine& m) {
  const double pair = 4 * double(p.head_dim) * double(p.batch * p.heads);
  const Sharding contiguous(p, TokenOrder::contiguous, world), zigzag(p, TokenOrder::zigzag, world);
  if (step == "p1_all_gather") {
    Prediction all;
    double pairs = 0;
    for (int owner = 0; owner < world; ++owner) pairs += pairs_of(contiguous, world - 1, owner);
    all.compute_s = pairs * pair / m.forward_flops + m.launch_s;
    all.bytes = double(world - 1) * double(contiguous.kv_bytes(0));
    all.transfer_s = world > 1 ? m.transfer_s(all.bytes) + m.message_s : 0;
    all.total_s = all.compute_s + all.transfer_s;
    return all;
  }
  if (step == "p2_ring") return ring(contiguous, m, forward_ring(p, m));
  if (step == "p3_zigzag") return ring(zigzag, m, forward_ring(p, m));
  if (step == "p4_ulysses") {
    Prediction all;
    Problem of_heads = p;
    const double pairs = of_heads.visible_pairs();
    all.compute_s = pairs * pair / world / m.forward_flops + m.launch_s;
    const double own = (2 * double(contiguous.q_bytes(0)) + double(contiguous.kv_bytes(0))) / world;
    all.bytes = own * (world - 1);
    all.transfer_s = world > 1 ? m.transfer_s(all.bytes) + 2 * m.message_s : 0;
    all.total_s = all.compute_s + all.transfer_s;
    return all;
  }
  if (step == "p5_ring_backward") return ring(zigzag, m, backward_ring(p, m));
  const double cut = largest_share(p, world);
  const int further = std::max(0, world - 2);
  const double message_s = m.message_s + further * m.next_message_s;
  const double reduce_s = m.message_s + further * m.reduce_hop_s;
  const bool all_reduce = p.own.contains("collective") && p.own.at("collective")[0] > 0;
  if (step == "p6_tree_decode")  // the second all-reduce begins when the first has ended
    return decode(p, world, m, cut, (all_reduce ? 2 * reduce_s : message_s) + m.launch_s);
  if (step == "p7_peer_decode") return decode(p, world, m, cut, m.peer_s);
  if (step == "p8_paged_shards") return decode(p, world, m, 1.0 / world, message_s + m.launch_s);
  return std::nullopt;
}

int64_t pays_from(const std::string& step, Problem p, const Machine& m) {
  constexpr int64_t kMost = int64_t{1} << 30;
  p.seqused_k.clear();
  const auto pays = [&](int64_t keys) {
    p.seqlen_k = keys;
    return predict(step, p, 2, m)->total_s < predict(step, p, 1, m)->total_s;
  };
  if (!pays(kMost)) return 0;
  int64_t no = 1, yes = kMost;
  while (yes - no > 1) (pays((no + yes) / 2) ? yes : no) = (no + yes) / 2;
  return yes;
}

int table(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv{chapter().name.c_str()};
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  const auto options = parse_options(chapter(), static_cast<int>(argv.size()), argv.data());
  if (!options) throw InputError("--predict-ranks: takes the options of a problem");
  const Problem& p = options->problem;
  fmt::print("prediction, not measured: {}\n", p.text());
  fmt::print("{:<18} {:<30} {:>5} {:>10} {:>11} {:>11} {:>11} {:>10}\n", "step", "link", "ranks",
             "tokens", "compute us", "transfer us", "total us", "efficiency");
  for (const Step& step : chapter().steps) {
    if (step.operation != options->operation || !takes(step, "devices")) continue;
    const bool by_peers = step.name == "p7_peer_decode";
    std::string refused;
    for (const Machine* m : {&nvlink_copies(), &nvlink_nccl(), &infiniband()}) {
      const auto one = predict(step.name, p, 1, *m);
      for (const int world : {2, 4, 8, 64, 512}) {
        if (world > p.seqlen_k || (world > 8) != (m == &infiniband())) continue;
        if (by_peers && m != &nvlink_copies()) continue;  // one process
        Problem on_ranks = p;
        std::vector<double>& devices = on_ranks.own["devices"];
        devices.resize(static_cast<std::size_t>(world));
        std::iota(devices.begin(), devices.end(), 0.0);
        if (const auto reason = refusal(step, on_ranks)) {
          if (refused.empty()) refused = fmt::format("{} ranks: {}", world, *reason);
          continue;
        }
        const auto some = predict(step.name, p, world, *m);
        if (!one || !some) continue;
        fmt::print("{:<18} {:<30} {:>5} {:>10} {:>11.1f} {:>11.1f} {:>11.1f} {:>9.1f}%\n",
                   step.name, by_peers ? "NVLink, writes to peers" : m->name, world,
                   p.seqlen_k / world, some->compute_s * 1e6, some->transfer_s * 1e6,
                   some->total_s * 1e6, 100 * one->total_s / some->total_s / world);
      }
    }
    if (!refused.empty()) fmt::print("{:<18} not for {}\n", step.name, refused);
    if (step.operation != &attn::decode()) continue;
    for (const Machine* m : {&nvlink_copies(), &nvlink_nccl()})
      if (const int64_t keys = pays_from(step.name, p, *m);
          keys > 0 && (!by_peers || m == &nvlink_copies()))
        fmt::print("{:<18} {:<30} two ranks pay from {} keys on\n", step.name,
                   by_peers ? "NVLink, writes to peers" : m->name, keys);
  }
  return 0;
}

bool Measured::is_predicted() const {
  const double off = std::abs(seconds - predicted_s);
  return seconds < 100e-6 ? off <= 5e-6 : off <= 0.15 * seconds;
}

namespace {
// "B=1 Hq=16 ... d=128 bf16 causal devices=0,1": what a prediction depends on.
Problem problem_of_text(const std::string& text) {
  Problem p;
  p.dtype = DType::bf16;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::size_t is = word.find('=');
    const std::string name = word.substr(0, is), value = is == word.npos ? "" : word.substr(is + 1);
    const auto number = [&] { return std::stoll(value); };
    if (name == "B") p.batch = number();
    if (name == "Hq") p.heads = number();
    if (name == "Hkv") p.kv_heads = number();
    if (name == "seqlen_q") p.seqlen_q = number();
    if (name == "seqlen_k") p.seqlen_k = number();
    if (name == "d") p.head_dim = number();
    if (name == "causal") p.causal = true;
    if (name == "seqused") {
      std::istringstream all(value);
      for (std::string one; std::getline(all, one, ',');) p.seqused_k.push_back(std::stoll(one));
    }
    if (name == "collective") p.own["collective"] = {double(number())};
  }
  p.finish();
  return p;
}
bool is_ring(const std::string& step) {
  return step == "p2_ring" || step == "p3_zigzag" || step == "p5_ring_backward";
}
}  // namespace

std::vector<Measured> read_measured(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw InputError(fmt::format("{}: cannot be read", file));
  std::vector<Measured> all;
  for (std::string line; std::getline(in, line);) {
    const auto j = nlohmann::json::parse(line, nullptr, false);
    if (j.is_discarded() || j.value("measure", "") != "ranks" || !j.contains("us")) continue;
    Measured m{.step = j.at("step"),
               .transport = j.at("transport"),
               .problem = problem_of_text(j.at("problem")),
               .devices = j.at("devices"),
               .seconds = j.at("us").get<double>() * 1e-6,
               .one_gpu_s = j.at("one_gpu_us").get<double>() * 1e-6,
               .overlap = j.at("overlap"),
               .predicted_s = 0};
    const auto predicted =
        predict(m.step, m.problem, static_cast<int>(m.devices.size()),
                with_memory_of(m.transport == "nccl" ? nvlink_nccl() : nvlink_copies(),
                               j.value("gpu", "")));
    m.predicted_s = predicted ? predicted->total_s : 0;
    all.push_back(std::move(m));
  }
  if (all.empty()) throw InputError(fmt::format("{}: has no line of --measure-ranks", file));
  return all;
}

int compare(const std::vector<std::string>& arguments) {
  if (arguments.size() != 1) throw InputError("--compare-ranks: takes one FILE");
  const auto us = [](double seconds) {
    return seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6)
                          : fmt::format("{:.2f} ms", seconds * 1e3);
  };
  std::size_t gpus = 0;
  for (const Measured& m : read_measured(arguments[0])) {
    if (m.devices.size() != gpus) {  // a table of its own
      fmt::print(
          "{}| step | link | tokens | heads | one GPU | {} GPUs | speedup | overlap | "
          "predicted |\n|---|---|---:|---|---:|---:|---:|---:|---:|\n",
          gpus > 0 ? "\n" : "", m.devices.size());
      gpus = m.devices.size();
    }
    const Problem& p = m.problem;
    const std::string what = p.own.contains("collective") ? ", all-reduce" : "";
    const std::string mask = p.seqlen_q == 1 ? "" : p.causal ? ", causal" : ", full";
    const double overlap = std::max(0.0, m.overlap);  // a rank may wait for one that has work
    const std::string lengths = p.seqused_k.empty() ? "" : fmt::format(", {} lengths", p.batch);
    fmt::print("| `{}`{} | {} | {}{}{} | {}/{} | {} | {} | {:.2f} | {} | {}{} |\n", m.step, what,
               m.step == "p7_peer_decode" ? "peers" : m.transport, p.seqlen_k, mask, lengths,
               p.heads, p.kv_heads, us(m.one_gpu_s), us(m.seconds), m.one_gpu_s / m.seconds,
               is_ring(m.step) ? fmt::format("{:.0f} %", 100 * overlap) : "-", us(m.predicted_s),
               m.is_predicted() ? "" : " *");
  }
  return 0;
}

}  // namespace attn::rank_model
