#include "attn/roofline.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace attn {

Roofs datasheet_roofs(const GpuSpec& s) {
  const std::string source = "datasheet";
  Roofs r;
  r.gpu = std::string(s.full_name);
  r.hbm_copy = r.hbm_read = {s.hbm_bytes_per_s, source};
  r.l2 = {0, "not stated"};
  r.fp32 = {s.fp32_flops, source};
  r.tensor_fp16 = r.tensor_bf16 = {s.tensor_16bit_flops, source};
  r.exp = {s.exp2_per_s, source};
  return r;
}

const GpuSpec* spec_of_device(const std::string& device_name) {
  std::string squeezed;  // "NVIDIA GeForce RTX 4090" -> "nvidiageforcertx4090"
  for (const char c : device_name)
    if (std::isalnum(static_cast<unsigned char>(c)))
      squeezed += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const GpuSpec* best = nullptr;  // the longest name that fits: "h100-pcie" before "h100"
  for (const GpuSpec& s : gpu_specs()) {
    std::string key;
    for (const char c : s.name)
      if (c != '-') key += c;
    const bool fits = squeezed.find(key) != squeezed.npos;
    if (fits && (best == nullptr || s.name.size() > best->name.size())) best = &s;
  }
  // "NVIDIA A100-SXM4-40GB" and "NVIDIA H100 PCIe" say their variant after other words.
  if (best && best->name == "a100" && squeezed.find("40gb") != squeezed.npos)
    return find_gpu("a100-40gb");
  return best;
}

Prediction predict(const Cost& cost, const Roofs& roofs, DType dtype) {
  Prediction total;
  std::map<std::string, double> seconds_bound_by;
  for (const Phase& p : cost) {
    const auto time = [](double work, const Roof& roof) {
      return roof.rate > 0 ? work / roof.rate : 0.0;
    };
    // What is read as well as written goes at the rate of a copy, what is only read at that of a
    // read; writes alone are given the rate of a copy.
    const double both = 2 * std::min(p.hbm_read, p.hbm_write);
    const double only_read = std::max(0.0, p.hbm_read - p.hbm_write);
    const double only_write = std::max(0.0, p.hbm_write - p.hbm_read);
    const std::pair<const char*, double> candidates[] = {
        {"HBM", time(both + only_write, roofs.hbm_copy) + time(only_read, roofs.hbm_read)},
        {"L2", time(p.l2_bytes, roofs.l2)},
        {"FP32", time(p.fp32_flop, roofs.fp32)},
        {"tensor", time(p.tensor_flop, roofs.tensor(dtype))},
        {"exp", time(p.exp, roofs.exp)}};
    const auto& longest = *std::max_element(std::begin(candidates), std::end(candidates),
                                            [](auto& a, auto& b) { return a.second < b.second; });
    total.phases.push_back({p.name, longest.second, longest.first});
    total.seconds += longest.second;
    seconds_bound_by[longest.first] += longest.second;
  }
  double most = -1;
  for (const auto& [name, seconds] : seconds_bound_by)
    if (seconds > most) most = seconds, total.binding = name;
  return total;
}

double modelled_bytes(const Cost& cost) {
  double bytes = 0;
  for (const Phase& p : cost) bytes += p.hbm_read + p.hbm_write;
  return bytes;
}

}  // namespace attn
