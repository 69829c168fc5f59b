/// \file
/// Faults that tests plant in transfers.
#pragma once

#include <atomic>
#include <cstdlib>

namespace attn::ranks {

/// Whether the message that is sent now is to be lost: ATTN_LOSE_MESSAGE=n is the n-th message of
/// the process, from 0 on.
inline bool lose_message() {
  static const char* const text = std::getenv("ATTN_LOSE_MESSAGE");
  static const int lost = text == nullptr ? -1 : std::atoi(text);
  static std::atomic<int> sent{0};
  return sent++ == lost;
}

}  // namespace attn::ranks
