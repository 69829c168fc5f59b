// Algorithm 1 on the CPU (host/algorithm.h) against attention by the formula.
#include <random>

#include "03_flash_v1/host/algorithm.h"
#include "tests/catch.h"

namespace {

using flash1::Index;
using flash1::Matrix;
using flash1::Vector;

Matrix random_matrix(Index rows, Index cols, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  return Matrix::NullaryExpr(rows, cols, [&] { return normal(random); });
}

// O and lse by the formula, with all of S at once.
struct Textbook {
  Matrix o;
  Vector lse;
};
Textbook textbook(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal) {
  Textbook t{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -flash1::kInfinity)};
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

void check_close(const flash1::State& state, const Textbook& t) {
  CHECK((state.o - t.o).cwiseAbs().maxCoeff() < 1e-12);
  const Vector lse = state.lse();
  for (Index i = 0; i < lse.size(); ++i) {
    if (std::isinf(t.lse(i)))
      CHECK(lse(i) == t.lse(i));
    else
      CHECK(std::abs(lse(i) - t.lse(i)) < 1e-11 * (1 + std::abs(t.lse(i))));
  }
}

}  // namespace

TEST_CASE("Algorithm 1 equals attention for all tile sizes", "[algorithm]") {
  for (const bool causal : {false, true})
    for (const auto& [rows, keys] :
         {std::pair<Index, Index>{37, 37}, {37, 53}, {53, 37}, {1, 9}, {9, 1}})
      for (const double spread : {1.0, 30.0}) {
        const Matrix q = random_matrix(rows, 8, spread, 1), k = random_matrix(keys, 8, spread, 2),
                     v = random_matrix(keys, 6, 1, 3);
        const Textbook t = textbook(q, k, v, 0.35, causal);
        for (const Index block_m : {1, 4, 16, 64})
          for (const Index block_n : {1, 5, 16, 64}) {
            INFO(rows << " rows, " << keys << " keys, tiles " << block_m << " x " << block_n
                      << (causal ? ", causal" : ""));
            check_close(flash1::forward(q, k, v, 0.35, causal, block_m, block_n), t);
          }
      }
}

TEST_CASE("between visits the state is attention over the keys so far", "[algorithm]") {
  const Matrix q = random_matrix(11, 8, 3, 4), k = random_matrix(40, 8, 3, 5),
               v = random_matrix(40, 8, 1, 6);
  flash1::State state{Matrix::Zero(11, 8), Vector::Constant(11, -flash1::kInfinity),
                      Vector::Zero(11)};
  for (Index key0 = 0; key0 < 40; key0 += 8) {
    flash1::visit(state, 0, 0.35 * q * k.middleRows(key0, 8).transpose(), v.middleRows(key0, 8));
    check_close(state, textbook(q, k.topRows(key0 + 8), v.topRows(key0 + 8), 0.35, false));
  }
}

TEST_CASE("scores of 1e4 do not overflow when the maximum grows at each visit", "[algorithm]") {
  Matrix q = Matrix::Ones(3, 1), k(32, 1), v = random_matrix(32, 4, 1, 7);
  for (Index j = 0; j < 32; ++j) k(j, 0) = 1e4 * double(j - 16) / 16;
  check_close(flash1::forward(q, k, v, 1, false, 2, 4), textbook(q, k, v, 1, false));
  check_close(flash1::forward(q, -k, v, 1, false, 2, 4), textbook(q, -k, v, 1, false));
}
