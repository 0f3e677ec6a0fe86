// Matrix products of bfloat16 by AVX512_BF16, for prefill and segment_mass.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// R rows times V vectors of columns.
template <int R, int V>
static inline void word_product_block(int64_t inner, const uint16_t* a, int64_t lda,
                                      const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                                      bool add) {
  Vector sums[R][V] = {};
  if (add) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = load(c + r * ldc + v * W);
    }
  }
  for (int64_t k = 0; k < inner; k += 2) {
    VectorU columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = load_words(b + k / 2 * ldb + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      __builtin_memcpy(&pair, a + r * lda + k, sizeof pair);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) add_products(sums[r][v], columns[v], VectorU{} + pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * W, sums[r][v]);
  }
}

template <int V>
static inline void word_product_columns(int64_t rows, int64_t inner, const uint16_t* a, int64_t lda,
                                        const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                                        bool add) {
  constexpr int kRows = 6;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    word_product_block<kRows, V>(inner, a + r * lda, lda, b, ldb, c + r * ldc, ldc, add);
  }
  const auto rest = [&](auto block) {
    block(inner, a + r * lda, lda, b, ldb, c + r * ldc, ldc, add);
  };
  switch (rows - r) {
    case 5: rest(word_product_block<5, V>); break;
    case 4: rest(word_product_block<4, V>); break;
    case 3: rest(word_product_block<3, V>); break;
    case 2: rest(word_product_block<2, V>); break;
    case 1: rest(word_product_block<1, V>); break;
    default: break;
  }
}

// b holds pairs of rows side by side; `columns` is a multiple of kPair and `inner` of 2.
static void word_product(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t lda,
                         const void* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  constexpr int64_t kWide = 2 * kPair;
  const uint16_t* left = (const uint16_t*)a;
  const uint32_t* right = (const uint32_t*)b;
  int64_t column = 0;
  for (; column + kWide <= columns; column += kWide) {
    word_product_columns<4>(rows, inner, left, lda, right + column, ldb, c + column, ldc, add);
  }
  for (; column < columns; column += kPair) {
    word_product_columns<2>(rows, inner, left, lda, right + column, ldb, c + column, ldc, add);
  }
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
