// Chapter 06's CPU algorithm equals attention for any tile sizes and threshold.
#include "06_flash_v3_hopper/host/algorithm.h"
#include "tests/one_head.h"

using namespace attn::tests;

namespace {

void check_close(const flash3::Result& result, const OneHead& t) {
  attn::tests::check_close(result.o, result.lse, t);
}

const double kThreshold = 8 * std::log(2.0);  // 2^8

}  // namespace

TEST_CASE("FlashAttention-3's order equals attention for any tile sizes", "[algorithm]") {
  for (const bool causal : {false, true})
    for (const auto& [rows, keys] :
         {std::pair<Index, Index>{37, 37}, {37, 53}, {53, 37}, {1, 9}, {9, 1}})
      for (const double threshold : {0.0, kThreshold}) {
        const MatrixXd q = random_matrix(rows, 8, 3, 1), k = random_matrix(keys, 8, 3, 2),
                       v = random_matrix(keys, 6, 1, 3);
        const OneHead t = by_formula(q, k, v, 0.35, causal);
        for (const Index block_m : {1, 16, 64})
          for (const Index block_n : {1, 5, 16, 64}) {
            INFO(rows << " rows, " << keys << " keys, tiles " << block_m << " x " << block_n
                      << ", threshold " << threshold << (causal ? ", causal" : ""));
            check_close(flash3::forward(q, k, v, 0.35, causal, block_m, block_n, threshold), t);
          }
      }
}

TEST_CASE("the lazy rescale is rare and exact for growing scores", "[algorithm]") {
  const MatrixXd q = random_matrix(64, 64, 1, 1), k = random_matrix(512, 64, 1, 2),
                 v = random_matrix(512, 8, 1, 3);
  const double scale = 1 / std::sqrt(64.0);
  const flash3::Result always = flash3::forward(q, k, v, scale, false, 64, 16, 0),
                       lazy = flash3::forward(q, k, v, scale, false, 64, 16, kThreshold);
  check_close(lazy, by_formula(q, k, v, scale, false));
  CHECK(always.rescales > 64);
  CHECK(lazy.rescales == 0);
  // Maxima that grow with each block, up to 1e4: every block causes a rescale.
  MatrixXd ones = MatrixXd::Ones(3, 1), keys(32, 1);
  for (Index j = 0; j < 32; ++j) keys(j, 0) = 1e4 * double(j - 16) / 16;
  const flash3::Result grows =
      flash3::forward(ones, keys, v.topRows(32), 1, false, 2, 4, kThreshold);
  check_close(grows, by_formula(ones, keys, v.topRows(32), 1, false));
  CHECK(grows.rescales == 3 * 7);
}
