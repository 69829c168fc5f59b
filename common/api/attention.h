/// \file
/// libattention: the attention kernels of all chapters as functions, on the GPU and in the
/// emulator.
///
/// This header is C; a small C++ layer follows at the end. Every call works on raw device pointers
/// (host pointers for the emulator) and a stream. Only attn_allocate allocates device memory, no
/// call ends the program, and attn_run never synchronises; attn_prepare may block the host while it
/// copies a schedule. A call that fails returns a code and leaves one line in attn_last_error():
/// what is wrong, where, and what is accepted. A refused call (INVALID_VALUE, UNSUPPORTED,
/// WORKSPACE) launches nothing; after DEVICE_ERROR or KERNEL_ERROR outputs and workspace are
/// undefined. Errors of kernels that run asynchronously are reported by later calls of CUDA.
///
/// The order of calls, each of which may be repeated:
///
///     attn_problem p;  attn_problem_defaults(&p);  p.batch = 2; ...
///     attn_plan* plan;
///     attn_forward_plan(&p, &plan);                    // chooses the step, works out sizes
///     workspace = ... attn_plan_workspace_bytes(plan) bytes of device memory ...
///     attn_prepare(plan, &t, workspace, bytes, stream);  // once for each workspace
///     attn_run(plan, &t, workspace, bytes, stream);      // may be captured in a CUDA graph
///     attn_plan_destroy(plan);
///
/// or attn_forward(&p, &t, workspace, bytes, stream), which does all of it. Only attn_run may be
/// captured in a CUDA graph: the others copy from host memory that does not outlive the plan.
#ifndef ATTN_ATTENTION_H
#define ATTN_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ATTN_API __attribute__((visibility("default")))
#else
#define ATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum attn_status {
  ATTN_OK = 0,
  ATTN_INVALID_VALUE = 1, /**< a null pointer, a shape, a stride, an alignment, an unknown name */
  ATTN_UNSUPPORTED = 2,   /**< no step, or not the named one, takes the problem on this device */
  ATTN_WORKSPACE = 3,     /**< the workspace is too small, or was not prepared */
  ATTN_DEVICE_ERROR = 4,  /**< no GPU, another GPU than the plan's, or an error of CUDA */
  ATTN_KERNEL_ERROR = 5,  /**< the emulator found an error of a kernel */
  ATTN_INTERNAL_ERROR = 6
} attn_status;

typedef enum attn_backend { ATTN_GPU = 0, ATTN_EMULATED = 1 } attn_backend;

/** The last three: Q, K, V and O are bf16, and the step quantises Q, K and V to this type. */
typedef enum attn_dtype {
  ATTN_BF16 = 0,
  ATTN_FP16 = 1,
  ATTN_FP32 = 2,
  ATTN_INT8 = 3,
  ATTN_E4M3 = 4,
  ATTN_INT4 = 5
} attn_dtype;

/** A problem: everything that a launch depends on except addresses and the contents of tensors. */
typedef struct attn_problem {
  size_t size;      /**< sizeof(attn_problem), set by attn_problem_defaults */
  int32_t backend;  /**< attn_backend */
  int32_t dtype;    /**< attn_dtype */
  const char* step; /**< "06_flash_v3_hopper/v14_tuned"; null: the best one (attn_which) */
  int64_t batch;    /**< B, the number of sequences */
  int64_t heads;    /**< Hq, a multiple of kv_heads */
  int64_t kv_heads; /**< Hkv */
  int64_t seqlen_q; /**< queries per sequence; of the longest if `packed` */
  int64_t seqlen_k; /**< keys per sequence, or room for them; of the longest if `packed` */
  int64_t head_dim; /**< d */
  int32_t causal;   /**< 1: key j is visible to query i if j <= i + Nk - Nq, lengths of this
                         sequence (seqused_k, cu_seqlens, or seqlen) */
  int64_t window_left, window_right; /**< visible keys on each side of the diagonal; -1: no limit */
  double softmax_scale;              /**< 0: 1 / sqrt(head_dim) */
  double softcap;                    /**< scores become softcap * tanh(score / softcap); 0: off */
  int32_t alibi;                     /**< 1: attn_tensors::alibi has a slope per query head */
  double dropout;                    /**< fraction of P set to 0, rounded to 1/256 (forward,
                                          backward) */
  uint64_t seed;                     /**< which elements: equal in forward and backward */
  int32_t sinks;                     /**< 1: attn_tensors::sinks has a logit per query head
                                          (paged_decode) */

  /** Sequences of different lengths without padding (forward, backward, paged prefill): Q is
     [total_q, Hq, d], K and V are [total_k, Hkv, d], lse is [Hq, total_q]; cu_seqlens_q and
     cu_seqlens_k in attn_tensors say where sequences begin. */
  int32_t packed;
  int64_t total_q, total_k; /**< tokens of all sequences; not needed with lengths on the host */
  /** Lengths on the host, [batch], as at the time of the plan; null: they are on the device alone,
     and bounds come from seqlen_q, seqlen_k, total_q and total_k. Read by *_plan, not kept. Steps
     that schedule on the host need them. lengths_k are those in seqused_k, for decode and pages. */
  const int64_t *lengths_q, *lengths_k;

  int64_t page_size, num_pages, max_pages; /**< paged operations: tokens per page, pages of the
                                              pool, columns of the page table; seqlen_k is
                                              ignored, page_size * max_pages is used */
  /** The page table on the host, [batch, max_pages], as at the time of the plan; may be null. Steps
     that read a shared prefix once need it. */
  const int32_t* host_page_table;

  /** Sparse masks of forward, for steps of chapter 08; on the host, as at the time of the plan.
     Read by *_plan, not kept. At most one of the three; null: none. mask_batch is 1 or batch,
     mask_heads 1 or heads: 1 is one mask for all.
     A block mask [mask_batch, mask_heads, ceil(seqlen_q / block_m), ceil(seqlen_k / block_n)]: 1 if
     block_m queries attend to block_n keys, 0 if not.
     Column intervals [mask_batch, mask_heads, mask_intervals, seqlen_k] (FlashMask): queries from
     hidden_begin to hidden_end - 1 do not attend to the key. mask_intervals is 1 or 2.
     Sliding tile windows [mask_heads, 3] (Sliding Tile Attention) over a canvas of tokens (time,
     height, width) that are stored tile by tile; the tokens after it are text, which attends to all
     tokens and all attend to. canvas, tile and tile_windows are in tokens. */
  const uint8_t* block_mask;
  const int32_t *hidden_begin, *hidden_end;
  const int64_t* tile_windows;
  int64_t block_m, block_n, mask_intervals, mask_batch, mask_heads, canvas[3], tile[3];
  /** 1: tensors with strides, or not aligned to 16 bytes, are copied to and from the workspace.
     0: they are refused. */
  int32_t copy_strided;
  /** 1: only steps whose outputs are bitwise equal from run to run (attn_describe). */
  int64_t deterministic;
} attn_problem;

/** [B, H, N, d] with the last dimension contiguous; strides in elements. All 0: contiguous. For
    [B, N, H, d] stride_batch = N H d, stride_head = d, stride_row = H d. Packed tensors
    [tokens, H, d] have stride_head and stride_row; page pools [num_pages, page_size, Hkv, d] have
    none. */
typedef struct attn_tensor {
  void* data;
  int64_t stride_batch, stride_head, stride_row;
} attn_tensor;

/** The tensors of a call. Those that an operation does not have are ignored; all others must be
    given. Outputs are overwritten. Fully masked rows: O = 0, lse = -inf, dQ = 0.
    | operation | reads | writes |
    |---|---|---|
    | forward, quantised_forward | q k v | o lse |
    | backward | q k v o lse dout | dq dk dv |
    | decode | q k v seqused_k | o lse |
    | paged_decode, paged_prefill | q k v (pages) page_table seqused_k | o lse |
    | paged_append | k_new v_new page_table seqused_k | k v (pages) |
    paged_append stores the last seqlen_q of the seqused_k tokens of each sequence, from k_new and
    v_new [B seqlen_q, Hkv, d]. paged_decode with head_dim 576 and kv_heads 1 is latent attention
    (MLA): v is not read, the first 512 columns of k are V, and o is [B, Hq, Nq, 512]. */
typedef struct attn_tensors {
  size_t size; /**< sizeof(attn_tensors) */
  attn_tensor q, k, v, o;
  attn_tensor dout, dq, dk, dv;
  attn_tensor k_new, v_new;
  float* lse;                  /**< [B, Hq, Nq], natural logarithm */
  const float* alibi;          /**< [Hq] */
  const float* sinks;          /**< [Hq], -inf for a head without one */
  const int32_t* cu_seqlens_q; /**< [B + 1] */
  const int32_t* cu_seqlens_k; /**< [B + 1] */
  const int32_t* seqused_k;    /**< [B], each at most seqlen_k */
  const int32_t* page_table;   /**< [B, max_pages] */
} attn_tensors;

/** What a problem needs to run: its step, sizes, schedule. Runs of one plan may overlap, in several
    threads and streams, each with its own workspace. */
typedef struct attn_plan attn_plan;

/** Fills in size, backend GPU, bf16, windows without limit, mask blocks of 128 x 128, and 1 for
    every other size. */
ATTN_API void attn_problem_defaults(attn_problem* problem);

/* For each operation:
   attn_X_plan             makes a plan. Host work only; may take milliseconds.
   attn_X_workspace_bytes  the bytes of its workspace, which must be aligned to 256 bytes.
   attn_X                  plans, prepares and runs.
   `stream` is a cudaStream_t, as void*. */
#define ATTN_OPERATION(X)                                                                      \
  ATTN_API attn_status attn_##X##_plan(const attn_problem* problem, attn_plan** plan);         \
  ATTN_API attn_status attn_##X##_workspace_bytes(const attn_problem* problem, size_t* bytes); \
  ATTN_API attn_status attn_##X(const attn_problem* problem, const attn_tensors* tensors,      \
                                void* workspace, size_t workspace_bytes, void* stream);
ATTN_OPERATION(forward)
ATTN_OPERATION(backward)
ATTN_OPERATION(decode)
ATTN_OPERATION(paged_decode)
ATTN_OPERATION(paged_prefill)
ATTN_OPERATION(paged_append)
ATTN_OPERATION(quantised_forward) /* dtype int8 or e4m3; no step takes int4 */
#undef ATTN_OPERATION

ATTN_API size_t attn_plan_workspace_bytes(const attn_plan* plan);
/** "06_flash_v3_hopper/v14_tuned"; valid as long as the plan. */
ATTN_API const char* attn_plan_step(const attn_plan* plan);
/** 1: attn_prepare reads `tensors` (a cache that is quantised once), and must be called again when
    their contents change. 0: it only clears counters and stores the schedule, and tensors may be
    null. */
ATTN_API int attn_plan_prepare_reads_tensors(const attn_plan* plan);
/** Makes a workspace ready for runs of this plan, in `stream`. After it only runs of this plan may
    write to the workspace. Whether a workspace was prepared is known by its address: after the
    memory was used otherwise, prepare again. Order prepare and run if their streams differ. */
ATTN_API attn_status attn_prepare(attn_plan* plan, const attn_tensors* tensors, void* workspace,
                                  size_t workspace_bytes, void* stream);
/** Launches in `stream`. May be captured in a CUDA graph: addresses are fixed by the capture.
    Contents of tensors may change between replays, except those that attn_prepare reads
    (attn_plan_prepare_reads_tensors). Lengths in seqused_k may change unless the step schedules on
    the host (it then needs lengths_k): for such a step plan and prepare again, or the result is
    wrong without an error. */
ATTN_API attn_status attn_run(attn_plan* plan, const attn_tensors* tensors, void* workspace,
                              size_t workspace_bytes, void* stream);
ATTN_API void attn_plan_destroy(attn_plan* plan);

/** The line of this thread's last call that failed; "" if none did. */
ATTN_API const char* attn_last_error(void);
/** The names of all steps, one per line with the operation: "01_naive/v1_global forward". */
ATTN_API const char* attn_steps(void);
/** A step as JSON: operation, idea, dtypes and head_dims (empty: any), most_queries (0: any),
    deterministic (bitwise equal from run to run), features, support, compute_capability. */
ATTN_API attn_status attn_describe(const char* step, char* text, size_t bytes, size_t* needed);
/** One line per step of an operation ("forward"): whether it takes the problem, or why not; the
    step that null selects is marked "best". Writes at most `bytes` bytes to `text`, 0 at the end;
    `needed` (may be null) is the size of the whole text. */
ATTN_API attn_status attn_which(const char* operation, const attn_problem* problem, char* text,
                                size_t bytes, size_t* needed);

/* For callers without an allocator, as language bindings. */
/** Memory of a back end (attn_backend; for the GPU of the current device), aligned to 256 bytes. */
ATTN_API attn_status attn_allocate(int32_t backend, size_t bytes, void** memory);
/** Null is ignored. On a GPU it waits for the device. */
ATTN_API void attn_free(int32_t backend, void* memory);
/** The number of the calling thread's GPU, or -1. */
ATTN_API int attn_current_gpu(void);
/** Marks what `stream` has now; attn_done(mark) is 1 once that is done, and then frees the mark. */
ATTN_API attn_status attn_record(void* stream, void** mark);
ATTN_API int attn_done(void* mark);
/** Work that `stream` gets later waits for what `other` has now, without blocking the host. */
ATTN_API attn_status attn_stream_wait(void* stream, void* other);

#ifdef __cplusplus
}  // extern "C"

#include <stdexcept>
#include <utility>

/// The same for C++: errors are exceptions, a plan is an object.
namespace attention {

struct Error : std::runtime_error {
  attn_status status;
  explicit Error(attn_status s) : std::runtime_error(attn_last_error()), status(s) {}
};
inline void check(attn_status s) {
  if (s != ATTN_OK) throw Error(s);
}

inline attn_problem problem() {
  attn_problem p;
  attn_problem_defaults(&p);
  return p;
}
inline attn_tensors tensors() {
  attn_tensors t{};
  t.size = sizeof t;
  return t;
}
/// A tensor [B, H, N, d] that lies in memory as [B, N, H, d].
inline attn_tensor bnhd(void* data, int64_t n, int64_t h, int64_t d) {
  return {data, n * h * d, d, h * d};
}

/// `attention::Plan plan(attn_forward_plan, problem);`
class Plan {
 public:
  Plan(attn_status (*make)(const attn_problem*, attn_plan**), const attn_problem& problem) {
    check(make(&problem, &plan_));
  }
  ~Plan() { attn_plan_destroy(plan_); }
  Plan(Plan&& other) noexcept : plan_(std::exchange(other.plan_, nullptr)) {}
  Plan& operator=(Plan&& other) noexcept {
    std::swap(plan_, other.plan_);
    return *this;
  }
  size_t workspace_bytes() const { return attn_plan_workspace_bytes(plan_); }
  const char* step() const { return attn_plan_step(plan_); }
  void prepare(const attn_tensors& t, void* workspace, void* stream = nullptr) {
    check(attn_prepare(plan_, &t, workspace, workspace_bytes(), stream));
  }
  void run(const attn_tensors& t, void* workspace, void* stream = nullptr) {
    check(attn_run(plan_, &t, workspace, workspace_bytes(), stream));
  }

 private:
  attn_plan* plan_ = nullptr;
};

}  // namespace attention
#endif  // __cplusplus
#endif  // ATTN_ATTENTION_H
