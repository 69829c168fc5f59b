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
/// page costs nothing, so the size is generous. Each begins a cache line further into its page than
/// the one before: else the last frames of all would lie in the same few sets of the cache.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 256 * 1024;
  std::byte* operator[](std::size_t i) {
    while (stacks_.size() <= i)
      stacks_.push_back(std::unique_ptr<std::byte[]>(new std::byte[kBytes + kPage]));
    return stacks_[i].get() + i * kLine % kPage;
  }

 private:
  static constexpr std::size_t kPage = 4096, kLine = 64;
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
};

/// One suspended or running function on a stack of its own; or, without start(), what runs on the
/// stack of the host's thread. Each goes on with another one: who is to run next is known where one
/// stops, and a way back to a scheduler would be a change of stacks more. It has to run to its end
/// before it is destroyed.
class Fiber {
 public:
  /// Makes `body` ready to run on `stack` (Stacks::kBytes bytes). It must not throw, and returns
  /// the fiber that goes on when it has ended.
  template <class Body>
  void start(std::byte* stack, Body body) {
    boost::context::stack_context context;
    context.sp = stack + Stacks::kBytes;
    context.size = Stacks::kBytes;
#ifdef ATTN_ASAN
    stack_ = stack;
    bytes_ = Stacks::kBytes;
#endif
    stopped_ = boost::context::fiber(
        std::allocator_arg, boost::context::preallocated(context.sp, context.size, context),
        StackIsNotOurs{}, [this, body](boost::context::fiber&& left) {
          arrive(nullptr, std::move(left));
          Fiber& next = body();
          leave(nullptr, next);
          return std::move(next.stopped_);
        });
  }

  /// It stops where it is, for good: what its stack holds is lost.
  void forget() { new boost::context::fiber(std::move(stopped_)); }

  /// Called by the one that runs: stops here and goes on with `next`, until another one goes on
  /// with this one.
  void go_on_with(Fiber& next) {
    void* fake_stack = nullptr;
    leave(&fake_stack, next);
    boost::context::fiber left = std::move(next.stopped_).resume();
    arrive(fake_stack, std::move(left));
  }

 private:
  struct StackIsNotOurs {
    void deallocate(boost::context::stack_context&) noexcept {}
  };

  void leave([[maybe_unused]] void** fake_stack, [[maybe_unused]] const Fiber& next) {
    left_ = this;
#ifdef ATTN_ASAN
    __sanitizer_start_switch_fiber(fake_stack, next.stack_, next.bytes_);
#endif
  }
  // Only on the other side there is something by which the one that was left can go on.
  static void arrive([[maybe_unused]] void* fake_stack, boost::context::fiber&& left) {
#ifdef ATTN_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, &left_->stack_, &left_->bytes_);
#endif
    left_->stopped_ = std::move(left);
  }

  static inline thread_local constinit Fiber* left_ = nullptr;  // by the last change of stacks
  boost::context::fiber stopped_;
#ifdef ATTN_ASAN
  const void* stack_ = nullptr;
  std::size_t bytes_ = 0;
#endif
};

}  // namespace attn::emulator
