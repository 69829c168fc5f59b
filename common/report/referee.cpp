#include "report/referee.h"

#include <fmt/format.h>

#include "attn/error.h"
#include "report/json_object.h"

namespace attn::report {

namespace {
constexpr double kAllowance = 0.9;
}

Required read_required(const std::filesystem::path& path) {
  const std::string file = printable(path.string());
  const nlohmann::json json = parse_json(read_bytes(path), file);
  const Object speed =
      Object(json, file, "", "what an exercise writes with --result on a GPU").object("speed");
  return {speed.at_least_zero("required_flop"), speed.positive("input_bytes"),
          speed.contains("roof_s") ? speed.positive("roof_s") : 0};
}

std::vector<std::string> objections(const std::vector<KernelCounters>& kernels,
                                    const Required& required, const std::string& own) {
  std::vector<std::string> found;
  for (const KernelCounters& k : kernels)
    if (k.signature.find(own) == std::string::npos)
      found.push_back(fmt::format("{} is not a kernel of the exercise", k.name));
  const KernelCounters total = step_total(kernels);
  const auto below = [&](std::string_view key, double least, const char* what) {
    const auto value = total.value(key);
    if (!value || *value >= kAllowance * least) return;
    const Counter& c = *find_counter(key);
    found.push_back(fmt::format("{}: {}, {} at least are needed", what, value_text(c, value),
                                value_text(c, least)));
  };
  below("operations", required.flop, "too few operations");
  below("hbm_read_bytes", required.input_bytes, "did not read its inputs");
  below("time_s", required.roof_s, "faster than the GPU can be");
  return found;
}

}  // namespace attn::report
