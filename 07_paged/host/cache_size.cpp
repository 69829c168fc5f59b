#include "host/cache_size.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <map>

#include "attn/error.h"

namespace attn::paged {
namespace {

// Decimal units, as in data sheets: 5.37 GB.
std::string bytes(double count) {
  const char* const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  for (; count >= 999.5 && unit + 1 < std::size(units); ++unit) count /= 1000;
  return fmt::format("{:.{}f} {}", count,
                     unit == 0     ? 0
                     : count < 10  ? 2
                     : count < 100 ? 1
                                   : 0,
                     units[unit]);
}

int64_t number(const std::string& option, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 ||
      value > 1'000'000'000)
    throw InputError(
        fmt::format("{} {}: an integer from 1 to 1000000000 is accepted", option, text));
  return value;
}

}  // namespace

int cache_size_command(const std::vector<std::string>& arguments) {
  std::map<std::string, int64_t> values{{"--layers", 32},    {"--heads", 32},   {"--kv-heads", 8},
                                        {"--head-dim", 128}, {"--latent", 576}, {"--tokens", 8192},
                                        {"--batch", 1}};
  for (std::size_t n = 0; n < arguments.size(); n += 2) {
    const auto found = values.find(arguments[n]);
    if (found == values.end())
      throw InputError(
          fmt::format("--cache-size: {}: --layers, --heads, --kv-heads, --head-dim, "
                      "--latent, --tokens and --batch are accepted",
                      arguments[n]));
    if (n + 1 == arguments.size())
      throw InputError(fmt::format("--cache-size: {} needs an integer", arguments[n]));
    found->second = number(found->first, arguments[n + 1]);
  }
  const int64_t heads = values["--heads"], kv_heads = values["--kv-heads"];
  if (kv_heads > heads || heads % kv_heads != 0)
    throw InputError(fmt::format("--kv-heads {}: must divide --heads {}", kv_heads, heads));

  const double d = double(values["--head-dim"]);
  const struct {
    std::string name;
    double elements;  // per token and layer
  } rows[] = {{fmt::format("MHA, {} heads", heads), 2 * d * double(heads)},
              {fmt::format("GQA, {} KV heads", kv_heads), 2 * d * double(kv_heads)},
              {"MQA, 1 KV head", 2 * d},
              {fmt::format("MLA, latent of {}", values["--latent"]), double(values["--latent"])}};
  const double layers = double(values["--layers"]),
               tokens = double(values["--tokens"]) * double(values["--batch"]);
  fmt::print("{} layers, head dim {}, {} tokens, batch {}\n\n", values["--layers"],
             values["--head-dim"], values["--tokens"], values["--batch"]);
  fmt::print(
      "| cache | per token, 16 bits | 16 bits | 8 bits | 4 bits |\n|---|---:|---:|---:|---:|\n");
  for (const auto& [name, elements] : rows) {
    const double per_token = 2 * elements * layers, total = per_token * tokens;
    fmt::print("| {} | {} | {} | {} | {} |\n", name, bytes(per_token), bytes(total),
               bytes(total / 2), bytes(total / 4));
  }
  return 0;
}

}  // namespace attn::paged
