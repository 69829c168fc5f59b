// The checker's own test: a model of a kernel, tile by tile in float32, that is right in several
// ways or wrong in one of many. The checker has to accept the former and reject the latter, for
// every element type, on random and on needle inputs.
#include "attn/check.h"

#include <Eigen/Core>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "attn/inputs.h"
#include "tests/catch.h"

namespace {

using namespace attn;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// How a kernel may go about it, all of them right.
struct Method {
  int64_t tile = 16;          // keys at a time
  bool backwards = false;     // last tile first
  bool normalise_p = false;   // divides P, not O, by the row sum (three passes, as chapter 01)
  bool round_p = true;        // P in the element type, as tensor cores want it
  float tanh_error = 0;       // relative; the hardware's is 2^-11

  float tanh(float s, float cap) const { return cap * std::tanh(s / cap) * (1 + tanh_error); }
};

enum class Fault {
  none, nan_output, one_nan, no_op, zeros, tile_short, last_key_skipped, tile_missing_from_sum,
  mask_one_more, mask_one_less, heads_swapped, k_shifted, no_rescale, gqa_modulo, no_scale,
  lse_base_2, no_softcap, no_alibi, alibi_of_kv_head, alibi_top_left, not_normalised, v_of_next_batch, one_row_wrong
};
// Which tensors a fault spoils.
struct Planted {
  Fault fault;
  const char* name;
  bool spoils_o, spoils_lse;
  bool causal_only = false;
  bool softcap_only = false;
  bool alibi_only = false;
};
const Planted kPlanted[] = {
    {Fault::nan_output, "NaN output", true, true},
    {Fault::one_nan, "one NaN", true, true},
    {Fault::no_op, "output never written", true, true},
    {Fault::zeros, "zeros", true, true},
    {Fault::tile_short, "one tile short", true, true},
    {Fault::last_key_skipped, "last key skipped", true, true},
    {Fault::tile_missing_from_sum, "last tile missing from the row sum", true, true},
    {Fault::mask_one_more, "mask one key too wide", true, true, true},
    {Fault::mask_one_less, "mask one key too narrow", true, true, true},
    {Fault::heads_swapped, "two heads swapped", true, true},
    {Fault::k_shifted, "K shifted by one row", true, true},
    {Fault::no_rescale, "no rescale when the maximum grows", true, true},
    {Fault::gqa_modulo, "K/V head h % Hkv", true, true},
    {Fault::no_scale, "softmax scale missing", true, true},
    {Fault::lse_base_2, "lse in base 2", false, true},
    {Fault::no_softcap, "softcap missing", true, true, false, true},
    {Fault::no_alibi, "ALiBi missing", true, true, false, false, true},
    {Fault::alibi_of_kv_head, "the slope of the K/V head", true, true, false, false, true},
    {Fault::alibi_top_left, "distance to the top-left diagonal", true, true, false, false, true},
    {Fault::not_normalised, "P not normalised", true, false},
    {Fault::v_of_next_batch, "V of the next batch", true, false},
    {Fault::one_row_wrong, "one row of one head wrong by 5 %", true, true},
};

float* row_of(HostTensor& t, int64_t b, int64_t h, int64_t i) {
  return const_cast<float*>(t.row(b, h, i));
}
auto vector_of(const HostTensor& t, int64_t b, int64_t h, int64_t i) {
  return Eigen::Map<const Eigen::VectorXf>(t.row(b, h, i), t.spec.shape[3]);
}

// One query of the model kernel.
void query(const Problem& p, const HostTensors& in, const Method& method, Fault fault, int64_t b,
           int64_t h, int64_t i, float* o, float& lse) {
  const HostTensor &q = in.at("q"), &k = in.at("k"), &v = in.at("v");
  const int64_t hkv = fault == Fault::gqa_modulo ? h % p.kv_heads : h / p.group();
  const int64_t bv = fault == Fault::v_of_next_batch ? (b + 1) % p.batch : b;
  const auto scale = fault == Fault::no_scale ? 1.0f : static_cast<float>(p.softmax_scale);
  KeyRange keys = p.visible(i);
  if (fault == Fault::mask_one_more) keys.end = std::min(keys.end + 1, p.seqlen_k);
  if (fault == Fault::mask_one_less && keys.end < p.seqlen_k) --keys.end;
  if (fault == Fault::tile_short) keys.end = std::min(keys.end, p.seqlen_k - 16);
  if (fault == Fault::last_key_skipped) keys.end = std::min(keys.end, p.seqlen_k - 1);

  const int64_t first_tile = keys.begin / method.tile;
  const int64_t last_tile = std::max(first_tile, (keys.end + method.tile - 1) / method.tile);
  float row_max = -kInf, row_sum = 0;
  Eigen::VectorXf acc = Eigen::VectorXf::Zero(p.head_dim);
  std::vector<float> scores(static_cast<std::size_t>(p.seqlen_k));
  const auto pass = [&](float known_max, float known_sum) {
    for (int64_t n = first_tile; n < last_tile; ++n) {
      const int64_t tile = method.backwards ? last_tile - 1 - (n - first_tile) : n;
      const int64_t begin = std::max(keys.begin, tile * method.tile);
      const int64_t end = std::min(keys.end, (tile + 1) * method.tile);
      float new_max = row_max;
      for (int64_t j = begin; j < end; ++j) {
        const int64_t key = fault == Fault::k_shifted ? std::min(j + 1, p.seqlen_k - 1) : j;
        float& s = scores[static_cast<std::size_t>(j)];
        s = scale * vector_of(q, b, h, i).dot(vector_of(k, b, hkv, key));
        if (p.softcap > 0 && fault != Fault::no_softcap) s = method.tanh(s, static_cast<float>(p.softcap));
        if (p.alibi && fault != Fault::no_alibi) {
          const int64_t head = fault == Fault::alibi_of_kv_head ? hkv : h;
          const int64_t diagonal = i + (fault == Fault::alibi_top_left ? 0 : p.seqlen_k - p.seqlen_q);
          s -= in.at("alibi").row(0, 0, 0)[head] * static_cast<float>(std::abs(diagonal - j));
        }
        new_max = std::max(new_max, s);
      }
      if (known_sum > 0) new_max = known_max;
      const float rescale = row_max == -kInf ? 0 : std::exp(row_max - new_max);
      if (fault != Fault::no_rescale) row_sum *= rescale, acc *= rescale;
      row_max = new_max;
      for (int64_t j = begin; j < end; ++j) {
        float e = std::exp(scores[static_cast<std::size_t>(j)] - row_max);
        if (fault != Fault::tile_missing_from_sum || end < keys.end) row_sum += e;
        if (known_sum > 0) e /= known_sum;
        acc += (method.round_p ? round_to(p.dtype, e) : e) * vector_of(v, bv, hkv, j);
      }
    }
  };
  pass(0, 0);
  if (method.normalise_p && row_sum > 0) {
    const float known_max = row_max, known_sum = row_sum;
    acc.setZero(), row_sum = 0;
    pass(known_max, known_sum);
    row_sum = known_sum;
  } else if (row_sum > 0 && fault != Fault::not_normalised) {
    acc /= row_sum;
  }
  for (int64_t c = 0; c < p.head_dim; ++c) o[c] = round_to(p.dtype, acc[c]);
  lse = row_sum > 0 ? row_max + std::log(row_sum) : -kInf;
  if (fault == Fault::lse_base_2) lse *= 1.44269504f;
}

// All of it: o and lse, poisoned first.
HostTensors model(const Problem& p, const HostTensors& in, const Method& method, Fault fault) {
  HostTensors out;
  for (const auto& [name, columns] :
       {std::pair<const char*, int64_t>{"o", p.head_dim}, {"lse", 1}}) {
    const TensorSpec spec{name, {p.batch, p.heads, p.seqlen_q, columns},
                          columns == 1 ? DType::fp32 : p.dtype};
    out[name] = {spec, std::vector<float>(static_cast<std::size_t>(spec.elements()), kNaN)};
  }
  HostTensor &o = out["o"], &lse = out["lse"];
  if (fault == Fault::no_op) return out;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t to = fault == Fault::heads_swapped && h < 2 ? 1 - h : h;
      for (int64_t i = 0; i < p.seqlen_q; ++i)
        query(p, in, method, fault, b, h, i, row_of(o, b, to, i), *row_of(lse, b, to, i));
    }
  float* last_row = row_of(o, p.batch - 1, p.heads - 1, p.seqlen_q - 1);
  for (HostTensor* t : {&o, &lse}) {
    if (fault == Fault::nan_output) t->data.assign(t->data.size(), kNaN);
    if (fault == Fault::zeros) t->data.assign(t->data.size(), 0);
    if (fault == Fault::one_nan) t->data[t->data.size() / 2] = kNaN;
  }
  if (fault == Fault::one_row_wrong) {
    for (int64_t c = 0; c < p.head_dim; ++c) last_row[c] = round_to(p.dtype, 1.05f * last_row[c]);
    lse.data.back() += 0.05f * std::max(1.0f, std::abs(lse.data.back()));
  }
  return out;
}

struct Verdicts {
  Verdict o, lse;
};
Verdicts verdicts(const HostTensors& out, const std::vector<Expected>& expected) {
  REQUIRE(expected.size() == 2);
  return {check(out.at("o"), expected[0]), check(out.at("lse"), expected[1])};
}

Problem problem_of(DType dtype, InputKind inputs, int64_t seqlen, bool causal) {
  Problem p;
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.head_dim = 32;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.dtype = dtype, p.inputs = inputs, p.causal = causal;
  p.finish();
  return p;
}

HostTensors draw(const Problem& p) {
  const auto spec = [&](const char* name, int64_t heads, int64_t rows) {
    return TensorSpec{name, {p.batch, heads, rows, p.head_dim}, p.dtype};
  };
  return draw_inputs(p, std::vector<TensorSpec>{
                            spec("q", p.heads, p.seqlen_q), spec("k", p.kv_heads, p.seqlen_k),
                            spec("v", p.kv_heads, p.seqlen_k), spec("do", p.heads, p.seqlen_q),
                            {"alibi", {1, 1, 1, p.heads}, DType::fp32}});
}

constexpr DType kTypes[] = {DType::fp32, DType::fp16, DType::bf16};
constexpr int64_t kLengths[] = {17, 33, 113, 203};

// The largest error of a row that a fault makes, relative to the row, in units of what the checker
// allows: some faults change nothing that matters, like a skipped key that no needle points at.
double damage(const HostTensor& out, const HostTensor& good, const Expected& e) {
  double worst = 0;
  for (std::size_t r = 0; r < e.rows.size(); ++r) {
    const auto [b, h, i] = e.rows[r];
    const double difference = (vector_of(out, b, h, i) - vector_of(good, b, h, i)).norm();
    if (std::isnan(difference)) return INFINITY;
    worst = std::max(worst, difference / (e.row_bound * e.scale[r]));
  }
  return worst;
}

TEST_CASE("every planted fault is rejected", "[check]") {
  for (const InputKind inputs : {InputKind::random, InputKind::needle})
    for (const DType dtype : kTypes) {
      std::map<std::string, int> harmless;
      for (const int64_t seqlen : kLengths)
        for (const bool causal : {false, true}) {
          Problem p = problem_of(dtype, inputs, seqlen, causal);
          if (seqlen == 33 || seqlen == 203) p.softcap = 3;
          if (seqlen == 113 && inputs == InputKind::random) p.alibi = true, (causal ? p.seqlen_q : p.seqlen_k) = 97;
          const HostTensors in = draw(p), good = model(p, in, {}, Fault::none);
          const auto expected = forward_reference(p, in, {});
          for (const Planted& planted : kPlanted) {
            if ((planted.causal_only && !causal) || (planted.softcap_only && p.softcap == 0)) continue;
            if (planted.alibi_only && !p.alibi) continue;
            // A shift of all biases is a shift of lse alone where no key changes sides of the diagonal.
            if (planted.fault == Fault::alibi_top_left && causal) continue;
            const HostTensors out = model(p, in, {}, planted.fault);
            const Verdicts v = verdicts(out, expected);
            for (const bool is_o : {true, false}) {
              const Verdict& verdict = is_o ? v.o : v.lse;
              const std::string tensor = is_o ? "o" : "lse";
              INFO(planted.name << ", " << tensor << ": " << p.text());
              const double times_allowed =
                  damage(out.at(tensor), good.at(tensor), expected[is_o ? 0 : 1]);
              if (!(is_o ? planted.spoils_o : planted.spoils_lse)) {
                CHECK(times_allowed == 0);
                CHECK(verdict.pass);
              } else if (times_allowed > 4) {
                CHECK_FALSE(verdict.pass);
              } else {
                ++harmless[planted.name + (" " + tensor)];
              }
              CHECK(verdict.failure.empty() == verdict.pass);
            }
          }
        }
      // Of the 8 problems few may hide a fault: with random inputs only a missing rescale does,
      // when a single key lies in the second tile; a needle elsewhere hides a key or a factor.
      for (const auto& [what, times] : harmless) {
        INFO(name(inputs) << " " << name(dtype) << ", " << what << ": harmless " << times << " x");
        const bool rescale = what.find("no rescale") == 0;
        CHECK(times <= (inputs == InputKind::needle ? 3 : rescale ? 1 : 0));
      }
    }
}

TEST_CASE("scores of +-1e4 show a missing rescale", "[check]") {
  for (const DType dtype : kTypes) {
    const Problem p = problem_of(dtype, InputKind::peaked, 113, false);
    const HostTensors in = draw(p);
    const auto expected = forward_reference(p, in, {});
    for (const Fault fault :
         {Fault::no_rescale, Fault::tile_short, Fault::no_scale, Fault::zeros}) {
      const Verdicts v = verdicts(model(p, in, {}, fault), expected);
      CHECK_FALSE(v.o.pass);
      CHECK_FALSE(v.lse.pass);
    }
  }
}

TEST_CASE("every way of being right is accepted", "[check]") {
  const Method kMethods[] = {{16, false, false, true},  {64, false, false, true},
                             {128, false, false, true}, {64, true, false, true},
                             {1, false, false, true},   {64, false, true, true},
                             {64, false, false, false}, {1000, false, false, false}};
  struct Mask {
    bool causal;
    int64_t left, right;
  };
  for (const InputKind inputs :
       {InputKind::random, InputKind::needle, InputKind::peaked, InputKind::outlier})
    for (const DType dtype : kTypes)
      for (const int64_t seqlen : kLengths)
        for (const Mask mask : {Mask{false, -1, -1}, {true, -1, -1}, {false, 20, 5}}) {
          Problem p = problem_of(dtype, inputs, seqlen, mask.causal);
          p.window_left = mask.left, p.window_right = mask.right;
          p.seqlen_k = seqlen % 4 == 1 ? seqlen : seqlen - 13;  // some rows see nothing when causal
          const HostTensors in = draw(p);
          const auto expected = forward_reference(p, in, {});
          for (std::size_t m = 0; m < std::size(kMethods); ++m) {
            if (seqlen > 113 && m % 2 == 1) continue;  // for time
            const Verdicts v = verdicts(model(p, in, kMethods[m], Fault::none), expected);
            INFO("method " << m << ": " << p.text() << ": " << v.o.failure << v.lse.failure);
            CHECK(v.o.pass);
            CHECK(v.lse.pass);
          }
        }
}

TEST_CASE("ALiBi far from the diagonal is accepted", "[check]") {
  for (const DType dtype : kTypes) {
    Problem p = problem_of(dtype, InputKind::random, 33, false);
    p.seqlen_q = 2000, p.heads = 2, p.alibi = true;  // biases down to -1967 / 16
    const HostTensors in = draw(p);
    const Verdicts v = verdicts(model(p, in, {}, Fault::none), forward_reference(p, in, {}));
    INFO(p.text() << ": " << v.o.failure << v.lse.failure);
    CHECK((v.o.pass && v.lse.pass));
  }
}

TEST_CASE("a softcap by the hardware's tanh is accepted, by a worse one not", "[check]") {
  for (const DType dtype : {DType::fp16, DType::bf16})
    for (const double cap : {3.0, 15.0, 50.0})
      for (const int64_t seqlen : kLengths) {
        Problem p = problem_of(dtype, InputKind::random, seqlen, false);
        p.softcap = cap, p.softmax_scale = 1;  // scores that the cap bends: |q||k| is 32
        const HostTensors in = draw(p);
        const auto expected = forward_reference(p, in, {});
        for (const float error : {0x1p-11f, -0x1p-11f, 0x1p-6f}) {
          Method method;
          method.tanh_error = error;
          const Verdicts v = verdicts(model(p, in, method, Fault::none), expected);
          INFO("tanh off by " << error << ": " << p.text() << ": " << v.o.failure << v.lse.failure);
          CHECK((v.o.pass && v.lse.pass) == (std::abs(error) < 0x1p-10f));
        }
      }
}

// ---- what is not a number, and the message -----------------------------------------------------

TEST_CASE("rows with nothing to attend must be exactly 0 and -inf", "[check]") {
  for (const DType dtype : kTypes) {
    Problem p = problem_of(dtype, InputKind::random, 33, true);
    p.seqlen_k = 17;  // queries 0 to 15 see nothing
    const HostTensors in = draw(p);
    const auto expected = forward_reference(p, in, {});
    const HostTensors good = model(p, in, {}, Fault::none);
    REQUIRE(good.at("lse").row(1, 2, 15)[0] == -kInf);
    REQUIRE(std::isfinite(good.at("lse").row(1, 2, 16)[0]));
    REQUIRE(verdicts(good, expected).o.pass);
    REQUIRE(verdicts(good, expected).lse.pass);
    for (const float wrong : {kNaN, kInf, 0.0f, -1e30f, -std::numeric_limits<float>::max()}) {
      HostTensors out = good;
      *row_of(out["lse"], 1, 2, 15) = wrong;
      CHECK_FALSE(verdicts(out, expected).lse.pass);
    }
    for (const float wrong : {kNaN, kInf, 1e-6f, -1.0f}) {
      HostTensors out = good;
      row_of(out["o"], 0, 3, 4)[31] = wrong;
      CHECK_FALSE(verdicts(out, expected).o.pass);
    }
    HostTensors out = good;
    row_of(out["o"], 0, 3, 4)[31] = -0.0f;
    CHECK(verdicts(out, expected).o.pass);
    // And the other way round: a row that sees keys may not be -inf.
    *row_of(out["lse"], 1, 2, 16) = -kInf;
    CHECK_FALSE(verdicts(out, expected).lse.pass);
  }
}

TEST_CASE("one element that is not finite is named", "[check]") {
  for (const float wrong : {kNaN, kInf, -kInf}) {
    const Problem p = problem_of(DType::bf16, InputKind::random, 33, false);
    const HostTensors in = draw(p);
    const auto expected = forward_reference(p, in, {});
    HostTensors out = model(p, in, {}, Fault::none);
    const float before = out["o"].row(1, 2, 30)[7];
    row_of(out["o"], 1, 2, 30)[7] = wrong;
    const Verdict v = verdicts(out, expected).o;
    REQUIRE_FALSE(v.pass);
    INFO(v.failure);
    CHECK(v.failure.find("o (b 1, h 2, row 30, column 7): expected ") == 0);
    CHECK(v.failure.find(wrong > 0 ? "got inf" : wrong < 0 ? "got -inf" : "got nan") !=
          std::string::npos);
    const double named = std::stod(v.failure.substr(v.failure.find("expected ") + 9));
    CHECK(named == Approx(before).margin(0.02));
    CHECK(v.failure.find('\n') == std::string::npos);
  }
}

TEST_CASE("the message names the first wrong row and its worst column", "[check]") {
  const Problem p = problem_of(DType::fp32, InputKind::random, 33, false);
  const HostTensors in = draw(p);
  const auto expected = forward_reference(p, in, {});
  HostTensors out = model(p, in, {}, Fault::none);
  row_of(out["o"], 0, 3, 20)[5] += 0.5f;
  row_of(out["o"], 0, 3, 20)[6] += 0.1f;
  row_of(out["o"], 1, 0, 2)[9] += 2.0f;
  const Verdict v = verdicts(out, expected).o;
  CHECK_FALSE(v.pass);
  CHECK(v.failure.find("o (b 0, h 3, row 20, column 5): expected ") == 0);
  const double named = std::stod(v.failure.substr(v.failure.find("expected ") + 9));
  const double got = std::stod(v.failure.substr(v.failure.find("got ") + 4));
  CHECK(got - named == Approx(0.5).epsilon(1e-4));
  // The worst row is another one.
  CHECK((v.b == 1 && v.h == 0 && v.row == 2));
  CHECK(v.worst_row_error > v.bound);
  CHECK(v.max_error == Approx(2).epsilon(1e-4));
  CHECK(v.rows_checked == 2 * 4 * 33);
  CHECK(v.tensor == "o");
}

// ---- gradients -------------------------------------------------------------------------------

enum class GradientFault { none, no_scale, head_missing, unmasked_p, no_d, no_cap_slope };

// Gradients in float32 with P and dS rounded, as a kernel with tensor cores computes them.
HostTensors gradients(const Problem& p, const HostTensors& in, GradientFault fault, float tanh_error = 0) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto head = [](const HostTensor& t, int64_t b, int64_t h) {
    return Eigen::Map<const Matrix>(t.row(b, h, 0), t.spec.shape[2], t.spec.shape[3]);
  };
  const auto rounded = [&](Matrix m) {
    round_to(p.dtype, m.data(), static_cast<std::size_t>(m.size()));
    return m;
  };
  HostTensors out;
  for (const char* name : {"dq", "dk", "dv"}) {
    TensorSpec spec = in.at(name[1] == 'q' ? "q" : "k").spec;
    spec.name = name;
    out[name] = {spec, std::vector<float>(static_cast<std::size_t>(spec.elements()), 0.0f)};
  }
  const auto scale = static_cast<float>(p.softmax_scale);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t hkv = 0; hkv < p.kv_heads; ++hkv) {
      const Matrix k = head(in.at("k"), b, hkv), v = head(in.at("v"), b, hkv);
      Matrix dk = Matrix::Zero(p.seqlen_k, p.head_dim), dv = dk;
      for (int64_t g = 0; g < p.group(); ++g) {
        const int64_t h = hkv * p.group() + g;
        const Matrix q = head(in.at("q"), b, h), d_o = head(in.at("do"), b, h);
        Matrix scores = scale * q * k.transpose(), cap_slope = Matrix::Ones(p.seqlen_q, p.seqlen_k);
        if (p.softcap > 0) {
          const auto cap = static_cast<float>(p.softcap);
          scores = (scores / cap).array().tanh() * (1 + tanh_error);
          if (fault != GradientFault::no_cap_slope) cap_slope = 1 - scores.array().square();
          scores *= cap;
        }
        const auto softmax = [&](bool masked) {
          Matrix probabilities = scores;
          for (int64_t i = 0; i < p.seqlen_q; ++i) {
            const KeyRange keys = masked ? p.visible(i) : KeyRange{0, p.seqlen_k};
            auto row = probabilities.row(i);
            const float max = keys.size() ? row.segment(keys.begin, keys.size()).maxCoeff() : 0;
            float sum = 0;
            for (int64_t j = 0; j < p.seqlen_k; ++j) {
              const bool seen = keys.begin <= j && j < keys.end;
              row[j] = seen ? std::exp(row[j] - max) : 0;
              sum += row[j];
            }
            if (sum > 0) row /= sum;
          }
          return probabilities;
        };
        const Matrix probabilities = softmax(true), dp = d_o * v.transpose();
        const Matrix o = rounded(rounded(probabilities) * v);
        Eigen::VectorXf d = (o.array() * d_o.array()).rowwise().sum();
        if (fault == GradientFault::no_d) d.setZero();
        const Matrix ds = rounded(scale * probabilities.array() * (dp.colwise() - d).array() * cap_slope.array());
        const float undo = fault == GradientFault::no_scale ? 1 / scale : 1.0f;
        const Matrix dq = rounded(undo * (ds * k));
        std::copy(dq.data(), dq.data() + dq.size(), row_of(out["dq"], b, h, 0));
        if (fault != GradientFault::head_missing || g > 0) dk += ds.transpose() * q;
        const bool unmasked = fault == GradientFault::unmasked_p;
        dv += rounded(unmasked ? softmax(false) : probabilities).transpose() * d_o;
      }
      dk = rounded(dk), dv = rounded(dv);
      std::copy(dk.data(), dk.data() + dk.size(), row_of(out["dk"], b, hkv, 0));
      std::copy(dv.data(), dv.data() + dv.size(), row_of(out["dv"], b, hkv, 0));
    }
  return out;
}

TEST_CASE("wrong gradients are rejected and right ones accepted", "[check]") {
  struct Spoilt {
    GradientFault fault;
    bool dq, dk, dv;
  };
  for (const InputKind inputs : {InputKind::random, InputKind::needle})
    for (const DType dtype : kTypes)
      for (const int64_t seqlen : kLengths)
        for (const Spoilt& spoilt : {Spoilt{GradientFault::none, false, false, false},
                                     {GradientFault::no_scale, true, false, false},
                                     {GradientFault::head_missing, false, true, false},
                                     {GradientFault::unmasked_p, false, false, true},
                                     {GradientFault::no_d, true, true, false},
                                     {GradientFault::no_cap_slope, true, true, false}}) {
          // One key has all the weight: dQ is nearly 0, and a wrong factor is as small as the rounding of O.
          if (spoilt.fault == GradientFault::no_scale && inputs == InputKind::needle) continue;
          const bool capped = spoilt.fault == GradientFault::no_cap_slope;
          if (capped && inputs == InputKind::needle) continue;  // the same
          Problem p = problem_of(dtype, inputs, seqlen, true);
          if (capped || seqlen == 33) p.softcap = 3;
          const HostTensors in = draw(p), out = gradients(p, in, spoilt.fault, dtype == DType::fp32 ? 0 : 0x1p-11f);
          const auto expected = backward_reference(p, in, {});
          REQUIRE(expected.size() == 3);
          INFO("fault " << static_cast<int>(spoilt.fault) << ": " << p.text());
          for (const Expected& e : expected) {
            const bool wrong = e.spec.name == "dq"   ? spoilt.dq
                               : e.spec.name == "dk" ? spoilt.dk
                                                     : spoilt.dv;
            const Verdict v = check(out.at(e.spec.name), e);
            INFO(e.spec.name << ": " << v.failure);
            CHECK(v.pass == !wrong);
          }
        }
}

}  // namespace
