// b1_global: backward pass, one thread per element; P kept from the forward pass.
//
// parent    v2_coalesced (reads the P of its forward pass; same mapping of threads to elements)
// change    Five kernels: dV = P^T dO, dP = dO V^T, dS = scale * P (dP - D), dQ = dS K, and
//           dK = dS^T Q, where D = rowsum(P dP) = rowsum(dO O). P and dP are full matrices in
//           HBM.
// why       The gradients by the chain rule, as the formulas state them.
// expect    Four GEMMs of N^2 d instead of two. Training memory grows with N^2, because P stays in
//           HBM between the passes.
// supports  fp32, fp16, bf16; any lengths, head dims, masks, GQA
#include "attn/kernel.h"

namespace ATTN_BACKEND::b1_global {
using namespace attn;

struct Config {
  // threadIdx.x runs along the columns of the result, threadIdx.y along its rows.
  static constexpr int kThreadsX = 32, kThreadsY = 8;
};

// (1) dV = P^T dO, summed over the query heads of the group (GQA).
//! [dv]
template <class Element>
__global__ void dv_kernel(const float* gP,     // [B, Hq, seqlen_q, seqlen_k]
                          const Element* gdO,  // [B, Hq, seqlen_q, d]
                          Element* gdV,        // [B, Hkv, seqlen_k, d]
                          Shape shape) {
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;  // key index
  const int64_t bh_kv = blockIdx.z;
  const int group = shape.heads / shape.kv_heads;
  if (row >= shape.seqlen_k || col >= shape.head_dim) return;
  float sum = 0;
  for (int64_t bh = bh_kv * group; bh < (bh_kv + 1) * group; ++bh)
    for (int64_t i = bh * shape.seqlen_q; i < (bh + 1) * shape.seqlen_q; ++i)
      sum += gP[i * shape.seqlen_k + row] * to_float(gdO[i * shape.head_dim + col]);
  gdV[(bh_kv * shape.seqlen_k + row) * shape.head_dim + col] = from_float<Element>(sum);
}
//! [dv]

// (2) dP = dO V^T.
//! [dp]
template <class Element>
__global__ void dp_kernel(const Element* gdO,  // [B, Hq, seqlen_q, d]
                          const Element* gV,   // [B, Hkv, seqlen_k, d]
                          float* gdP,          // [B, Hq, seqlen_q, seqlen_k]
                          Shape shape) {
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  if (row >= shape.seqlen_q || col >= shape.seqlen_k) return;
  const Element* d_o = gdO + (bh * shape.seqlen_q + row) * shape.head_dim;  // [d]
  const Element* v = gV + (bh_kv * shape.seqlen_k + col) * shape.head_dim;  // [d]
  float dot = 0;
  for (int c = 0; c < shape.head_dim; ++c) dot += to_float(d_o[c]) * to_float(v[c]);
  gdP[(bh * shape.seqlen_q + row) * shape.seqlen_k + col] = dot;
}
//! [dp]

// (3) dS = scale * P (dP - D), written over dP; one thread per row. P is 0 at masked keys, so dS is
// 0 there, too.
//! [ds]
__global__ void ds_kernel(const float* gP,  // [B, Hq, seqlen_q, seqlen_k]
                          float* gdS,  // [B, Hq, seqlen_q, seqlen_k]; in: dP, out: dS
                          Shape shape) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t bh = blockIdx.z;
  if (row >= shape.seqlen_q) return;
  const float* p = gP + (bh * shape.seqlen_q + row) * shape.seqlen_k;  // [seqlen_k]
  float* ds = gdS + (bh * shape.seqlen_q + row) * shape.seqlen_k;      // [seqlen_k]
  float row_d = 0;
  for (int j = 0; j < shape.seqlen_k; ++j) row_d += p[j] * ds[j];
  for (int j = 0; j < shape.seqlen_k; ++j) ds[j] = shape.softmax_scale * p[j] * (ds[j] - row_d);
}
//! [ds]

// (4) dQ = dS K.
//! [dq]
template <class Element>
__global__ void dq_kernel(const float* gdS,   // [B, Hq, seqlen_q, seqlen_k]
                          const Element* gK,  // [B, Hkv, seqlen_k, d]
                          Element* gdQ,       // [B, Hq, seqlen_q, d]
                          Shape shape) {
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;
  const int64_t bh = blockIdx.z;
  const int64_t bh_kv = bh / (shape.heads / shape.kv_heads);
  if (row >= shape.seqlen_q || col >= shape.head_dim) return;
  const float* ds = gdS + (bh * shape.seqlen_q + row) * shape.seqlen_k;   // [seqlen_k]
  // a column of [seqlen_k, d]
  const Element* k = gK + bh_kv * shape.seqlen_k * shape.head_dim + col;
  float sum = 0;
  for (int j = 0; j < shape.seqlen_k; ++j) sum += ds[j] * to_float(k[int64_t{j} * shape.head_dim]);
  gdQ[(bh * shape.seqlen_q + row) * shape.head_dim + col] = from_float<Element>(sum);
}
//! [dq]

// (5) dK = dS^T Q, summed over the query heads of the group (GQA).
//! [dk]
template <class Element>
__global__ void dk_kernel(const float* gdS,   // [B, Hq, seqlen_q, seqlen_k]
                          const Element* gQ,  // [B, Hq, seqlen_q, d]
                          Element* gdK,       // [B, Hkv, seqlen_k, d]
                          Shape shape) {
  const int col = blockIdx.x * Config::kThreadsX + threadIdx.x;
  const int row = blockIdx.y * Config::kThreadsY + threadIdx.y;  // key index
  const int64_t bh_kv = blockIdx.z;
  const int group = shape.heads / shape.kv_heads;
  if (row >= shape.seqlen_k || col >= shape.head_dim) return;
  float sum = 0;
  for (int64_t bh = bh_kv * group; bh < (bh_kv + 1) * group; ++bh)
    for (int64_t i = bh * shape.seqlen_q; i < (bh + 1) * shape.seqlen_q; ++i)
      sum += gdS[i * shape.seqlen_k + row] * to_float(gQ[i * shape.head_dim + col]);
  gdK[(bh_kv * shape.seqlen_k + row) * shape.head_dim + col] = from_float<Element>(sum);
}
//! [dk]

template <class Element>
Status launch(const Arguments& args) {
  const BackwardParams<Element> params(args);
  const Shape shape = shape_of(args.problem);
  const auto heads = static_cast<unsigned>(args.problem.batch * args.problem.heads);
  const auto kv_heads = static_cast<unsigned>(args.problem.batch * args.problem.kv_heads);
  const dim3 block(Config::kThreadsX, Config::kThreadsY);
  const auto across = [](int n) { return static_cast<unsigned>(ceil_div(n, Config::kThreadsX)); };
  const auto down = [](int n) { return static_cast<unsigned>(ceil_div(n, Config::kThreadsY)); };
  const auto run = [&](const char* phase, auto kernel, dim3 grid, dim3 threads, auto... arguments) {
    args.phase(phase);
    return launch_kernel(kernel, grid, threads, 0, args.stream, arguments..., shape);
  };
  const float* gP = args.in<float>("P");
  float* gdS = args.out<float>("dP");  // dP, then dS

  Status status =
      run("dv", dv_kernel<Element>, dim3(across(shape.head_dim), down(shape.seqlen_k), kv_heads),
          block, gP, params.dout, params.dv);
  if (status.ok())
    status =
        run("dp", dp_kernel<Element>, dim3(across(shape.seqlen_k), down(shape.seqlen_q), heads),
            block, params.dout, params.v, gdS);
  if (status.ok())
    status = run("ds", ds_kernel, dim3(across(shape.seqlen_q), 1, heads), dim3(Config::kThreadsX),
                 gP, gdS);
  if (status.ok())
    status =
        run("dq", dq_kernel<Element>, dim3(across(shape.head_dim), down(shape.seqlen_q), heads),
            block, gdS, params.k, params.dq);
  if (status.ok())
    status =
        run("dk", dk_kernel<Element>, dim3(across(shape.head_dim), down(shape.seqlen_k), kv_heads),
            block, gdS, params.q, params.dk);
  return status;
}

Status launch(const Arguments& args) {
  return dispatch_dtype(args.problem.dtype,
                        [&]<class Element>() { return launch<Element>(args); });
}

}  // namespace ATTN_BACKEND::b1_global
