// Chapter 06's CPU algorithm equals attention for any tile sizes and threshold.
#include <random>

#include "06_flash_v3_hopper/host/algorithm.h"
#include "tests/catch.h"

namespace {

using flash3::Index;
using flash3::Matrix;
using flash3::Result;
using flash3::Vector;

Matrix random_matrix(Index rows, Index cols, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  return Matrix::NullaryExpr(rows, cols, [&] { return normal(random); });
}

// O and lse by the formula, with the whole S.
Result textbook(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal) {
  Result t{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -flash3::kInfinity)};
  for (Index i = 0; i < q.rows(); ++i) {
    const Index seen = causal ? std::max(Index{0}, i + k.rows() - q.rows() + 1) : k.rows();
    if (seen == 0) continue;
    const Eigen::RowVectorXd s = scale * q.row(i) * k.topRows(seen).transpose();
    const Eigen::RowVectorXd e = (s.array() - s.maxCoeff()).exp();
    t.o.row(i) = e * v.topRows(seen) / e.sum();
    t.lse(i) = s.maxCoeff() + std::log(e.sum());
  }
  return t;
}

void check_close(const Result& result, const Result& t) {
  CHECK((result.o - t.o).cwiseAbs().maxCoeff() < 1e-12);
  for (Index i = 0; i < t.lse.size(); ++i) {
    if (std::isinf(t.lse(i)))
      CHECK(result.lse(i) == t.lse(i));
    else
      CHECK(std::abs(result.lse(i) - t.lse(i)) < 1e-11 * (1 + std::abs(t.lse(i))));
  }
}

const double kThreshold = 8 * std::log(2.0);  // 2^8

}  // namespace

TEST_CASE("FlashAttention-3's order equals attention for any tile sizes", "[algorithm]") {
  for (const bool causal : {false, true})
    for (const auto& [rows, keys] :
         {std::pair<Index, Index>{37, 37}, {37, 53}, {53, 37}, {1, 9}, {9, 1}})
      for (const double threshold : {0.0, kThreshold}) {
        const Matrix q = random_matrix(rows, 8, 3, 1), k = random_matrix(keys, 8, 3, 2),
                     v = random_matrix(keys, 6, 1, 3);
        const Result t = textbook(q, k, v, 0.35, causal);
        for (const Index block_m : {1, 16, 64})
          for (const Index block_n : {1, 5, 16, 64}) {
            INFO(rows << " rows, " << keys << " keys, tiles " << block_m << " x " << block_n
                      << ", threshold " << threshold << (causal ? ", causal" : ""));
            check_close(flash3::forward(q, k, v, 0.35, causal, block_m, block_n, threshold), t);
          }
      }
}

TEST_CASE("the lazy rescale is rare and exact for growing scores", "[algorithm]") {
  const Matrix q = random_matrix(64, 64, 1, 1), k = random_matrix(512, 64, 1, 2),
               v = random_matrix(512, 8, 1, 3);
  const double scale = 1 / std::sqrt(64.0);
  const Result always = flash3::forward(q, k, v, scale, false, 64, 16, 0),
               lazy = flash3::forward(q, k, v, scale, false, 64, 16, kThreshold);
  check_close(lazy, textbook(q, k, v, scale, false));
  CHECK(always.rescales > 64);
  CHECK(lazy.rescales == 0);
  // Maxima that grow with each block, up to 1e4: every block causes a rescale.
  Matrix ones = Matrix::Ones(3, 1), keys(32, 1);
  for (Index j = 0; j < 32; ++j) keys(j, 0) = 1e4 * double(j - 16) / 16;
  const Result grows = flash3::forward(ones, keys, v.topRows(32), 1, false, 2, 4, kThreshold);
  check_close(grows, textbook(ones, keys, v.topRows(32), 1, false));
  CHECK(grows.rescales == 3 * 7);
}
