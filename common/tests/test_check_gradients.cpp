// The checker on gradients: wrong ones are rejected and right ones accepted.
#include <Eigen/Core>
#include <cmath>

#include "tests/model_kernel.h"

namespace {

using namespace attn;
using namespace attn::tests;

enum class GradientFault {
  none, no_scale, head_missing, unmasked_p, no_d, no_cap_slope, too_large, d_five_percent
};

// Gradients in float32 with P and dS rounded, as in a kernel with tensor cores.
HostTensors gradients(const Problem& batch, const HostTensors& in, GradientFault fault,
                      float tanh_error = 0) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto head = [](const HostTensor& t, int64_t b, int64_t h) {
    Matrix m(t.spec.rows_of(b), t.spec.columns());
    for (Eigen::Index i = 0; i < m.rows(); ++i) m.row(i) = vector_of(t, b, h, i);
    return m;
  };
  const auto store = [](HostTensor& t, int64_t b, int64_t h, const Matrix& m) {
    for (Eigen::Index i = 0; i < m.rows(); ++i)
      std::copy_n(m.row(i).data(), m.cols(), row_of(t, b, h, i));
  };
  const auto rounded = [&](Matrix m) {
    round_to(batch.dtype, m.data(), static_cast<std::size_t>(m.size()));
    return m;
  };
  HostTensors out;
  for (const char* name : {"dq", "dk", "dv"}) {
    TensorSpec spec = in.at(name[1] == 'q' ? "q" : "k").spec;
    spec.name = name;
    out[name] = {spec, std::vector<float>(static_cast<std::size_t>(spec.elements()), 0.0f)};
  }
  const auto scale = static_cast<float>(batch.softmax_scale);
  // As much as the type's bound, 1e-2, or slightly more: 1.5e-3, 1e-4.
  const float excess = batch.dtype == DType::bf16   ? 0.01f
                       : batch.dtype == DType::fp16 ? 2e-3f
                                                    : 1.5e-4f;
  const float factor = fault == GradientFault::too_large ? 1 + excess : 1.0f;
  for (int64_t b = 0; b < batch.batch; ++b) {
    const Problem p = batch.sequence(b);
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
        if (fault == GradientFault::d_five_percent) d *= 1.05f;
        const Matrix ds =
            rounded(scale * probabilities.array() * (dp.colwise() - d).array() * cap_slope.array());
        const float undo = fault == GradientFault::no_scale ? 1 / scale : 1.0f;
        const Matrix dq = rounded(factor * undo * (ds * k));
        store(out["dq"], b, h, dq);
        if (fault != GradientFault::head_missing || g > 0) dk += ds.transpose() * q;
        const bool unmasked = fault == GradientFault::unmasked_p;
        dv += rounded(unmasked ? softmax(false) : probabilities).transpose() * d_o;
      }
      dk = rounded(factor * dk), dv = rounded(factor * dv);
      store(out["dk"], b, hkv, dk);
      store(out["dv"], b, hkv, dv);
    }
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
                                     {GradientFault::too_large, true, true, true},
                                     {GradientFault::d_five_percent, true, true, false},
                                     {GradientFault::no_cap_slope, true, true, false}}) {
          // One key has all the weight: dQ is nearly 0, and a wrong factor is as small as the
          // rounding of O.
          const bool factor =
              spoilt.fault == GradientFault::no_scale || spoilt.fault == GradientFault::too_large;
          if (factor && inputs == InputKind::needle) continue;
          const bool capped = spoilt.fault == GradientFault::no_cap_slope;
          if (capped && inputs == InputKind::needle) continue;  // for the same reason
          Problem p = problem_of(dtype, inputs, seqlen, true);
          // tanh may have an error of its own
          if (capped || (seqlen == 33 && !factor)) p.softcap = 3;
          const HostTensors in = draw(p), out = gradients(p, in, spoilt.fault,
                                                          dtype == DType::fp32 ? 0 : 0x1p-11f);
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

TEST_CASE("D wrong by 5 % is rejected where every query sees every key", "[check]") {
  for (const DType dtype : kTypes)
    for (const int64_t seqlen : {17, 113, 203}) {
      const Problem p = problem_of(dtype, InputKind::random, seqlen, false);
      const HostTensors in = draw(p), out = gradients(p, in, GradientFault::d_five_percent);
      for (const Expected& e : backward_reference(p, in, {})) {
        INFO(e.spec.name << ": " << p.text());
        const Verdict v = check(out.at(e.spec.name), e);
        CHECK(v.pass == (e.spec.name == "dv"));
      }
    }
}

}  // namespace
