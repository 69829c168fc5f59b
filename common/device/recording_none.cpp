// A program that is built without CUDA records no GPU.
#include "device/recording.h"

namespace attn {

struct Recording::Impl {};
Recording* Recording::current() { return nullptr; }
Recording::Recording(Device) : impl_(nullptr) {}
Recording::~Recording() = default;
Status Recording::clear() { return Status::device_error("built without CUDA"); }
Status Recording::sample_clocks() { return Status::device_error("built without CUDA"); }
Status Recording::read(RecordedLaunch&) { return Status::device_error("built without CUDA"); }

}  // namespace attn
