// Stub of roofs.cu for builds without nvcc.
#include "device/device.h"
#include "device/roofline.h"

namespace attn {

Roofs measure_roofs() { throw DeviceError("measuring roofs: built without CUDA"); }

}  // namespace attn
