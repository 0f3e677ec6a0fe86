// Dot products of a few packed rows (queries, or inputs of a linear layer) with many rows of
// memory (keys, or weights), each of which is read once.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Rows that share one pass over the memory, at most.
constexpr int kRowBlock = 4;

// How the packed rows are kept, and one step of 2 W elements.
template <class T>
struct Dot {
  typedef float Packed;
  typedef Pair Operand;
  RADAR_INLINE void pack(float* to, const typename T::Storage* from, int64_t count) {
    const Pair pair = count >= kPair ? T::load_pair(from) : T::load_part(from, count);
    store(to, pair.a);
    store(to + W, pair.b);
  }
  RADAR_INLINE Pair packed(const float* p) { return {load(p), load(p + W)}; }
  RADAR_INLINE Pair memory(const typename T::Storage* p) { return T::load_pair(p); }
  RADAR_INLINE Pair memory_part(const typename T::Storage* p, int64_t n) {
    return T::load_part(p, n);
  }
  RADAR_INLINE Vector step(Vector sum, Pair x, Pair y) { return sum + x.a * y.a + x.b * y.b; }
};

#if defined(RADAR_ISA_AVX512_BF16)
// Both operands are bfloat16 already: their products are exact in the float32 sum.
template <>
struct Dot<BFloat16> {
  typedef uint16_t Packed;
  typedef __m512i Operand;
  RADAR_INLINE void pack(uint16_t* to, const uint16_t* from, int64_t count) {
    const __m512i words = count >= kPair ? memory(from) : memory_part(from, count);
    _mm512_storeu_si512(to, words);
  }
  RADAR_INLINE __m512i packed(const uint16_t* p) { return _mm512_loadu_si512(p); }
  RADAR_INLINE __m512i memory(const uint16_t* p) { return _mm512_loadu_si512(p); }
  RADAR_INLINE __m512i memory_part(const uint16_t* p, int64_t n) {
    return (__m512i)BFloat16::load_words_part(p, n);
  }
  RADAR_INLINE Vector step(Vector sum, __m512i x, __m512i y) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
  }
};
#endif

RADAR_INLINE int64_t padded(int64_t count) { return (count + kPair - 1) / kPair * kPair; }

template <class T>
RADAR_INLINE void pack_row(typename Dot<T>::Packed* to, const typename T::Storage* from,
                           int64_t count) {
  for (int64_t d = 0; d < count; d += kPair) Dot<T>::pack(to + d, from + d, count - d);
}

// The shape of one block: R rows times K lines of memory in G groups of W sums.
template <int R>
struct DotShape {
  static constexpr int kSlots = R == 3 ? 4 : R;
  static constexpr int kLines = W / kSlots;
  static constexpr int kGroups = W == 4 ? 2 : 1;
  static constexpr int kBlock = kLines * kGroups;
};

// Sums of R packed rows with kBlock lines: result lane r * kLines + i of group g belongs to row r
// and line g * kLines + i. `ahead` (bytes, 0 for none) prefetches that much further on each line.
template <class T, int R>
RADAR_INLINE void dot_block(const typename Dot<T>::Packed* rows, int64_t row_stride,
                            const typename T::Storage* const* lines, int64_t count, int64_t ahead,
                            Vector* result) {
  using D = Dot<T>;
  using Shape = DotShape<R>;
  Vector sums[Shape::kGroups][W] = {};
  const int64_t whole = count / kPair * kPair;
  for (int64_t d = 0; d < whole; d += kPair) {
#pragma GCC unroll 16
    for (int k = 0; k < Shape::kBlock; ++k) {
      const typename D::Operand y = D::memory(lines[k] + d);
      if (ahead) {
        const char* next = (const char*)(lines[k] + d) + ahead;
        __builtin_prefetch(next, 0, 2);
        if (sizeof(typename T::Storage) * kPair > 64) __builtin_prefetch(next + 64, 0, 2);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vector& sum = sums[k / Shape::kLines][r * Shape::kLines + k % Shape::kLines];
        sum = D::step(sum, D::packed(rows + r * row_stride + d), y);
      }
    }
  }
  if (whole < count) {
#pragma GCC unroll 16
    for (int k = 0; k < Shape::kBlock; ++k) {
      const typename D::Operand y = D::memory_part(lines[k] + whole, count - whole);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vector& sum = sums[k / Shape::kLines][r * Shape::kLines + k % Shape::kLines];
        sum = D::step(sum, D::packed(rows + r * row_stride + whole), y);
      }
    }
  }
  for (int g = 0; g < Shape::kGroups; ++g) result[g] = sum_lanes(sums[g]);
}

// result[r * result_stride + i] = row r . line i for i < lines; up to a block's width is written
// past the last line.
template <class T, int R>
static inline void dot_rows(const typename Dot<T>::Packed* rows, int64_t row_stride,
                            const typename T::Storage* memory, int64_t line_stride, int64_t lines,
                            int64_t count, int64_t ahead, float* result, int64_t result_stride) {
  using Shape = DotShape<R>;
  for (int64_t i = 0; i < lines; i += Shape::kBlock) {
    const typename T::Storage* pointers[Shape::kBlock];
    for (int k = 0; k < Shape::kBlock; ++k) {
      const int64_t line = i + k < lines ? i + k : lines - 1;
      pointers[k] = memory + line * line_stride;
    }
    Vector sums[Shape::kGroups];
    dot_block<T, R>(rows, row_stride, pointers, count, ahead, sums);
    for (int g = 0; g < Shape::kGroups; ++g) {
      float lanes[W];
      store(lanes, sums[g]);
      for (int r = 0; r < R; ++r) {
        __builtin_memcpy(result + r * result_stride + i + g * Shape::kLines,
                         lanes + r * Shape::kLines, Shape::kLines * sizeof(float));
      }
    }
  }
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
