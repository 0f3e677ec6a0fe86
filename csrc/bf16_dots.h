// Products of bfloat16 pairs by AVX512_BF16: exact, summed in float32; numbers and sums that are
// subnormal count as 0.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

RADAR_INLINE void add_products(Vector& sum, VectorU x, VectorU y) {
  sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}

// How a packed row meets lines of memory: as it lies there.
struct WordDots {
  using Element = BFloat16;
  using Packed = uint16_t;
  using Line = VectorU;
  RADAR_INLINE Line packed(const uint16_t* p) { return load_words(p); }
  RADAR_INLINE Line line(const uint16_t* p) { return load_words(p); }
  RADAR_INLINE Line part(const uint16_t* p, int64_t count) {
    return BFloat16::load_words_part(p, count);
  }
  RADAR_INLINE void add(Vector& sum, const Line& x, const Line& y) { add_products(sum, x, y); }
  RADAR_INLINE void pack(uint16_t* to, const uint16_t* from, int64_t count) {
    __builtin_memset(to, 0, (uint64_t)padded(count) * sizeof *to);
    __builtin_memcpy(to, from, (uint64_t)count * sizeof *to);
  }
};

}  // namespace RADAR_ISA_NAME
}  // namespace radar
