// The pattern of wrong elements is reported, but not for scattered errors; unwritten elements and
// NaNs are distinguished.
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include <fmt/format.h>

#include "check/failure_shape.h"
#include "check/inputs.h"
#include "emulator/float16.h"
#include "tests/model_kernel.h"

namespace {

using namespace attn;
using namespace attn::tests;

// A problem with correct results, which a test then modifies.
struct Right {
  Problem p;
  HostTensors in, out;
  std::vector<Expected> expected;

  explicit Right(Problem problem) : p(problem) {
    p.finish();
    in = draw(p);
    out = model(p, in, {}, Fault::none);
    expected = forward_reference(p, in, {});
  }
  const Expected& of(const std::string& tensor) const { return expected[tensor == "o" ? 0 : 1]; }

  // Modifies the elements of `tensor` for which `which(b, h, row, column)` holds.
  using Which = std::function<bool(int64_t, int64_t, int64_t, int64_t)>;
  using Change = std::function<float(float)>;
  HostTensor spoiled(
      const std::string& tensor, const Which& which,
      const Change& change = [](float x) { return x + (x < 0 ? -0.7f : 0.7f); }) const {
    HostTensor t = out.at(tensor);
    for (const auto& [b, h, i] : of(tensor).rows)
      for (int64_t c = 0; c < t.spec.columns(); ++c)
        if (which(b, h, i, c)) {
          float& x = row_of(t, b, h, i)[c];
          x = change(x);
        }
    return t;
  }
  std::vector<std::string> shape(const HostTensor& t, std::optional<Tiling> tiling = {}) const {
    const Expected& e = of(t.spec.name);
    return failure_shape(check(t, e), t, e, p, tiling);
  }
  std::string line(const std::string& begin, const HostTensor& t,
                   std::optional<Tiling> tiling = {}) const {
    for (const std::string& s : shape(t, tiling))
      if (s.starts_with(begin)) return s.substr(begin.size());
    return "";
  }
  std::string where(const Which& which, std::optional<Tiling> tiling = {}) const {
    return line("where: ", spoiled("o", which), tiling);
  }
};

Problem plain(int64_t seqlen_q, int64_t seqlen_k, bool causal = false) {
  Problem p;
  p.batch = 3, p.heads = 4, p.kv_heads = 2, p.head_dim = 32;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.causal = causal;
  return p;
}

TEST_CASE("what is wrong is counted", "[shape]") {
  const Right right(plain(200, 50));
  const auto which = [](auto b, auto h, auto i, auto c) {
    return b == 2 && h == 1 && i < 70 && c < 4;
  };
  CHECK(right.line("wrong: ", right.spoiled("o", which), Tiling{64, 32}) ==
        "280 of 76800 elements, 70 of 2400 rows, 4 of 32 columns, 2 of 48 tiles of 64 rows");
  CHECK(right.line("wrong: ", right.spoiled("o", which)) ==
        "280 of 76800 elements, 70 of 2400 rows, 4 of 32 columns");
  CHECK(right.line("wrong: ", right.spoiled("lse", which)) ==
        "70 of 2400 elements, 70 of 2400 rows");
  CHECK(right.shape(right.out.at("o")).empty());
}

TEST_CASE("a place that wrong rows share is named", "[shape]") {
  const Right right(plain(200, 50));
  CHECK(right.where([](auto, auto, auto i, auto) { return i % 64 >= 16 && i % 64 < 32; }) ==
        "only rows 16 to 31 of every 64; all 576 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto, auto i, auto) { return i % 2 == 1; }) ==
        "only odd rows; all 1200 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto, auto i, auto) { return i % 48 == 5; }, Tiling{48, 32}) ==
        "only row 5 of every 48; all 60 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto, auto i, auto) { return i >= 100; }) ==
        "only rows 100 and on; all 1200 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto, auto i, auto) { return i >= 192; }, Tiling{64, 32}) ==
        "only rows 192 and on (in the tile of 64 that is not full); all 96 such rows are wrong, in "
        "all columns");
  CHECK(right.where([](auto, auto, auto i, auto) { return i < 64; }) ==
        "only rows up to 63; all 768 such rows are wrong, in all columns");
  CHECK(right.where([](auto b, auto, auto, auto) { return b == 1; }) ==
        "only sequence 1; all 800 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto h, auto, auto) { return h == 1; }) ==
        "only head 1; all 600 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto h, auto, auto) { return h >= 2; }) ==
        "only the query heads of K/V head 1; all 1200 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto h, auto, auto) { return h % 2 == 1; }) ==
        "only query head 1 of each K/V head's 2; all 1200 such rows are wrong, in all columns");
  CHECK(right.where([](auto b, auto h, auto i, auto) { return b == 0 && h == 3 && i % 16 < 8; }) ==
        "only sequence 0, only head 3, only rows 0 to 7 of every 16; all 104 such rows are wrong, "
        "in all columns");
  // Not all of it is wrong, but more than chance explains.
  CHECK(right.where([](auto, auto h, auto i, auto) { return h == 2 && i * i % 7 == 2; }) ==
        "only head 2; 171 of 600 such rows are wrong, in all columns");
}

TEST_CASE("few wrong rows name no heads", "[shape]") {
  const Right right(plain(1, 50));
  CHECK(right.where([](auto b, auto h, auto, auto) { return b == 1 && h > 1; }) == "");
  CHECK(right.where([](auto b, auto h, auto, auto) { return b == 1 || h > 1; }) == "");
}

TEST_CASE("a place that wrong columns share is named", "[shape]") {
  const Right right(plain(40, 50));
  CHECK(right.where([](auto, auto, auto, auto c) { return c % 2 == 1; }) == "only odd columns");
  CHECK(right.where([](auto, auto, auto, auto c) { return c % 16 >= 8; }) ==
        "only columns 8 to 15 of every 16");
  CHECK(right.where([](auto, auto, auto, auto c) { return c == 31; }) == "only column 31");
  CHECK(right.where([](auto, auto h, auto, auto c) { return h == 1 && c >= 24; }) ==
        "only head 1; all 120 such rows are wrong, only columns 24 and on");
  CHECK(right.where([](auto, auto, auto i, auto c) { return (i + c) % 4 == 1; }) == "");
}

TEST_CASE("rows are told by the keys that they see", "[shape]") {
  const Right causal(plain(200, 200, true));
  CHECK(causal.where([](auto, auto, auto i, auto) { return i >= 64; }) ==
        "only rows 64 and on (those to which keys from 64 on are visible); all 1632 such rows are "
        "wrong, in all columns");
  const Right longer(plain(80, 50, true));  // rows 0 to 29 are fully masked
  CHECK(longer.where([](auto, auto, auto i, auto) { return i < 30; }) ==
        "only fully masked rows; all 360 such rows are wrong, in all columns");
  CHECK(longer.where([](auto, auto, auto i, auto) { return i >= 30; }) ==
        "only rows with a visible key; all 600 such rows are wrong, in all columns");
  CHECK(longer.where([](auto, auto, auto i, auto) { return i < 79; }) ==
        "only rows with a masked key; all 948 such rows are wrong, in all columns");
  CHECK(longer.where([](auto, auto, auto i, auto) { return i >= 30 && i < 79; }) ==
        "only partially masked rows; all 588 such rows are wrong, in "
        "all columns");
  CHECK(longer.where([](auto, auto, auto i, auto) { return i >= 30 && i % 16 < 4; }) ==
        "only rows 0 to 3 of every 16; all 144 such rows are wrong, in all columns");
}

TEST_CASE("packed sequences have a shape, too", "[shape]") {
  Right right(problem_of(DType::bf16, InputKind::random, kSeveral, false));
  CHECK(right.where([](auto b, auto, auto, auto) { return b == 3; }) ==
        "only sequence 3; all 452 such rows are wrong, in all columns");
  CHECK(right.where([](auto, auto h, auto, auto) { return h == 0; }) ==
        "only head 0; all 204 such rows are wrong, in all columns");
}

TEST_CASE("rows of a gradient by keys are keys", "[shape]") {
  Problem p = plain(50, 200);
  p.finish();
  const HostTensors in = draw(p);
  for (const Expected& e : backward_reference(p, in, {})) {
    if (e.spec.name == "dq") continue;
    HostTensor t{e.spec, std::vector<float>(e.reference.begin(), e.reference.end())};
    round_to(p.dtype, t.data.data(), t.data.size());
    REQUIRE(check(t, e).pass);
    for (const auto& [b, h, i] : e.rows)
      for (int64_t c = 0; i >= 64 && c < p.head_dim; ++c) row_of(t, b, h, i)[c] = 0;
    const auto lines = failure_shape(check(t, e), t, e, p, Tiling{64, 32});
    REQUIRE(lines.size() == 3);
    CHECK(lines[0].ends_with(
        " of 38400 elements, 816 of 1200 keys, 32 of 32 columns, 30 of 42 tiles of 32 keys"));
    CHECK(lines[1] == "where: only keys 64 and on; all 816 such keys are wrong, in all columns");
    CHECK(lines[2] == "value: all are 0");
  }
}

TEST_CASE("a factor or a difference that wrong values share is named", "[shape]") {
  const Right right(plain(200, 50));
  const auto all = [](auto...) { return true; };
  const auto value = [&](const std::string& tensor, const Right::Change& change) {
    return right.line("value: ", right.spoiled(tensor, all, change));
  };
  CHECK(value("o", [](float x) { return round_to(DType::bf16, x * 1.25f); }) ==
        "each is 1.25 times what is expected");
  CHECK(value("o", [](float x) { return -x; }) == "each is -1 times what is expected (the sign)");
  CHECK(value("o", [](float) { return 0.0f; }) == "all are 0");
  CHECK(value("lse", [](float x) { return x * static_cast<float>(M_LOG2E); }) ==
        "each is 1.443 times what is expected (log2 e: base 2 in place of e)");
  CHECK(value("lse", [](float x) { return x + 0.5f; }) == "each is 0.5 too large");
  CHECK(value("lse", [](float x) { return x - 2; }) == "each is 2 too small");
  // Summed twice, or by every second lane only; other offsets have no meaning.
  CHECK(value("lse", [](float x) { return x + 0.6931472f; }) ==
        "each is 0.6931 too large (ln 2: the sum of each row is 2 times what it should be)");
  CHECK(value("lse", [](float x) { return x - std::log(32.0f); }) ==
        "each is 3.466 too small (ln 32: the sum of each row is 1/32 of what it should be)");
  CHECK(value("lse", [](float x) { return x + std::log(37.0f); }) == "each is 3.611 too large");
  CHECK(value("lse", [](float x) {
          return x * 1.442695f;
        }).ends_with("(log2 e: base 2 in place of e)"));
  CHECK(value("o", [](float x) { return x + 0.5f; }) == "");
  HostTensor by_row = right.out.at("o");
  for (const auto& [b, h, i] : right.of("o").rows)
    for (int64_t c = 0; c < right.p.head_dim; ++c) {
      float& x = row_of(by_row, b, h, i)[c];
      x = round_to(DType::bf16, x * (0.25f + 0.25f * static_cast<float>((i + h) % 3)));
    }
  CHECK(right.line("value: ", by_row) ==
        "each row is the expected row times a factor, 0.25 to 0.75");
}

TEST_CASE("what is scattered has no place and no factor", "[shape]") {
  std::mt19937_64 random(7);
  int named = 0, trials = 0;
  std::string examples;
  for (const bool causal : {false, true}) {
    const Right right(plain(67, 67, causal));
    const auto rows = right.of("o").rows;
    for (const int count : {1, 2, 3, 5, 8, 13, 40, 200, 700})
      for (int n = 0; n < 12; ++n, ++trials) {
        HostTensor t = right.out.at("o"), whole = t;
        for (int k = 0; k < count; ++k) {
          const auto [b, h, i] = rows[random() % rows.size()];
          const auto column = static_cast<int64_t>(random() % 32);
          const float off = std::ldexp(static_cast<float>(random() % 64) - 31.5f, -4);
          row_of(t, b, h, i)[column] += off;
          for (int64_t c = 0; c < 32; ++c)
            row_of(whole, b, h, i)[c] = std::ldexp(static_cast<float>(random() % 64) - 31.5f, -4);
        }
        for (const HostTensor& spoiled : {t, whole}) {
          std::string text;
          for (const std::string& s : right.shape(spoiled)) text += s + "\n";
          INFO(count << " scattered:\n" << text);
          CHECK(text.find("value:") == std::string::npos);
          for (const char* word :
               {"head", "sequence", "odd", "even", "every", " on", "up to", "nothing", "see"})
            if (text.find(word) != std::string::npos) {
              ++named, examples += text;
              break;
            }
        }
      }
  }
  INFO(named << " places in " << trials << " trials:\n" << examples);
  CHECK(named * 100 <= trials);
}

// ---- never written, and NaN ---------------------------------------------------------------------

TEST_CASE("an element that was never written is called that", "[check]") {
  for (const DType dtype : kTypes) {
    Problem p = plain(33, 50);
    p.dtype = dtype;
    const Right right(p);
    const auto odd = [](auto b, auto h, auto, auto c) { return b > 0 && h == 1 && c % 2 == 1; };
    const auto nothing = [](float) { return std::bit_cast<float>(kUnwritten); };
    HostTensor o = right.spoiled("o", odd, nothing);
    // In device format.
    std::vector<std::byte> bytes(static_cast<std::size_t>(o.spec.bytes()));
    encode(dtype, o.data.data(), o.data.size(), bytes.data());
    for (std::size_t n = 0; n < o.data.size(); ++n)
      if (const std::uint32_t bits = unwritten_bits(dtype); unwritten(o.data[n]))
        std::memcpy(bytes.data() + n * static_cast<std::size_t>(size_of(dtype)), &bits,
                    static_cast<std::size_t>(size_of(dtype)));
    decode(dtype, bytes.data(), o.data.size(), o.data.data());
    row_of(o, 0, 0, 0)[3] += 5;  // comes first, but is less informative
    CHECK(check(o, right.of("o")).failure ==
          "o (b 1, h 1, row 0, column 1) was never written; 1056 of 12672 elements were not");
    CHECK(right.line("where: ", right.spoiled("o", odd, nothing)) ==
          "only sequences 1 and on, only head 1; all 66 such rows are wrong, only odd columns");
    const HostTensor lse = right.spoiled("lse", odd, nothing);
    CHECK(check(lse, right.of("lse")).pass);
    const HostTensor half = right.spoiled(
        "lse", [](auto, auto, auto i, auto) { return i % 2 == 0; }, nothing);
    CHECK(check(half, right.of("lse")).failure ==
          "lse (b 0, h 0, row 0, column 0) was never written; 204 of 396 elements were not");
  }
}

TEST_CASE("NaN says whether it was computed or read", "[check]") {
  const Right right(plain(33, 50));
  const auto spoiled = [&](float nan) {
    return check(right.spoiled(
                     "o", [](auto b, auto, auto i, auto c) { return b == 1 && i == 7 && c > 2; },
                     [=](float) { return nan; }),
                 right.of("o"))
        .failure;
  };
  const std::string begin = "o (b 1, h 0, row 7, column 3): expected ";
  const float zero = std::bit_cast<float>(
      static_cast<std::uint32_t>(right.p.batch - 3));  // hides the value from the compiler
  for (const float computed :
       {kNaN, zero / zero, kInf - kInf * (zero + 1), std::bit_cast<float>(0x7FFFFFFF)}) {
    const std::string text = spoiled(computed);
    CHECK(text.starts_with(begin));
    CHECK(text.ends_with("got nan (NaN that was computed; 116 of 12672 elements are NaN)"));
  }
  const float poison = std::bit_cast<float>(0xFFFFFFFF),
              poison16 = std::bit_cast<float>(0xFFFF0000);
  for (const float read : {poison, poison * 2 + 1, poison16, std::exp(poison)}) {
    const std::string text = spoiled(read);
    CHECK(text.starts_with(begin));
    CHECK(
        text.ends_with("got nan (NaN that was read from uninitialised memory; 116 of "
                       "12672 elements are NaN)"));
  }
  // Cache rows that no sequence uses.
  for (const auto& [sequence, words] : {std::pair{0, "past the last key of sequence 0"},
                                        {59, "past the last key of sequence 59"},
                                        {36, "past the last key of its sequence"},
                                        {500, "past the last key of its sequence"},
                                        {-1, "from a page that no sequence uses"}}) {
    const float nan = unused_nan(sequence);
    const auto half = static_cast<float>(emulator::Float16(nan)),
               bf16 = static_cast<float>(emulator::BFloat16(nan));
    for (const float read : {nan, nan * 2 + 1, -nan, half, bf16})
      CHECK(spoiled(read).ends_with(
          fmt::format("got nan (NaN that was read {}; 116 of 12672 elements are NaN)", words)));
  }
  CHECK(spoiled(std::bit_cast<float>(kUnwritten | 0x400000) * (zero + 1))
            .ends_with("(NaN that was computed; 116 of 12672 elements are NaN)"));
  CHECK(spoiled(std::bit_cast<float>(0x7FE50000))
            .ends_with("(NaN that was read from an output that was never written; 116 of 12672 "
                       "elements are NaN)"));
  // The result of arithmetic on an unwritten element is not itself unwritten.
  CHECK_FALSE(unwritten(std::bit_cast<float>(kUnwritten) + zero));
}

TEST_CASE("where the reference is NaN, an element must be written all the same", "[check]") {
  Right right(plain(33, 50));
  Expected& o = right.expected[0];
  HostTensor out = right.out.at("o");
  o.reference[5] = kNaN, out.data[5] = kNaN;
  CHECK(check(out, o).pass);
  out.data[5] = std::bit_cast<float>(kUnwritten);
  CHECK(check(out, o).failure ==
        "o (b 0, h 0, row 0, column 5) was never written; 1 of 12672 elements were not");
}

}  // namespace
