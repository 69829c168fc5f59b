// Tests of the CPU algorithm of chapter 04: the result does not depend on tile sizes.
#include <random>

#include "04_flash_v2/host/algorithm.h"
#include "tests/catch.h"

namespace {

using flash2::BlockClass;
using flash2::Index;
using flash2::Matrix;
using flash2::Result;
using flash2::Vector;

Matrix random_matrix(Index rows, Index cols, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  return Matrix::NullaryExpr(rows, cols, [&] { return normal(random); });
}

// O and lse by definition, with all of S at once.
Result textbook(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal) {
  Result t{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -flash2::kInfinity)};
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

}  // namespace

TEST_CASE("Algorithm 1 of FlashAttention-2 equals attention for all tile sizes", "[algorithm]") {
  for (const bool causal : {false, true})
    for (const auto& [rows, keys] :
         {std::pair<Index, Index>{37, 37}, {37, 53}, {53, 37}, {1, 9}, {9, 1}})
      for (const double spread : {1.0, 30.0}) {
        const Matrix q = random_matrix(rows, 8, spread, 1), k = random_matrix(keys, 8, spread, 2),
                     v = random_matrix(keys, 6, 1, 3);
        const Result t = textbook(q, k, v, 0.35, causal);
        for (const Index block_m : {1, 4, 16, 64})
          for (const Index block_n : {1, 5, 16, 64}) {
            INFO(rows << " rows, " << keys << " keys, tiles " << block_m << " x " << block_n
                      << (causal ? ", causal" : ""));
            check_close(flash2::forward(q, k, v, 0.35, causal, block_m, block_n), t);
          }
      }
}

TEST_CASE("the class of a block agrees with the mask of its elements", "[algorithm]") {
  for (const Index shift : {-7, 0, 5})
    for (Index row0 = 0; row0 < 24; row0 += 4)
      for (Index key0 = 0; key0 < 32; key0 += 8) {
        int seen = 0;
        for (Index i = row0; i < row0 + 4; ++i)
          for (Index j = key0; j < key0 + 8; ++j) seen += j <= i + shift;
        const BlockClass expected = seen == 0    ? BlockClass::skipped
                                    : seen == 32 ? BlockClass::unmasked
                                                 : BlockClass::masked;
        CHECK(flash2::classify(row0, 4, key0, 8, shift, true) == expected);
        CHECK(flash2::classify(row0, 4, key0, 8, shift, false) == BlockClass::unmasked);
      }
}

TEST_CASE("scores of 1e4 do not overflow when the maximum grows at each KV block", "[algorithm]") {
  Matrix q = Matrix::Ones(3, 1), k(32, 1), v = random_matrix(32, 4, 1, 7);
  for (Index j = 0; j < 32; ++j) k(j, 0) = 1e4 * double(j - 16) / 16;
  check_close(flash2::forward(q, k, v, 1, false, 2, 4), textbook(q, k, v, 1, false));
  check_close(flash2::forward(q, -k, v, 1, false, 2, 4), textbook(q, -k, v, 1, false));
}
