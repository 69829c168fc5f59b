// The one exception that means "what the user gave cannot be used".
#pragma once

#include <stdexcept>

namespace attn {

/// A bad option or input file: the message is one line that says what is wrong, where, and what is
/// accepted. Programs print it and exit with status 2.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace attn
