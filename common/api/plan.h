/// \file
/// A plan of libattention: a problem, its step, and how the caller's workspace is divided.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/attention.h"
#include "api/steps.h"

namespace attn::api {

/// An error of the ABI.
struct Failure {
  attn_status status;
  std::string line;
};

/// A tensor of an operation, as the caller gives it.
struct Slot {
  std::string name;                   ///< "q"
  attn_tensor attn_tensors::*tensor;  ///< null for one of the arrays below
  const void* (*array)(const attn_tensors&) = nullptr;
  bool read = true, written = false;
  int64_t element_bytes = 4;
  int64_t shape[4] = {};  ///< batch, heads, rows, columns; packed: 1, heads, tokens, columns
  bool packed = false;    ///< [rows, heads, columns] instead of [batch, heads, rows, columns]
  bool pool = false;      ///< pages, never copied
  int64_t copy = -1;      ///< offset of the contiguous copy in the workspace; -1: none

  int64_t bytes() const { return shape[0] * shape[1] * shape[2] * shape[3] * element_bytes; }
  int64_t stride_head() const { return packed ? shape[3] : shape[2] * shape[3]; }
  int64_t stride_row() const { return packed ? shape[1] * shape[3] : shape[3]; }
};

}  // namespace attn::api

struct attn_plan {
  attn::Problem problem;  ///< Arguments refer to it: a plan is never moved
  attn::Device device = attn::Backend::emulated;
  const attn::api::NamedStep* named = nullptr;
  std::vector<attn::api::Slot> slots;

  struct Region {
    std::string name;
    int64_t offset, bytes;
    std::vector<std::byte> contents = {};  ///< of the host's schedule
  };
  std::vector<Region> regions;
  int64_t workspace_bytes = 0;
  bool prepare_step = false, prepare_reads = false;
  int64_t scratch_o = -1, scratch_lse = -1;  ///< what `prepare` of a backward step writes

  std::mutex mutex;                                    ///< of the members below
  std::vector<std::unique_ptr<attn::Arguments>> free;  ///< arguments that no run uses now
  /// A workspace that attn_prepare has filled, and the K that it read (prepare_reads).
  struct Prepared {
    const void *workspace, *k;
  };
  std::vector<Prepared> prepared;
};
