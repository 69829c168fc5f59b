/// \file
/// A function that can stop in the middle and go on later: one CUDA thread of the emulator.
///
/// A thin layer over Boost.Context that tells AddressSanitizer of every change of stack, so that
/// the `asan` preset names the exact line of a kernel's bad access.
#pragma once

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define ATTN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTN_ASAN 1
#endif
#endif
#ifdef ATTN_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace attn::emulator {

/// The stacks of a block's fibers: allocated once, used again by block after block. An untouched
/// page costs nothing, so the size is generous.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 256 * 1024;
  std::byte* operator[](std::size_t i) {
    while (stacks_.size() <= i)
      stacks_.push_back(std::unique_ptr<std::byte[]>(new std::byte[kBytes]));
    return stacks_[i].get();
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
};

/// One suspended or running function on a stack of its own. It has to run to its end before it is
/// destroyed.
class Fiber {
 public:
  /// Makes `body` ready to run on `stack` (Stacks::kBytes bytes); `body` must not throw.
  template <class Body>
  void start(std::byte* stack, Body body) {
    stack_ = stack;
    boost::context::stack_context context;
    context.sp = stack + Stacks::kBytes;
    context.size = Stacks::kBytes;
    inside_ = boost::context::fiber(
        std::allocator_arg, boost::context::preallocated(context.sp, context.size, context),
        StackIsNotOurs{}, [this, body](boost::context::fiber&& outside) {
          arrive(nullptr);
          outside_ = std::move(outside);
          body();
          leave(nullptr, outside_stack_, outside_bytes_);
          return std::move(outside_);
        });
  }

  /// Called from outside: goes on with the function until it suspends or ends.
  void resume() {
    void* fake_stack = nullptr;
    leave(&fake_stack, stack_, Stacks::kBytes);
    inside_ = std::move(inside_).resume();
    arrive(fake_stack);
  }

  /// Called from inside: goes back to the caller of resume().
  void suspend() {
    void* fake_stack = nullptr;
    leave(&fake_stack, outside_stack_, outside_bytes_);
    outside_ = std::move(outside_).resume();
    arrive(fake_stack);
  }

 private:
  struct StackIsNotOurs {
    void deallocate(boost::context::stack_context&) noexcept {}
  };

  void leave([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* bottom,
             [[maybe_unused]] std::size_t bytes) {
#ifdef ATTN_ASAN
    __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
#endif
  }
  void arrive([[maybe_unused]] void* fake_stack) {
#ifdef ATTN_ASAN
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
    if (outside_stack_ == nullptr) {  // the first switch comes from outside
      outside_stack_ = bottom;
      outside_bytes_ = bytes;
    }
#endif
  }

  boost::context::fiber inside_, outside_;
  std::byte* stack_ = nullptr;
  const void* outside_stack_ = nullptr;
  std::size_t outside_bytes_ = 0;
};

}  // namespace attn::emulator
