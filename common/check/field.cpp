#include "check/field.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "attn/error.h"
#include "check/inputs.h"

namespace attn {
namespace {

constexpr const char* kName = "field";
constexpr double kReaches[] = {8, 2, 16, 4};  // divisors of the canvas sides
constexpr float kNoise = 0.3f;

[[noreturn]] void refuse(const std::string& text) {
  throw InputError(
      fmt::format("--inputs field:{}: must be field:TxHxW, or field:TxHxW,TILE with sides of a "
                  "tile that divide those of the "
                  "canvas",
                  text));
}

}  // namespace

std::array<int64_t, 3> Field::place(int64_t token) const {
  const int64_t of_tile = tile[0] * tile[1] * tile[2], in = token % of_tile;
  const int64_t n = token / of_tile, rows = sides[1] / tile[1], columns = sides[2] / tile[2];
  return {n / columns / rows * tile[0] + in / tile[2] / tile[1],
          n / columns % rows * tile[1] + in / tile[2] % tile[1],
          n % columns * tile[2] + in % tile[2]};
}

std::vector<double> read_field(const std::string& text) {
  std::vector<double> sides;
  int64_t number = 0, digits = 0, parts = 0;
  for (const char c : text + ",") {
    if (c >= '0' && c <= '9' && ++digits <= 6) {
      number = 10 * number + (c - '0');
      continue;
    }
    if (digits == 0 || digits > 6 || number == 0 || (c != 'x' && c != ',')) refuse(text);
    sides.push_back(static_cast<double>(number));
    number = digits = 0;
    if (c == ',' && static_cast<int64_t>(sides.size()) != 3 * ++parts) refuse(text);
  }
  if (sides.size() > 6) refuse(text);
  for (std::size_t i = 3; i < sides.size(); ++i)
    if (std::fmod(sides[i - 3], sides[i]) != 0) refuse(text);
  return sides;
}

bool has_field(const Problem& p) { return p.own.contains(kName); }
Field field_of(const Problem& p) {
  const std::vector<double>& sides = p.own.at(kName);
  Field f{};
  for (std::size_t i = 0; i < 3; ++i) {
    f.sides[i] = static_cast<int64_t>(sides.at(i));
    f.tile[i] = sides.size() > 3 ? static_cast<int64_t>(sides.at(3 + i)) : i == 2 ? f.sides[2] : 1;
  }
  return f;
}
void check_field(const Problem& p) {
  const int64_t tokens = field_of(p).tokens();
  if (p.matrix || p.varlen() || p.seqlen_q != p.seqlen_k || p.seqlen_k < tokens)
    throw InputError(fmt::format(
        "--inputs field: {} queries and {} keys: must be equal, the canvas of {} tokens and text",
        p.seqlen_q, p.seqlen_k, tokens));
}

FieldWaves::FieldWaves(const Problem& p, const TensorSpec& spec)
    : field_(field_of(p)),
      group_(spec.name == "q" ? p.group() : 1),
      rows_(p.seqlen_k),
      d_(p.head_dim),
      height_((spec.name == "q" ? 2 : 1) * std::sqrt(2.0 / kWaves)) {
  constexpr uint64_t kOfKeys = 401, kOfValues = 402;  // random streams
  const uint64_t stream = spec.name == "v" ? kOfValues : kOfKeys;
  waves_.resize(static_cast<std::size_t>(p.batch * p.kv_heads * d_ * kWaves));
  for (std::size_t n = 0; n < waves_.size(); ++n) {
    const auto head = static_cast<int64_t>(n) / (d_ * kWaves) % p.kv_heads;
    const auto at = [&](std::size_t i) { return double{normal(p.seed, stream, 4 * n + i)}; };
    for (std::size_t i = 0; i < 3; ++i)
      waves_[n].frequency[i] = at(i) * kReaches[head % 4] / static_cast<double>(field_.sides[i]);
    waves_[n].phase = 100 * at(3);  // approximately uniform modulo 2 pi
  }
}

void FieldWaves::set(int64_t r, float* row) const {
  const int64_t token = r % rows_;
  if (token >= field_.tokens()) return;
  const auto x = field_.place(token);
  const Wave* wave = waves_.data() + r / rows_ / group_ * d_ * kWaves;
  for (int64_t c = 0; c < d_; ++c) {
    double sum = 0;
    for (int w = 0; w < kWaves; ++w, ++wave)
      sum += std::cos(wave->frequency[0] * static_cast<double>(x[0]) +
                      wave->frequency[1] * static_cast<double>(x[1]) +
                      wave->frequency[2] * static_cast<double>(x[2]) + wave->phase);
    row[c] = static_cast<float>(height_ * sum) + kNoise * row[c];
  }
}

}  // namespace attn
