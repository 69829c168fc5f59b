// p5_ring_backward: K and V go around the ring; their gradients follow one hop behind.
//
// parent    06_flash_v3_hopper/b7_dependent_launches
// change    The parent's backward pass on each pair of parts of p3's order, with the lse and O of
//           all ranks. dK and dV in fp32 go to the next rank when this rank has added its share,
//           and arrive at their owner after as many hops as there are ranks. dQ stays, in fp32.
// why       With the lse of its own keys alone a rank's P would not be that of the whole softmax.
//           Gradients travel while the next hop is computed.
// expect    time: near compute alone, as p3_zigzag; three times its bytes per hop
// supports  fp16, bf16; head dims 64, 128; equal lengths of Q and K, causal, GQA; no windows
// source    zhuzilin/ring-flash-attention; Liu, Zaharia, Abbeel (arXiv 2310.01889)
#include <algorithm>
#include <string>

#include "attn/kernel.h"
#include "ranks/sharded.h"

// Chapter 06's last backward step, which this program is linked with.
namespace ATTN_BACKEND::b7_dependent_launches {
attn::Status launch(const attn::Arguments&);
}

namespace ATTN_BACKEND::p5_ring_backward {
using namespace attn;
using namespace attn::ranks;

// sum += x, or sum = x; and out = sum in 16 bits.
template <class Element>
__global__ void add_kernel(float* gSum, const Element* gX, int64_t count, bool fresh) {
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < count;
       n += int64_t{gridDim.x} * blockDim.x)
    gSum[n] = (fresh ? 0 : gSum[n]) + to_float(gX[n]);
}
template <class Element>
__global__ void round_kernel(Element* gOut, const float* gSum, int64_t count) {
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < count;
       n += int64_t{gridDim.x} * blockDim.x)
    gOut[n] = from_float<Element>(gSum[n]);
}
dim3 grid_of(int64_t count) {
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(ceil_div(count, 256), 1, 1024)));
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
int64_t floats_of(const Sharding& s, int rank) { return s.kv_bytes(rank) / size_of(s.whole.dtype); }

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
  for (const char* name : {"dkv_0", "dkv_1"})
    s.rank.allocate(name, s.sharding.kv_bytes_of_largest() / size_of(p.dtype) * 4);
}

// Adds the share of this rank to dK and dV of a rank's keys, and that of its keys to dQ.
template <class Element>
void add_gradients(const ForwardShard& s, int owner, const std::byte* kv, float* dkv, bool first,
                   bool (&dq_fresh)[2]) {
  const Problem& whole = s.sharding.whole;
  Rank& rank = s.rank;
  const auto r = static_cast<std::size_t>(rank.index());
  const auto add = [&](float* sum, const char* part, int64_t count, bool fresh) {
    const auto* const x = static_cast<const Element*>(rank.buffer(part));
    rank.compute("add", [=](Stream stream) {
      return launch_kernel(add_kernel<Element>, grid_of(count), dim3(256), 0, stream, sum, x, count,
                           fresh);
    });
  };
  for (const Part& keys : s.sharding.k[static_cast<std::size_t>(owner)]) {
    const int64_t of_k = whole.batch * whole.kv_heads * keys.count * whole.head_dim;
    bool fresh = first;
    for (std::size_t n = 0; n < s.sharding.q[r].size(); ++n) {
      const Part& queries = s.sharding.q[r][n];
      if (queries.count == 0 || keys.count == 0) continue;
      if (whole.causal && keys.first > queries.first) continue;
      const std::string number = std::to_string(n);
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
      add(static_cast<float*>(rank.buffer("dq_sum" + number)), "dq_part",
          whole.batch * whole.heads * queries.count * whole.head_dim, dq_fresh[n]);
      dq_fresh[n] = false;
      add(dkv, "dk_part", of_k, fresh), add(dkv + of_k, "dv_part", of_k, fresh);
      fresh = false;
    }
    kv += 2 * of_k * size_of(whole.dtype), dkv += 2 * of_k;
  }
}

//! [ring]
template <class Element>
void run(const ForwardShard& s) {
  Rank& rank = s.rank;
  const std::vector<int> owners = ring_order(rank.index(), rank.world());
  const auto buffer = [&](const char* name, std::size_t n) {
    return static_cast<std::byte*>(rank.buffer(name + std::to_string(n % 2)));
  };
  const auto* kv = static_cast<const std::byte*>(rank.buffer("kv"));
  Ticket gradients = 0;
  bool dq_fresh[2] = {true, true};  // by part of the queries: nothing has been added
  for (std::size_t hop = 0; hop < owners.size(); ++hop) {
    const std::string number = std::to_string(hop);
    const bool more = hop + 1 < owners.size();
    Ticket keys = 0;
    if (more)
      keys = rank.exchange("hop " + number,
                           {send_to(rank.next(), kv, s.sharding.kv_bytes(owners[hop])),
                            receive_from(rank.previous(), buffer("kv_", hop),
                                         s.sharding.kv_bytes(owners[hop + 1]))});
    if (hop > 0) rank.wait(gradients);  // of these keys, from the ranks before
    auto* const dkv = reinterpret_cast<float*>(buffer("dkv_", hop));
    add_gradients<Element>(s, owners[hop], kv, dkv, hop == 0, dq_fresh);
    // After the last hop the gradients are at home.
    const int then = owners[(hop + 1) % owners.size()];
    gradients = rank.exchange(
        "gradients of hop " + number,
        {send_to(rank.next(), dkv, floats_of(s.sharding, owners[hop]) * 4),
         receive_from(rank.previous(), buffer("dkv_", hop + 1), floats_of(s.sharding, then) * 4)});
    if (more) rank.wait(keys), kv = buffer("kv_", hop);
  }
  rank.wait(gradients);
  //! [ring]
  const auto round = [&](const std::string& to, const std::byte* sum, int64_t count) {
    if (count == 0) return;
    rank.compute("round", [=, out = static_cast<Element*>(rank.buffer(to))](Stream stream) {
      return launch_kernel(round_kernel<Element>, grid_of(count), dim3(256), 0, stream, out,
                           reinterpret_cast<const float*>(sum), count);
    });
  };
  round("dkv", buffer("dkv_", owners.size()), floats_of(s.sharding, rank.index()));
  const Problem& p = s.sharding.whole;
  for (std::size_t n = 0; n < s.sharding.q[static_cast<std::size_t>(rank.index())].size(); ++n)
    round("dq" + std::to_string(n), buffer("dq_sum", n),
          p.batch * p.heads * p.head_dim *
              s.sharding.q[static_cast<std::size_t>(rank.index())][n].count);
}

// The denominator of measurements: all of the problem on one GPU, without ranks.
Status one_gpu(const Arguments& args) { return b7_dependent_launches::launch(args); }

Status launch(const Arguments& args) {
  return dispatch_16bit(args.problem.dtype, [&]<class Element>() {
    return run_backward(args, TokenOrder::zigzag, {prepare, run<Element>});
  });
}

}  // namespace ATTN_BACKEND::p5_ring_backward
