/// \file
/// libattention: the reference, the checker, the cost model and the timer of the suite, for kernels
/// of one's own. Memory is the host's; no function here needs a GPU except attn_time.
#ifndef ATTN_ATTENTION_CHECK_H
#define ATTN_ATTENTION_CHECK_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Tensors of attn_reference, contiguous: q, o, dout, dq [B, Hq, Nq, d], k, v, dk, dv
    [B, Hkv, Nk, d], lse [B, Hq, Nq]; packed: [total_q, Hq, d], [total_k, Hkv, d], [Hq, total_q]. */
typedef struct attn_doubles {
  size_t size;                    /**< sizeof(attn_doubles) */
  const double *q, *k, *v, *dout; /**< dout: only for gradients */
  const float* alibi;             /**< [Hq], if the problem has it */
  double *o, *lse, *dq, *dk, *dv; /**< outputs; those that are null are not computed */
} attn_doubles;

/** Attention by the textbook formula in double precision, with Eigen: forward, and backward if dq,
    dk or dv is given. `backend`, `dtype`, `step` and pages of the problem are ignored. Lengths are
    on the host: lengths_k without `packed` are the valid keys of each sequence. */
ATTN_API attn_status attn_reference(const attn_problem* problem, const attn_doubles* tensors);

/** Inputs of an operation, drawn, and what its outputs must be. */
typedef struct attn_check attn_check;

/** Draws inputs. `inputs` is random, needle, peaked or outlier. For backward, o and lse are inputs
    too, rounded from the reference. `step` may be null; a step's tiles help to describe failures.
    */
ATTN_API attn_status attn_check_begin(const char* operation, const attn_problem* problem,
                                      const char* inputs, uint64_t seed, attn_check** check);
/** A line per tensor, "in q bf16 1 2 128 64" or "out lse fp32 1 2 128"; valid as long as `check`.
    */
ATTN_API const char* attn_check_tensors(const attn_check* check);
/** Writes an input to `data`, in its element type. An in-out tensor is an input, too. */
ATTN_API attn_status attn_check_input(const attn_check* check, const char* name, void* data,
                                      size_t bytes);
/** Compares an output with the reference. `pass` becomes 0 or 1; `text` is a line for a correct
    tensor, or several that describe the failure: the first wrong element, and the pattern. */
ATTN_API attn_status attn_check_output(const attn_check* check, const char* name, const void* data,
                                       size_t bytes, int* pass, char* text, size_t text_bytes,
                                       size_t* needed);
ATTN_API void attn_check_end(attn_check* check);

/** The cost model of the problem's step (null: the best one) as JSON: operations and bytes per
    phase (null: not modelled), and the roofline time by the datasheet of `gpu`: a name such as
    "h200"; null: this machine's, or h200. */
ATTN_API attn_status attn_cost(const char* operation, const attn_problem* problem, const char* gpu,
                               char* text, size_t bytes, size_t* needed);

/** Times one call of `launch`, which must queue its work in `stream` and return 0: L2 is
    overwritten, the GPU spins while the host queues, and CUDA events enclose the work. `hidden`
    (may be null) is 0 if the host was slower than the longest spin: then its time is included. */
ATTN_API attn_status attn_time(int (*launch)(void* user), void* user, void* stream, double* seconds,
                               int* hidden);

#ifdef __cplusplus
}
#endif
#endif  // ATTN_ATTENTION_CHECK_H
