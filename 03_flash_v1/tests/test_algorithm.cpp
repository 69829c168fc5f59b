// Algorithm 1 on the CPU (host/algorithm.h) against attention by the formula.
#include "03_flash_v1/host/algorithm.h"
#include "tests/one_head.h"

using namespace attn::tests;

namespace {

void check_close(const flash1::State& state, const OneHead& t) {
  attn::tests::check_close(state.o, state.lse(), t);
}

}  // namespace

TEST_CASE("Algorithm 1 equals attention for all tile sizes", "[algorithm]") {
  for (const bool causal : {false, true})
    for (const auto& [rows, keys] :
         {std::pair<Index, Index>{37, 37}, {37, 53}, {53, 37}, {1, 9}, {9, 1}})
      for (const double spread : {1.0, 30.0}) {
        const MatrixXd q = random_matrix(rows, 8, spread, 1), k = random_matrix(keys, 8, spread, 2),
                       v = random_matrix(keys, 6, 1, 3);
        const OneHead t = by_formula(q, k, v, 0.35, causal);
        for (const Index block_m : {1, 4, 16, 64})
          for (const Index block_n : {1, 5, 16, 64}) {
            INFO(rows << " rows, " << keys << " keys, tiles " << block_m << " x " << block_n
                      << (causal ? ", causal" : ""));
            check_close(flash1::forward(q, k, v, 0.35, causal, block_m, block_n), t);
          }
      }
}

TEST_CASE("between visits the state is attention over the keys so far", "[algorithm]") {
  const MatrixXd q = random_matrix(11, 8, 3, 4), k = random_matrix(40, 8, 3, 5),
                 v = random_matrix(40, 8, 1, 6);
  flash1::State state{MatrixXd::Zero(11, 8), VectorXd::Constant(11, -flash1::kInfinity),
                      VectorXd::Zero(11)};
  for (Index key0 = 0; key0 < 40; key0 += 8) {
    flash1::visit(state, 0, 0.35 * q * k.middleRows(key0, 8).transpose(), v.middleRows(key0, 8));
    check_close(state, by_formula(q, k.topRows(key0 + 8), v.topRows(key0 + 8), 0.35, false));
  }
}

TEST_CASE("scores of 1e4 do not overflow when the maximum grows at each visit", "[algorithm]") {
  MatrixXd q = MatrixXd::Ones(3, 1), k(32, 1), v = random_matrix(32, 4, 1, 7);
  for (Index j = 0; j < 32; ++j) k(j, 0) = 1e4 * double(j - 16) / 16;
  check_close(flash1::forward(q, k, v, 1, false, 2, 4), by_formula(q, k, v, 1, false));
  check_close(flash1::forward(q, -k, v, 1, false, 2, 4), by_formula(q, -k, v, 1, false));
}
