/// \file
/// Plans of libattention from the caller's problem.
#pragma once

#include <memory>

#include "api/plan.h"

namespace attn::api {

/// The operations of the ABI, as in attention.h.
enum class Call {
  forward,
  backward,
  decode,
  paged_decode,
  paged_prefill,
  paged_append,
  quantised_forward
};
std::string_view text_of(Call);
/// The operation of that name. Throws Failure.
Call call_named(const char* operation);
/// The name of the chapters' operation.
std::string operation_of(Call, const Problem&);

/// Checks the caller's problem. Throws Failure or InputError.
Known known_of(Call, const attn_problem*);
/// Chooses a step and divides the workspace. Throws Failure or InputError.
std::unique_ptr<attn_plan> make_plan(Call, const attn_problem*);

}  // namespace attn::api
