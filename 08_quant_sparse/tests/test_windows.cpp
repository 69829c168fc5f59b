// Window search per head: the smallest window within the bound, with the error that is printed.
#include <fstream>

#include "08_quant_sparse/host/head_windows.h"
#include "attn/error.h"
#include "check/check.h"
#include "check/field.h"
#include "check/inputs.h"
#include "check/operation.h"
#include "run/mask_option.h"
#include "tests/catch.h"

using namespace attn;

namespace {

Problem field_problem(const WindowSearch& s, int64_t text, int64_t heads) {
  Problem p;
  p.heads = p.kv_heads = heads, p.head_dim = 64;
  p.own["field"] = {};
  for (const Sides& sides : {s.canvas, s.tile})
    for (const int64_t side : sides) p.own["field"].push_back(double(side));
  p.seqlen_q = p.seqlen_k = field_of(p).tokens() + text;
  check_field(p);
  p.finish();
  return p;
}

// The relative L1 distance from attention over all keys, by the reference.
double error_of(const Problem& p, const HostTensors& in, const Sides& window, const WindowSearch& s,
                int64_t h) {
  Problem one = p;
  one.mask = std::make_shared<SlidingTiles>(
      s.canvas, s.tile, std::vector<Sides>(static_cast<std::size_t>(p.heads), window),
      p.seqlen_k - s.canvas[0] * s.canvas[1] * s.canvas[2]);
  double off = 0, size = 0;
  const std::vector<Expected> windowed = forward_reference(one, in, {}),
                              all = forward_reference(p, in, {});
  for (std::size_t r = 0; r < all[0].rows.size(); ++r)
    for (std::size_t c = 0; all[0].rows[r].h == h && c < 64; ++c) {
      off += std::abs(windowed[0].reference[64 * r + c] - all[0].reference[64 * r + c]);
      size += std::abs(all[0].reference[64 * r + c]);
    }
  return off / size;
}

}  // namespace

TEST_CASE("candidate windows in order of size", "[windows]") {
  const std::vector<Sides> windows = windows_of({{4, 24, 16}, {2, 8, 8}});
  // 1 or all 2 tiles, 1 or all 3, 1 or all 2.
  CHECK(windows.size() == 8);
  CHECK(windows.front() == Sides{2, 8, 8});
  CHECK(windows.back() == Sides{4, 24, 16});
  CHECK(std::ranges::is_sorted(windows, {}, [](const Sides& w) { return w[0] * w[1] * w[2]; }));
  for (const Sides& w : windows) CHECK_NOTHROW(SlidingTiles({4, 24, 16}, {2, 8, 8}, {w}, 0));
}

TEST_CASE("a head gets the smallest window within the error bound", "[windows]") {
  for (const int64_t text : {0, 30}) {
    const WindowSearch s{{5, 20, 20}, {1, 4, 4}, 0.05, 1};
    const Problem p = field_problem(s, text, 2);
    const HostTensors in = draw_inputs(p, attention_inputs(p));
    const std::vector<HeadWindow> found = search_windows(p, in, s);
    REQUIRE(found.size() == 2);
    // Head 0 has a range of 1/8 of each side, head 1 of a half.
    CHECK(found[0].density < 0.7 * found[1].density);
    const std::vector<Sides> windows = windows_of(s);
    const HeadWindow& own = found[0];
    CHECK(own.error <= s.bound);
    CHECK(error_of(p, in, own.window, s, 0) == Approx(own.error).epsilon(0.01).margin(1e-6));
    // The windows before it exceed the bound: the first and the last of them.
    const auto at = std::ranges::find(windows, own.window) - windows.begin();
    REQUIRE(at > 0);
    CHECK(error_of(p, in, windows.front(), s, 0) > s.bound);
    CHECK(error_of(p, in, windows[static_cast<std::size_t>(at - 1)], s, 0) > s.bound);
    const auto mask = read_mask(mask_option(s, found).substr(7), p);
    for (int64_t h = 0; h < 2; ++h)
      for (const int64_t i : {0, 700}) {
        const Sides& w = found[static_cast<std::size_t>(h)].window;
        int64_t keys = 0;
        mask->for_each_range(0, h, i, {0, p.seqlen_k}, [&](KeyRange run) { keys += run.size(); });
        CHECK(keys == w[0] * w[1] * w[2] + text);
      }
  }
}

TEST_CASE("an error bound of 0 leaves the whole canvas", "[windows]") {
  const WindowSearch s{{4, 8, 24}, {2, 8, 8}, 0, 5};
  const Problem p = field_problem(s, 0, 2);
  const std::vector<HeadWindow> found = search_windows(p, draw_inputs(p, attention_inputs(p)), s);
  for (const HeadWindow& w : found) {
    CHECK(w.window == s.canvas);
    CHECK(w.error == 0);
    CHECK(w.density == 1);
  }
}

TEST_CASE("invalid options of the window search are refused", "[windows]") {
  const auto said = [](std::vector<std::string> arguments) {
    try {
      windows_command(arguments);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(said({"--nosuch", "1"}).find("--windows: ") == 0);
  CHECK(said({"--nosuch", "1"}).find("--nosuch") != std::string::npos);
  CHECK(said({"--heads"}).find("--windows: --heads") == 0);
  CHECK(said({"--canvas", "8x8"}).find("--canvas 8x8: must be TxHxW") == 0);
  CHECK(said({"--bound", "2"}).find("--bound 2: must be from 0 to 1") == 0);
  CHECK(said({"--canvas", "5x16x16"}).find("sides of a tile that divide") != std::string::npos);
}
