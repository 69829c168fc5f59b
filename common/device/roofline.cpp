#include "device/roofline.h"

#include <fmt/format.h>

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
  r.tensor_e4m3 = {s.tensor_fp8_flops, source};
  r.tensor_int8 = {s.tensor_int8_ops, source};
  r.exp = {s.exp2_per_s, source};
  r.machine = {s.num_sms, s.l2_bytes};
  return r;
}

const GpuSpec* spec_of_device(const std::string& device_name) {
  std::vector<std::string> words(1);  // "NVIDIA A100-SXM4-40GB" -> nvidia a100 sxm4 40gb
  for (const char c : device_name) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      words.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!words.back().empty())
      words.emplace_back();
  }
  const auto has = [&](std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  // A variant with the same name but other figures: no datasheet is better than a wrong one.
  for (const char* variant : {"ti", "d", "super", "laptop", "mobile", "nvl", "mig"})
    if (has(variant)) return nullptr;
  if (has("a100") && has("40gb") && !has("pcie")) return find_gpu("a100-40gb");
  for (const GpuSpec& s : gpu_specs()) {
    const bool pcie = s.name.ends_with("-pcie");
    if (pcie != has("pcie")) continue;
    const std::string_view key = s.name.substr(0, s.name.size() - (pcie ? 5 : 0));
    for (std::size_t i = 0; i < words.size(); ++i)  // "rtx4090" matches the two words of "RTX 4090"
      if (words[i] == key || (i > 0 && words[i - 1] + words[i] == key)) return &s;
  }
  return nullptr;
}

Prediction predict(const Cost& cost, const Roofs& roofs, DType dtype) {
  Prediction total;
  std::map<std::string, double> seconds_bound_by;
  for (const Phase& p : cost) {
    const auto time = [](double work, const Roof& roof) {
      return roof.rate > 0 ? work / roof.rate : 0.0;
    };
    // Equal amounts of reads and writes run at the copy rate, further reads at the read rate.
    // Writes alone are assumed to run at the copy rate.
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

double read_seconds(double bytes, const Roofs& roofs) {
  return roofs.hbm_read.rate > 0 ? bytes / roofs.hbm_read.rate : 0;
}

std::string_view above_roof(std::string_view binding) {
  if (binding == "HBM") return "some of the bytes that the model counts as HBM traffic were in L2";
  if (binding == "L2")
    return "some of the bytes that the model counts as L2 traffic were in L1 or shared memory";
  if (binding == "tensor")
    return "the roof is the rate of a cuBLAS product, whose clock may have been lower";
  return "the clock may have been lower when the roof was measured";
}

double modelled_bytes(const Cost& cost) {
  double bytes = 0;
  for (const Phase& p : cost) bytes += p.hbm_read + p.hbm_write;
  return bytes;
}

std::string time_text(double s) {
  if (s < 1e-6) return fmt::format("{:.2f} ns", s * 1e9);
  if (s < 1e-3) return fmt::format("{:.2f} us", s * 1e6);
  if (s < 1) return fmt::format("{:.3f} ms", s * 1e3);
  return fmt::format("{:.3f} s", s);
}

}  // namespace attn
