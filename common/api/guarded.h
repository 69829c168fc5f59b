/// \file
/// Shared by the C functions: exceptions become status codes, with one line for attn_last_error().
#pragma once

#include <fmt/format.h>

#include <new>
#include <string>
#include <utility>

#include "api/plan.h"
#include "api/steps.h"
#include "attn/error.h"
#include "attn/status.h"
#include "device/device.h"

namespace attn::api {

/// The line of this thread's last call that failed.
std::string& last_error();

template <class Body>
attn_status guarded(Body body) noexcept {
  const auto failed = [](attn_status status, std::string line) {
    last_error() = std::move(line);
    return status;
  };
  try {
    body();
    return ATTN_OK;
  } catch (const Failure& f) {
    return failed(f.status, f.line);
  } catch (const InputError& e) {
    return failed(ATTN_INVALID_VALUE, in_fields(e.what()));
  } catch (const DeviceError& e) {
    return failed(ATTN_DEVICE_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return failed(ATTN_INTERNAL_ERROR, "the host has no memory left");
  } catch (const std::exception& e) {
    return failed(ATTN_INTERNAL_ERROR, e.what());
  }
}

[[noreturn]] inline void fail(attn_status status, std::string line) {
  throw Failure{status, std::move(line)};
}
inline void check(const Status& status) {
  switch (status.code) {
    case Status::Code::kOk: return;
    case Status::Code::kUnsupported: fail(ATTN_UNSUPPORTED, status.message);
    case Status::Code::kKernelError: fail(ATTN_KERNEL_ERROR, status.message);
    case Status::Code::kDeviceError: fail(ATTN_DEVICE_ERROR, status.message);
  }
}
template <class T>
T* not_null(T* pointer, const char* name) {
  if (!pointer) fail(ATTN_INVALID_VALUE, fmt::format("{}: is null", name));
  return pointer;
}

/// Copies at most `bytes` bytes of `all` to `text`, 0 at the end.
void give_text(const std::string& all, char* text, size_t bytes, size_t* needed);

}  // namespace attn::api
