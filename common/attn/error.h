// The exception for invalid user input.
#pragma once

#include <stdexcept>

namespace attn {

/// A bad option or input file. The message is one line: what is wrong, where, and what is accepted.
/// Programs print it and exit with status 2.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace attn
