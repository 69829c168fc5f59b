// p5_ring_backward: K and V go around the ring; their gradients follow one hop behind.
//
// parent    06_flash_v3_hopper/b7_dependent_launches
// change    The parent's backward pass on each pair of parts of p3's order, with the lse and O of
//           all ranks. dK and dV in fp32 go to the next rank when this rank has added its share,
//           and arrive at their owner after one hop less than there are ranks. A rank's own keys
//           come first, while K and V travel, except for one pair of parts, which comes last, while
//           gradients return. dQ stays, in fp32.
// why       With the lse of its own keys alone a rank's P would not be that of the whole softmax.
//           Gradients travel while the first pair of the next hop is computed, the last ones next
//           to the pair that was left for the end.
// expect    time: near compute alone, as p3_zigzag; three times its bytes per hop
// supports  fp16, bf16; head dims 64, 128; equal lengths of Q and K, causal, GQA; no windows
// source    zhuzilin/ring-flash-attention; Liu, Zaharia, Abbeel (arXiv 2310.01889)
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attn/kernel.h"
#include "ranks/sharded.h"

// Chapter 06's b7, which this program is linked with.
namespace ATTN_BACKEND::b7_dependent_launches {
attn::Status launch(const attn::Arguments&);
}

namespace ATTN_BACKEND::p5_ring_backward {
using namespace attn;
using namespace attn::ranks;

constexpr int kVector = 8;  // elements per thread and turn: a 16-byte load of 16-bit types
template <class T>
struct alignas(16) Vector {
  T at[kVector];
};

// out = a + b. A null a or b counts as 0.
template <class Out, class A, class B>
__global__ void add_kernel(Out* gOut, const A* gA, const B* gB, int64_t count) {
  for (int64_t n = kVector * (int64_t{blockIdx.x} * blockDim.x + threadIdx.x); n < count;
       n += kVector * int64_t{gridDim.x} * blockDim.x) {
    Vector<A> a{};
    Vector<B> b{};
    Vector<Out> out;
    if (gA != nullptr) a = *reinterpret_cast<const Vector<A>*>(gA + n);
    if (gB != nullptr) b = *reinterpret_cast<const Vector<B>*>(gB + n);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      out.at[i] = from_float<Out>(to_float(a.at[i]) + to_float(b.at[i]));
    *reinterpret_cast<Vector<Out>*>(gOut + n) = out;
  }
}
// Rows of a head dim that is a multiple of 64: `count` is a multiple of kVector.
template <class Out, class A, class B>
void add(const ForwardShard& s, const char* what, Out* out, const A* a, const B* b, int64_t count) {
  if (count == 0) return;
  s.rank.compute(what, [=](Stream stream) {
    const int64_t blocks = std::clamp<int64_t>(ceil_div(count, 256 * kVector), 1, 1024);
    return launch_kernel(add_kernel<Out, A, B>, dim3(static_cast<unsigned>(blocks)), dim3(256), 0,
                         stream, out, a, b, count);
  });
}

// One part of queries and one of keys, as a problem of its own.
Problem problem_of_parts(const Problem& whole, const Part& q, const Part& k) {
  Problem p = whole;
  p.own.clear();
  p.seqlen_q = q.count, p.seqlen_k = k.count;
  p.causal = whole.causal && q.first == k.first;
  p.finish();
  return p;
}
// A part of this rank's queries and one of a rank's keys, by number.
struct Pair {
  std::size_t q, k;
};
std::vector<Pair> visible_pairs(const Sharding& s, int rank, int owner) {
  std::vector<Pair> pairs;
  const auto &queries = s.q[static_cast<std::size_t>(rank)],
             &keys = s.k[static_cast<std::size_t>(owner)];
  for (std::size_t k = 0; k < keys.size(); ++k)
    for (std::size_t q = 0; q < queries.size(); ++q)
      if (queries[q].count > 0 && keys[k].count > 0 &&
          !(s.whole.causal && keys[k].first > queries[q].first))
        pairs.push_back({q, k});
  return pairs;
}
int64_t elements_of_kv(const Sharding& s, int rank) {
  return s.kv_bytes(rank) / size_of(s.whole.dtype);
}

void prepare(const ForwardShard& s) {
  const Problem& p = s.sharding.whole;
  Part longest;
  for (const auto& parts : s.sharding.q)
    for (const Part& part : parts) longest.count = std::max(longest.count, part.count);
  for (const Workspace& w : workspaces_of_backward(problem_of_parts(p, longest, longest)))
    s.rank.allocate(w.name, w.bytes);
  const int64_t row = bytes_of(p.dtype, p.head_dim), rows = p.batch * longest.count;
  s.rank.allocate("dq_part", rows * p.heads * row);
  for (const char* name : {"dk_part", "dv_part"}) s.rank.allocate(name, rows * p.kv_heads * row);
  for (const char* name : {"dq_sum0", "dq_sum1"})
    s.rank.allocate(name, rows * p.heads * p.head_dim * 4);
  for (const char* name : {"kv_0", "kv_1"}) s.rank.allocate(name, s.sharding.kv_bytes_of_largest());
  for (const char* name : {"dkv_own", "dkv_0", "dkv_1"})
    s.rank.allocate(name, s.sharding.kv_bytes_of_largest() / size_of(p.dtype) * 4);
}

// The gradients of one rank's queries.
template <class Element>
class Gradients {
 public:
  explicit Gradients(const ForwardShard& s) : s_(s) {
    for (int owner = 0; owner < s.rank.world(); ++owner)
      for (const Pair& pair : visible_pairs(s.sharding, s.rank.index(), owner)) ++left_[pair.q];
  }

  // Adds the share of these pairs to dK and dV of the owner's keys, and to dQ. `fresh`, by part of
  // the keys: nothing was added to dK and dV before. `arrived`: the exchange that brings dK and dV,
  // awaited when the first pair has been computed.
  void add_pairs(int owner, const std::vector<Pair>& pairs, const std::byte* kv, float* dkv,
                 std::vector<bool>& fresh, std::optional<Ticket> arrived = {}) {
    const Problem& whole = s_.sharding.whole;
    const std::vector<Part>& parts = s_.sharding.k[static_cast<std::size_t>(owner)];
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const int64_t of_k = whole.batch * whole.kv_heads * parts[k].count * whole.head_dim;
      for (const Pair& pair : pairs) {
        if (pair.k != k) continue;
        const int64_t of_q = launch_pair(parts[k], pair.q, kv, of_k);
        const std::string number = std::to_string(pair.q);
        auto* const sum = static_cast<float*>(s_.rank.buffer("dq_sum" + number));
        const float* const before = std::exchange(dq_fresh_[pair.q], false) ? nullptr : sum;
        const auto* const part = element("dq_part");
        if (--left_[pair.q] > 0)
          add(s_, "add", sum, before, part, of_q);
        else
          add(s_, "add", element("dq" + number), before, part, of_q);
        if (arrived) s_.rank.wait(*std::exchange(arrived, std::nullopt));
        const bool first = fresh[k];
        fresh[k] = false;
        add(s_, "add", dkv, first ? nullptr : dkv, element("dk_part"), of_k);
        add(s_, "add", dkv + of_k, first ? nullptr : dkv + of_k, element("dv_part"), of_k);
      }
      kv += 2 * of_k * size_of(whole.dtype), dkv += 2 * of_k;
    }
    if (arrived) s_.rank.wait(*arrived);  // no pair is visible
  }
  // Parts of the keys that no query of this rank sees.
  void clear_fresh(int owner, float* dkv, const std::vector<bool>& fresh) const {
    const Problem& whole = s_.sharding.whole;
    const std::vector<Part>& parts = s_.sharding.k[static_cast<std::size_t>(owner)];
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const int64_t of_kv = 2 * whole.batch * whole.kv_heads * parts[k].count * whole.head_dim;
      if (fresh[k]) add<float, float, float>(s_, "clear", dkv, nullptr, nullptr, of_kv);
      dkv += of_kv;
    }
  }
  Element* element(const std::string& buffer) const {
    return static_cast<Element*>(s_.rank.buffer(buffer));
  }

 private:
  // Returns the number of elements of dq_part.
  int64_t launch_pair(const Part& keys, std::size_t q, const std::byte* kv, int64_t of_k) const {
    const Problem& whole = s_.sharding.whole;
    Rank& rank = s_.rank;
    const Part& queries = s_.sharding.q[static_cast<std::size_t>(rank.index())][q];
    const std::string number = std::to_string(q);
    const Problem p = problem_of_parts(whole, queries, keys);
    std::vector<std::pair<std::string, const void*>> pointers{
        {"k", kv}, {"v", kv + of_k * size_of(whole.dtype)}};
    for (const char* name : {"q", "o", "do", "lse"})
      pointers.emplace_back(name, rank.buffer(name + number));
    for (const char* name : {"dq", "dk", "dv"})
      pointers.emplace_back(name, rank.buffer(std::string(name) + "_part"));
    for (const Workspace& w : workspaces_of_backward(p))
      pointers.emplace_back(w.name, rank.buffer(w.name));
    rank.compute("backward", [=, device = rank.device()](Stream stream) {
      Arguments args(p, device);
      args.stream = stream;
      for (const auto& [name, at] : pointers) args.bind(name, const_cast<void*>(at));
      return b7_dependent_launches::launch(args);
    });
    return whole.batch * whole.heads * queries.count * whole.head_dim;
  }

  const ForwardShard& s_;
  int left_[2] = {};                 // pairs to come, by part of the queries
  bool dq_fresh_[2] = {true, true};  // nothing has been added
};

//! [ring]
template <class Element>
void run(const ForwardShard& s) {
  Rank& rank = s.rank;
  const std::vector<int> owners = ring_order(rank.index(), rank.world());
  const auto buffer = [&](const char* name, std::size_t n) {
    return static_cast<std::byte*>(rank.buffer(name + std::to_string(n % 2)));
  };
  const auto floats = [&](int owner) { return elements_of_kv(s.sharding, owner) * 4; };
  Gradients<Element> gradients(s);
  // The rank computes the last pair of its own keys, the late ones, while gradients return.
  std::vector<Pair> own = visible_pairs(s.sharding, rank.index(), rank.index()), last;
  if (!own.empty()) last.push_back(own.back()), own.pop_back();
  const auto* const own_kv = static_cast<const std::byte*>(rank.buffer("kv"));
  auto* const own_dkv = static_cast<float*>(rank.buffer("dkv_own"));
  std::vector<bool> own_fresh(2, true);

  const std::byte* kv = own_kv;
  Ticket arrived = 0;
  for (std::size_t hop = 0; hop < owners.size(); ++hop) {
    const std::string number = std::to_string(hop);
    const int owner = owners[hop];
    const bool more = hop + 1 < owners.size();
    Ticket keys = 0;
    if (more)
      keys = rank.exchange("hop " + number, {send_to(rank.next(), kv, s.sharding.kv_bytes(owner)),
                                             receive_from(rank.previous(), buffer("kv_", hop),
                                                          s.sharding.kv_bytes(owners[hop + 1]))});
    if (hop == 0) {
      gradients.add_pairs(owner, own, kv, own_dkv, own_fresh);
    } else {
      // From hop 2 on the gradients of the ranks before are under way.
      const auto under_way = hop > 1 ? std::optional(arrived) : std::nullopt;
      auto* const dkv = reinterpret_cast<float*>(buffer("dkv_", hop));
      std::vector<bool> fresh(2, hop == 1);
      gradients.add_pairs(owner, visible_pairs(s.sharding, rank.index(), owner), kv, dkv, fresh,
                          under_way);
      gradients.clear_fresh(owner, dkv, fresh);
      // After the last hop the gradients are at home.
      const int then = owners[(hop + 1) % owners.size()];
      arrived =
          rank.exchange("gradients of hop " + number,
                        {send_to(rank.next(), dkv, floats(owner)),
                         receive_from(rank.previous(), buffer("dkv_", hop + 1), floats(then))});
    }
    if (more) rank.wait(keys), kv = buffer("kv_", hop);
  }
  gradients.add_pairs(rank.index(), last, own_kv, own_dkv, own_fresh);
  if (rank.world() > 1) rank.wait(arrived);
  const auto* const from_others =
      rank.world() > 1 ? reinterpret_cast<const float*>(buffer("dkv_", owners.size())) : nullptr;
  add(s, "round", gradients.element("dkv"), own_dkv, from_others,
      elements_of_kv(s.sharding, rank.index()));
}
//! [ring]

// The denominator of measurements: all of the problem on one GPU, without ranks.
Status one_gpu(const Arguments& args) { return b7_dependent_launches::launch(args); }

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    return run_backward(args, TokenOrder::zigzag, {prepare, run<Element>});
  });
}

}  // namespace ATTN_BACKEND::p5_ring_backward
