// Smooth field inputs: neighbours are similar, heads have reaches, text has no position.
#include <cmath>
#include <string>
#include <vector>

#include "attn/error.h"
#include "check/field.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "tests/catch.h"

namespace {

using namespace attn;

Problem on_canvas(const std::string& text, int64_t length) {
  Problem p;
  p.heads = 8, p.kv_heads = 4, p.seqlen_q = p.seqlen_k = length, p.head_dim = 64;
  p.own["field"] = read_field(text);
  check_field(p);
  p.finish();
  return p;
}

double cosine(const float* a, const float* b, int64_t d) {
  double ab = 0, aa = 0, bb = 0;
  for (int64_t c = 0; c < d; ++c)
    ab += double{a[c]} * b[c], aa += double{a[c]} * a[c], bb += double{b[c]} * b[c];
  return ab / std::sqrt(aa * bb);
}

std::string said(const std::string& text) {
  try {
    read_field(text);
  } catch (const InputError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tokens of a field that are near are alike, by the reach of their head", "[inputs]") {
  const Problem p = on_canvas("8x16x16", 8 * 16 * 16 + 40);
  const HostTensors in = draw_inputs(p, forward().inputs(p));
  // Along the width, for K/V head h: 16 / 8, 16 / 2, 16 / 16, 16 / 4 tokens; noise of 0.3 is 8 % of
  // the norm.
  constexpr double kReach[] = {2, 8, 1, 4};
  for (int64_t h = 0; h < 4; ++h)
    for (const int64_t away : {1, 2, 4, 15}) {
      double mean = 0;
      for (int64_t row = 0; row < 128; ++row)
        mean +=
            cosine(in.at("k").row(0, h, 16 * row), in.at("k").row(0, h, 16 * row + away), 64) / 128;
      const double r = static_cast<double>(away) / kReach[h];
      INFO("head " << h << ", " << away << " away");
      CHECK(mean == Approx(std::exp(-r * r / 2) / 1.09).margin(0.1));
    }
  // Query heads attend where their K/V head has the same waves.
  for (int64_t h = 0; h < 8; ++h) {
    double here = 0, elsewhere = 0;
    for (int64_t i = 0; i < 2048; ++i) {
      here += cosine(in.at("q").row(0, h, i), in.at("k").row(0, h / 2, i), 64) / 2048;
      elsewhere +=
          cosine(in.at("q").row(0, h, i), in.at("k").row(0, (h / 2 + 1) % 4, i), 64) / 2048;
    }
    CHECK(here == Approx(1 / std::sqrt(1.09 * (1 + 0.09 / 4))).margin(0.02));
    CHECK(std::abs(elsewhere) < 0.1);
    CHECK(in.at("q").row(0, h, 0)[0] != in.at("q").row(0, h ^ 1, 0)[0]);  // noise of their own
  }
}

TEST_CASE("text behind a canvas is as random inputs are", "[inputs]") {
  const Problem p = on_canvas("2x4x8", 64 + 40);
  Problem random = p;
  random.own.clear();
  const HostTensors in = draw_inputs(p, forward().inputs(p)),
                    plain = draw_inputs(random, forward().inputs(p));
  for (const char* name : {"q", "k", "v"}) {
    const int64_t heads = name[0] == 'q' ? 8 : 4;
    for (int64_t n = 0; n < heads * 104 * 64; ++n) {
      const bool text = n / 64 % 104 >= 64;
      const auto i = static_cast<std::size_t>(n);
      if (text) CHECK(in.at(name).data[i] == plain.at(name).data[i]);
    }
    CHECK(in.at(name).data != plain.at(name).data);
  }
  CHECK(draw_inputs(p, forward().inputs(p)).at("k").data == in.at("k").data);
  Problem other = p;
  other.seed = 2;
  CHECK(draw_inputs(other, forward().inputs(p)).at("k").data != in.at("k").data);
}

TEST_CASE("a token's place on a canvas, row by row and tile after tile", "[inputs]") {
  using At = std::array<int64_t, 3>;
  const Field rows = field_of(on_canvas("2x4x8", 64)),
              tiles = field_of(on_canvas("2x4x8,1x2x4", 64));
  CHECK(rows.place(0) == At{0, 0, 0});
  CHECK(rows.place(9) == At{0, 1, 1});
  CHECK(rows.place(63) == At{1, 3, 7});
  CHECK(tiles.place(5) == At{0, 1, 1});   // of the first tile
  CHECK(tiles.place(8) == At{0, 0, 4});  // the next tile
  CHECK(tiles.place(16) == At{0, 2, 0});  // the tile below
  CHECK(tiles.place(32 + 25) == At{1, 2, 5});
  CHECK(tiles.place(63) == At{1, 3, 7});
  // The same token in either order.
  const Problem by_row = on_canvas("2x4x8", 64), by_tile = on_canvas("2x4x8,1x2x4", 64);
  const HostTensors a = draw_inputs(by_row, forward().inputs(by_row));
  const HostTensors b = draw_inputs(by_tile, forward().inputs(by_tile));
  double alike = 0;
  for (int64_t i = 0; i < 64; ++i) {
    const At at = tiles.place(i);
    alike +=
        cosine(a.at("k").row(0, 1, at[0] * 32 + at[1] * 8 + at[2]), b.at("k").row(0, 1, i), 64) /
        64;
  }
  CHECK(alike > 0.85);  // except for their noise
}

TEST_CASE("fields that cannot be are refused", "[inputs]") {
  for (const char* text : {"", "8", "8x8", "8x8x8x8", "0x8x8", "8x8x8,", "8x8x8,3x8x8", "8x8x8,8x8",
                           "8,8,8", "8x8x-8", "8x8x8,1x1x1,1x1x1", "9999999x1x1"})
    CHECK(said(text).find("--inputs field:" + std::string(text) + ": must be field:TxHxW") == 0);
  CHECK(said("8x8x8,2x4x8") == "");
  Problem p;
  p.own["field"] = read_field("8x8x8");
  p.seqlen_q = p.seqlen_k = 511;
  CHECK_THROWS_AS(check_field(p), InputError);
  p.seqlen_q = p.seqlen_k = 512;
  check_field(p);
  p.seqlen_q = 1;
  CHECK_THROWS_AS(check_field(p), InputError);
  p.seqlen_q = 512;
  CHECK(p.text().find(" inputs=field:8x8x8 seed=1") != std::string::npos);
  p.own["field"] = read_field("8x8x8,2x4x8");
  CHECK(p.text().find(" inputs=field:8x8x8,2x4x8 seed=1") != std::string::npos);
}
