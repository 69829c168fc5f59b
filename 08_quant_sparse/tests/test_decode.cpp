// Decode steps of chapter 08: correct for every cache that they accept.
#include <cmath>

#define ATTN_EMULATED  // codes as host functions
#include "attn/small_types.h"
#include "kernels/codes.h"
#include "host/quantised.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kCaches{1, 15, 16, 17, 63, 65, 127, 128, 129, 255, 257, 1000};
// Query and K/V heads: group sizes that are a row tile of some step, and others.
constexpr int64_t kHeads[][2] = {{1, 1}, {3, 1}, {4, 1}, {7, 1}, {8, 1}, {16, 1}, {2, 2}, {6, 2}};
constexpr int64_t kQueries[] = {1, 1, 2, 1, 4, 1, 8, 16};

// Decode problems: every length with every mask; all other parameters in pairs.
template <class Body>
void cache_problems(const std::vector<int64_t>& lengths, DType dtype, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier, InputKind::needle};
  constexpr int64_t kDims[] = {128, 64, 128, 256, 64, 128, 256};
  std::size_t n = 0;
  for (const int64_t room : lengths)
    for (int mask = 0; mask < 3; ++mask, ++n) {
      Problem p = problem(kQueries[n % 8], room, kDims[n % 7], dtype, kInputs[n % 5]);
      p.heads = kHeads[n * 5 % 8][0], p.kv_heads = kHeads[n * 5 % 8][1];
      p.causal = mask == 1;
      if (mask == 2) p.window_left = static_cast<int64_t>(n * 37 % 150), p.window_right = 0;
      if (n % 3 != 0) {  // partly used, with NaN past the end; a sequence may be empty
        p.batch = 3;
        p.seqused_k = {room, room / 2, static_cast<int64_t>(n) % (room + 1)};
        if (n % 5 == 0) p.seqused_k[1] = 0;
      }
      p.seed = n + 1;
      body(p);
    }
}

std::vector<const Step*> cache_steps() {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps)
    if (step.operation == &decode()) steps.push_back(&step);
  return steps;
}
void check_caches(Backend backend, const std::vector<int64_t>& lengths) {
  Counts ran;
  const bool all = backend == Backend::gpu;
  for (const DType dtype : {DType::int8, DType::e4m3, DType::int4}) {
    int n = 0;
    cache_problems(lengths, dtype, [&](const Problem& p) {
      ran += check_steps("decode", p, backend, all ? nullptr : in_turn, turn(n++));
    });
    CHECK(n == 3 * std::ssize(lengths));
  }
  // Each step takes one of the types.
  const int third = static_cast<int>(lengths.size());
  for (const Step* step : cache_steps()) CHECK(ran.of[step->name] >= (all ? 3 * third : third));
}

}  // namespace

TEST_CASE("decode steps match the reference for caches of any length", "[emulated]") {
  check_caches(Backend::emulated, kCaches);
}
TEST_CASE("decode steps on the GPU", "[gpu]") {
  std::vector<int64_t> lengths = kCaches;
  lengths.insert(lengths.end(), {4096, 32789});
  check_caches(Backend::gpu, lengths);
}

TEST_CASE("a batch of empty caches gives O = 0 and lse = -inf", "[emulated]") {
  for (const Step* step : cache_steps()) {
    Problem p = problem(2, 100, 64, quantises_to(*step));
    p.batch = 3, p.heads = 4, p.kv_heads = 2;
    p.seqused_k = {0, 0, 0};
    p.finish();
    HostTensors out;
    INFO(step->name);
    CHECK(run_step(*step, p, Backend::emulated, &out) == "");
    for (const float x : out.at("o").data) CHECK(x == 0);
    for (const float x : out.at("lse").data) CHECK((std::isinf(x) && x < 0));
  }
}

TEST_CASE("many sequences and splits of fixed size", "[emulated]") {
  for (const Step* step : cache_steps()) {
    Problem p = problem(1, 300, 64, quantises_to(*step));
    p.batch = 70, p.heads = 2, p.kv_heads = 1;
    for (int64_t b = 0; b < 70; ++b) p.seqused_k.push_back(b % 5 == 0 ? 0 : b * 37 % 301);
    p.finish();
    INFO(step->name);
    CHECK(run_step(*step, p, Backend::emulated) == "");
    for (const int64_t keys : {256, 384, 1 << 20}) {
      p = problem(3, 1000, keys == 384 ? 256 : 128, quantises_to(*step));
      p.batch = 3, p.heads = 8, p.kv_heads = 2, p.causal = true;
      p.seqused_k = {1000, 0, 129};
      p.own["split_keys"] = {static_cast<double>(keys)};
      p.finish();
      CHECK(run_step(*step, p, Backend::emulated) == "");
    }
  }
}

// The tolerance of --dtype e4m3 is that of P in e4m3, which no decode step has. This tests how
// close they are to attention over the stored values.
TEST_CASE("caches of every type are read exactly", "[emulated]") {
  for (const Step* step : cache_steps())
    for (const int64_t d : {64, 128, 256}) {
      Problem p = problem(3, 300, d, quantises_to(*step));
      p.heads = 4, p.kv_heads = 2;
      p.finish();
      const HostTensors in = draw(decode(), p).tensors;
      Session session(p, decode(), Backend::emulated, in);
      REQUIRE(session.prepare(*step).ok());
      REQUIRE(session.launch().ok());
      for (const Expected& e : expected_of(*step, p, in, {})) {
        const Distance away = distance(session.outputs().at(e.spec.name), e);
        INFO(step->name << " " << e.spec.name << ", d=" << d << ": " << away.relative_l1);
        CHECK(away.relative_l1 < (e.spec.name == "o" ? 2.5e-3 : 1e-6));
      }
    }
}

namespace {
using namespace ::emulated::flash_decoding;
float half_of(uint32_t pair, std::size_t i) {
  return static_cast<float>(std::bit_cast<__half>(static_cast<uint16_t>(pair >> 16 * i)));
}
}  // namespace

TEST_CASE("every code converts to its value in its position", "[codes]") {
  for (uint32_t n = 0; n < 256; ++n) {
    // Four codes per word: n, 255 - n, 0x35, n.
    const uint32_t codes[4] = {n, 255 - n, 0x35, n};
    const uint32_t word = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
    const auto check = [&]<class Codes>(Codes, auto meaning) {
      uint32_t lie[2], cross[2];
      Codes::in_storage_order(word, lie), Codes::crosswise(word, cross);
      for (std::size_t i = 0; i < 4; ++i) {
        INFO("code " << codes[i] << " at " << i);
        CHECK(half_of(lie[i / 2], i % 2) == meaning(codes[i]));
        CHECK(half_of(cross[i % 2], i / 2) == meaning(codes[i]));
      }
    };
    check(Int8Codes(), [](uint32_t code) { return static_cast<float>(code) - 128; });
    if ((n & 0x7F) == 0x7F || (n & 0x7F) == 0) continue;  // NaN, of n or of 255 - n
    check(Fp8Codes(), [](uint32_t code) { return E4M3::decode(static_cast<uint8_t>(code)); });
  }
  for (uint32_t n = 0; n < 16; ++n) {
    const uint32_t word = 0x76543210u ^ (0x11111111u * n);
    uint32_t pairs[4];
    Int4Codes::pairs_of(word, pairs);
    for (std::size_t i = 0; i < 4; ++i)
      for (std::size_t half = 0; half < 2; ++half)
        CHECK(half_of(pairs[i], half) == static_cast<float>(word >> 4 * (i + 4 * half) & 15) - 8);
  }
  // Each slot of Q is used once.
  for (int width : {64, 128, 256}) {
    std::vector<int> four(static_cast<std::size_t>(width)), eight = four;
    for (int col = 0; col < width; ++col)
      ++four[static_cast<std::size_t>(Fp8Codes::slot(col))],
          ++eight[static_cast<std::size_t>(Int4Codes::slot(col))];
    CHECK(std::ranges::count(four, 1) == width);
    CHECK(std::ranges::count(eight, 1) == width);
  }
}

// Every bf16 number, and midpoints between two codes.
TEST_CASE("floats convert to e4m3 as by the instruction", "[codes]") {
  for (uint32_t bits = 0; bits < 0x10000; ++bits)
    for (const uint32_t low : {0u, 1u, 0x8000u, 0xFFFFu}) {
      const auto x = std::bit_cast<float>(bits << 16 | low);
      if (Fp8Codes::code_of(x) == E4M3::encode(x)) continue;
      INFO(x);
      CHECK(Fp8Codes::code_of(x) == E4M3::encode(x));
    }
}

// Codes convert to fp16 exactly: a query and a row with a single 1 read each code.
TEST_CASE("every code of an 8-bit cache is read as its value", "[emulated]") {
  for (const Step* step : cache_steps()) {
    if (quantises_to(*step) == DType::int4) continue;
    const bool whole = quantises_to(*step) == DType::int8;
    Problem p = problem(1, 256, 64, quantises_to(*step));
    p.heads = p.kv_heads = 1;
    p.finish();
    HostTensors in = draw(decode(), p).tensors;
    std::ranges::fill(in.at("q").data, 0.0f);
    std::ranges::fill(in.at("k").data, 0.0f);
    in.at("q").data[5] = 64, in.at("k").data[77 * 64 + 5] = 64;  // key 77 has all the weight
    for (std::size_t c = 0; c < 64; ++c) {
      const auto bits = static_cast<uint8_t>(2 * c);
      const float code = whole ? static_cast<float>(bits) - 63 : E4M3::decode(bits);
      in.at("v").data[77 * 64 + c] = c == 63 ? (whole ? 127.0f : 448.0f) : code;
    }
    const HostTensors out = outputs_of(*step, p, in);
    for (std::size_t c = 0; c < 64; ++c)
      CHECK(out.at("o").data[c] == Approx(in.at("v").data[77 * 64 + c]).epsilon(4e-3).margin(1e-6));
  }
}

// A block has more key tiles than any step has stages, so each stage is refilled.
TEST_CASE("stages are refilled many times", "[emulated]") {
  for (const Step* step : cache_steps())
    for (const int64_t d : {64, 128}) {
      Problem p = problem(1, 3300, d, quantises_to(*step), InputKind::needle);
      p.batch = 3, p.heads = 2, p.kv_heads = 1;  // one sequence per emulated SM
      p.finish();
      INFO(step->name << ", d=" << d);
      CHECK(run_step(*step, p, Backend::emulated) == "");
    }
}

// NaN or Inf in a cache must not become a finite number: queries that attend to its token get NaN,
// the others are unchanged.
TEST_CASE("NaN and Inf in a cache reach the queries that attend to them", "[emulated]") {
  for (const Step* step : cache_steps())
    for (const char* tensor : {"k", "v"})
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        Problem p = problem(4, 200, 64, quantises_to(*step));
        p.heads = 4, p.kv_heads = 2, p.causal = true;
        p.finish();
        HostTensors in = draw(decode(), p).tensors;
        const HostTensors right = outputs_of(*step, p, in);
        // The first KV head's last key but one: visible to the last two of four queries.
        in.at(tensor).data[198 * 64 + 7] = bad;
        const HostTensors out = outputs_of(*step, p, in);
        for (int64_t h = 0; h < 4; ++h)
          for (int64_t i = 0; i < 4; ++i) {
            INFO(step->name << " " << tensor << " " << bad << ", head " << h << ", query " << i);
            const bool sees = h < 2 && i >= 2;
            CHECK(std::isnan(out.at("lse").row(0, h, i)[0]) == sees);
            for (int64_t c = 0; c < 64; ++c)
              if (sees)
                CHECK(std::isnan(out.at("o").row(0, h, i)[c]));
              else
                CHECK(out.at("o").row(0, h, i)[c] == right.at("o").row(0, h, i)[c]);
          }
      }
}

// In d9's cache a NaN in an encoded key is in its channel's scale, which 32 keys share: a query
// that attends to any of them gets NaN. The others are unchanged.
TEST_CASE("NaN in a key poisons its group", "[emulated]") {
  const Step& step = step_named("d9_kivi");
  for (const float bad : {NAN, INFINITY, 0x1p101f}) {
    Problem p = problem(4, 400, 64, DType::int4);
    p.batch = p.heads = p.kv_heads = 1;
    p.window_left = 334, p.window_right = 0;  // query i attends to keys from 62 + i on
    p.finish();
    HostTensors in = draw(decode(), p).tensors;
    const HostTensors right = outputs_of(step, p, in);
    in.at("k").data[40 * 64 + 7] = bad;  // visible to no query, but its group, 32 to 63, is
    const HostTensors out = outputs_of(step, p, in);
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t c = 0; c < 64; ++c) {
        INFO(bad << ", query " << i);
        if (i < 2)
          CHECK(std::isnan(out.at("o").row(0, 0, i)[c]));
        else
          CHECK(out.at("o").row(0, 0, i)[c] == right.at("o").row(0, 0, i)[c]);
      }
  }
}

// Scales of V span more than fp16's range: each value's scale is part of the exponent, not of P.
TEST_CASE("values of any magnitude keep their precision", "[emulated]") {
  for (const Step* step : cache_steps()) {
    Problem p = problem(2, 150, 128, quantises_to(*step));
    p.heads = 2, p.kv_heads = 1;
    p.finish();
    Case c(p, decode());
    std::size_t key = 0;
    for (float& x : c.inputs.at("v").data) {
      x = round_to(DType::bf16, std::ldexp(x, static_cast<int>(key / 128 * 7 % 60) - 30));
      ++key;
    }
    // And Q beyond fp16's range.
    for (float& x : c.inputs.at("q").data) x = round_to(DType::bf16, std::ldexp(x, 40));
    c.problem.softmax_scale = std::ldexp(c.problem.softmax_scale, -40);
    INFO(step->name);
    CHECK(run_step(*step, c, Backend::emulated) == "");
  }
}

// The reference values must be independent of the kernel: by hand, at ties and at the ends.
TEST_CASE("stored values of an 8-bit cache by hand", "[quantise]") {
  Problem p = problem(1, 3, 64, DType::int8);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : decode().inputs(p)) in.emplace(spec.name, zeros(spec));
  std::vector<float>& k = in.at("k").data;
  k[0] = -254, k[1] = 3, k[2] = 5, k[3] = -1, k[4] = 254;  // ties at scale 1/2
  for (std::size_t c = 64; c < 128; ++c) k[c] = 0.75f;     // all equal
  const HostTensors stored = cache_of_8_bits(p, in);
  const std::vector<float>& s = stored.at("k").data;
  CHECK(s[0] == -254);
  CHECK(s[1] == 4);  // ties to even
  CHECK(s[2] == 4);
  CHECK(s[3] == 0);
  CHECK(s[4] == 254);
  CHECK(s[64] == Approx(0.75f).epsilon(1e-6));
  CHECK(s[128] == 0);  // zeros, no 0/0
}

TEST_CASE("stored values of an int4 cache by hand", "[quantise]") {
  Problem p = problem(1, 3, 64, DType::int4);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : decode().inputs(p)) in.emplace(spec.name, zeros(spec));
  std::vector<float>& v = in.at("v").data;
  v[0] = -4, v[1] = 26, v[2] = 3, v[3] = 5, v[4] = 4;  // a scale of 2, and 12 in the middle
  for (std::size_t c = 64; c < 128; ++c) v[c] = 0.75f;  // all equal: no 0/0
  const std::vector<float> s = cache_of_4_bits(p, in).at("v").data;
  CHECK(s[0] == -4);
  CHECK(s[1] == 26);
  CHECK(s[2] == 4);  // ties of -4.5 and of -3.5, to even
  CHECK(s[3] == 4);
  CHECK(s[4] == 4);
  CHECK(s[5] == 0);
  CHECK(s[64] == Approx(0.75f).epsilon(1e-6));
  CHECK(s[128] == Approx(0).margin(1e-8));
}

TEST_CASE("stored values of a cache with groups by hand", "[quantise]") {
  Problem p = problem(1, 32 + 130, 64, DType::int4);
  p.batch = p.heads = p.kv_heads = 1;
  p.finish();
  HostTensors in;
  for (const TensorSpec& spec : decode().inputs(p)) in.emplace(spec.name, zeros(spec));
  std::vector<float>& k = in.at("k").data;
  std::vector<float>& v = in.at("v").data;
  for (std::size_t i = 0; i < 162; ++i) {
    k[i * 64] = 100 + static_cast<float>(i % 16);      // 100 to 115: a scale of 1, every code
    k[i * 64 + 1] = -0.5f * static_cast<float>(i % 8);  // -3.5 to 0: 3.5/15, rounded up to 1/4
    k[i * 64 + 2] = 0.3f;  // all equal
    v[i * 64] = static_cast<float>(i % 16), v[i * 64 + 1] = 0.3f;
  }
  const HostTensors stored = cache_of_groups(p, in);
  const std::vector<float>& s = stored.at("k").data;
  for (std::size_t i = 0; i < 162; ++i) {
    INFO("key " << i);
    CHECK(s[i * 64] == k[i * 64]);
    CHECK(s[i * 64 + 1] == k[i * 64 + 1]);
    CHECK(s[i * 64 + 2] == Approx(0.3f).epsilon(i < 32 ? 1e-3 : 4e-4));
    CHECK(s[i * 64 + 3] == 0);
  }
  // V: encoded tokens, 0.3 at steps of 1; then fp16.
  CHECK(stored.at("v").data[31 * 64 + 1] == 0);
  CHECK(stored.at("v").data[32 * 64 + 1] == round_to(DType::fp16, 0.3f));
  CHECK(stored.at("v").data[161 * 64] == 1);
}

// Tokens of zeros have no scale of their own; tiny values have one far below those of other tokens.
// For zeros O is exactly 0; for values of 1e-20 it is that of the same values at scale 1, times
// 1e-20.
TEST_CASE("caches of zeros and of values of 1e-20", "[emulated]") {
  for (const Step* step : cache_steps())
    for (const char* what : {"zeros", "v zeros", "a head", "tiny", "half a head"}) {
      Problem p = problem(1, 300, 64, quantises_to(*step));
      p.heads = 4, p.kv_heads = 2;
      p.finish();
      Case c(p, decode());
      std::vector<float>&k = c.inputs.at("k").data, &v = c.inputs.at("v").data;
      if (std::string(what) == "zeros") std::ranges::fill(k, 0.0f);
      for (std::size_t i = 0; i < v.size(); ++i) {
        const bool first_head = i < v.size() / 2;
        if (std::string(what) == "tiny") v[i] = round_to(DType::bf16, v[i] * 1e-20f);
        const bool zero = std::string(what).ends_with("zeros") ||
                          (std::string(what) == "a head" && first_head) ||
                          (std::string(what) == "half a head" && first_head && i / 64 % 2 == 0);
        if (zero) v[i] = 0;
      }
      INFO(step->name << ": " << what);
      HostTensors out;
      CHECK(run_step(*step, c, Backend::emulated, &out) == "");
      if (std::string(what).ends_with("zeros"))
        CHECK(std::ranges::all_of(out.at("o").data, [](float x) { return x == 0; }));
      if (std::string(what) != "tiny") continue;
      const Distance lost = distance(out.at("o"), decode().reference(p, c.inputs, {}).front());
      CHECK(lost.cosine > 0.9);
    }
}
