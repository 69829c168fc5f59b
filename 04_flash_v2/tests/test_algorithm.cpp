// Tests of the CPU algorithm of chapter 04: the result does not depend on tile sizes.
#include "04_flash_v2/host/algorithm.h"
#include "tests/one_head.h"

using namespace attn::tests;
using flash2::BlockClass;

namespace {

void check_close(const flash2::Result& result, const OneHead& t) {
  attn::tests::check_close(result.o, result.lse, t);
}

}  // namespace

TEST_CASE("Algorithm 1 of FlashAttention-2 equals attention for all tile sizes", "[algorithm]") {
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
  MatrixXd q = MatrixXd::Ones(3, 1), k(32, 1), v = random_matrix(32, 4, 1, 7);
  for (Index j = 0; j < 32; ++j) k(j, 0) = 1e4 * double(j - 16) / 16;
  check_close(flash2::forward(q, k, v, 1, false, 2, 4), by_formula(q, k, v, 1, false));
  check_close(flash2::forward(q, -k, v, 1, false, 2, 4), by_formula(q, -k, v, 1, false));
}
