// Vectors of W floats in the compiler's own notation, the same source for every instruction set.
// Elements are loaded 2 W at a time into a Pair. For bfloat16 the pair holds the even and the odd
// elements, because then each half costs one shift or one mask; everything that a pair meets
// (packed queries, accumulators) has the same order, and storing a pair undoes it.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define RADAR_INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define RADAR_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RADAR_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VectorI){__VA_ARGS__})
#endif

namespace radar {
namespace RADAR_ISA_NAME {

constexpr int W = RADAR_VECTOR_BYTES / 4;
constexpr int kPair = 2 * W;

typedef float Vector __attribute__((vector_size(RADAR_VECTOR_BYTES)));
typedef int32_t VectorI __attribute__((vector_size(RADAR_VECTOR_BYTES)));
typedef uint32_t VectorU __attribute__((vector_size(RADAR_VECTOR_BYTES)));
typedef uint8_t VectorB __attribute__((vector_size(RADAR_VECTOR_BYTES / 4)));

struct Pair {
  Vector a, b;
};

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = __FLT_MAX__;

RADAR_INLINE Vector broadcast(float x) { return Vector{} + x; }
RADAR_INLINE Vector load(const float* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
RADAR_INLINE void store(float* p, Vector v) { __builtin_memcpy(p, &v, sizeof v); }
RADAR_INLINE VectorU load_words(const void* p) {
  VectorU v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
RADAR_INLINE Vector select(VectorI condition, Vector yes, Vector no) {
  return condition ? yes : no;
}
// Keeps the compiler from fusing a product with the sum that follows: both round, as in PyTorch,
// so that equal logits stay equal.
RADAR_INLINE Vector rounded(Vector v) {
#if defined(__x86_64__)
  __asm__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#else
  volatile Vector kept = v;
  v = kept;
#endif
  return v;
}
// The larger of the two; a NaN in x is passed over (it stays in the logits themselves).
RADAR_INLINE Vector maximum(Vector x, Vector running) { return select(x > running, x, running); }

// All bits set in the lanes whose byte is not 0.
RADAR_INLINE VectorI lanes_set(const uint8_t* bytes) {
  VectorB v;
  __builtin_memcpy(&v, bytes, sizeof v);
  return __builtin_convertvector(v, VectorI) != 0;
}

// One bit a lane of a comparison's result.
RADAR_INLINE uint32_t lane_bits(VectorI condition) {
#if RADAR_VECTOR_BYTES == 64
  return (uint32_t)_mm512_movepi32_mask((__m512i)condition);
#elif RADAR_VECTOR_BYTES == 32
  return (uint32_t)_mm256_movemask_ps((__m256)condition);
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)condition);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= (uint32_t)(condition[i] & 1) << i;
  return bits;
#endif
}

// ---- sums of many vectors at once -----------------------------------------------------------
// sum_lanes: lane i of the result is the sum of the lanes of v[i]. The halves of two vectors are
// folded into one until one vector is left, which takes 3 operations a vector instead of the
// 2 log2(W) of one horizontal sum after the other.

#if RADAR_VECTOR_BYTES == 64
#define RADAR_UNPACK_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define RADAR_UNPACK_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define RADAR_MOVE_LOW 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define RADAR_MOVE_HIGH 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif RADAR_VECTOR_BYTES == 32
#define RADAR_UNPACK_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define RADAR_UNPACK_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define RADAR_MOVE_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define RADAR_MOVE_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#else
#define RADAR_UNPACK_LOW 0, 4, 1, 5
#define RADAR_UNPACK_HIGH 2, 6, 3, 7
#define RADAR_MOVE_LOW 0, 1, 4, 5
#define RADAR_MOVE_HIGH 2, 3, 6, 7
#endif

// Takes elements of two vectors in turn.
#if RADAR_VECTOR_BYTES == 64
#define RADAR_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define RADAR_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif RADAR_VECTOR_BYTES == 32
#define RADAR_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define RADAR_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define RADAR_ZIP_LOW 0, 4, 1, 5
#define RADAR_ZIP_HIGH 2, 6, 3, 7
#endif

RADAR_INLINE Vector fold_unpack(Vector a, Vector b) {
  return RADAR_SHUFFLE(a, b, RADAR_UNPACK_LOW) + RADAR_SHUFFLE(a, b, RADAR_UNPACK_HIGH);
}
RADAR_INLINE Vector fold_move(Vector a, Vector b) {
  return RADAR_SHUFFLE(a, b, RADAR_MOVE_LOW) + RADAR_SHUFFLE(a, b, RADAR_MOVE_HIGH);
}
RADAR_INLINE Vector sum_quad(Vector v0, Vector v1, Vector v2, Vector v3) {
  return fold_move(fold_unpack(v0, v1), fold_unpack(v2, v3));
}

#if RADAR_VECTOR_BYTES == 64
RADAR_INLINE Vector fold_halves(Vector a, Vector b) {
  return RADAR_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         RADAR_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
RADAR_INLINE Vector fold_quarters(Vector a, Vector b) {
  return RADAR_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
         RADAR_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
RADAR_INLINE Vector sum_lanes(const Vector* v) {
  Vector u[4];
  for (int i = 0; i < 4; ++i) {
    u[i] = fold_quarters(fold_halves(v[i], v[i + 8]), fold_halves(v[i + 4], v[i + 12]));
  }
  return sum_quad(u[0], u[1], u[2], u[3]);
}
#elif RADAR_VECTOR_BYTES == 32
RADAR_INLINE Vector fold_halves(Vector a, Vector b) {
  return RADAR_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         RADAR_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
RADAR_INLINE Vector sum_lanes(const Vector* v) {
  return sum_quad(fold_halves(v[0], v[4]), fold_halves(v[1], v[5]), fold_halves(v[2], v[6]),
                  fold_halves(v[3], v[7]));
}
#else
RADAR_INLINE Vector sum_lanes(const Vector* v) { return sum_quad(v[0], v[1], v[2], v[3]); }
#endif

// Every lane of the result is the sum, or the maximum, of the lanes of v.
#if RADAR_VECTOR_BYTES == 64
#define RADAR_ROTATE_HALF 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define RADAR_ROTATE_QUARTER 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define RADAR_ROTATE_PAIR 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define RADAR_ROTATE_ONE 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif RADAR_VECTOR_BYTES == 32
#define RADAR_ROTATE_QUARTER 4, 5, 6, 7, 0, 1, 2, 3
#define RADAR_ROTATE_PAIR 2, 3, 0, 1, 6, 7, 4, 5
#define RADAR_ROTATE_ONE 1, 0, 3, 2, 5, 4, 7, 6
#else
#define RADAR_ROTATE_PAIR 2, 3, 0, 1
#define RADAR_ROTATE_ONE 1, 0, 3, 2
#endif

RADAR_INLINE float sum_across(Vector v) {
#if RADAR_VECTOR_BYTES == 64
  v += RADAR_SHUFFLE(v, v, RADAR_ROTATE_HALF);
#endif
#if RADAR_VECTOR_BYTES >= 32
  v += RADAR_SHUFFLE(v, v, RADAR_ROTATE_QUARTER);
#endif
  v += RADAR_SHUFFLE(v, v, RADAR_ROTATE_PAIR);
  v += RADAR_SHUFFLE(v, v, RADAR_ROTATE_ONE);
  return v[0];
}
RADAR_INLINE float maximum_across(Vector v) {
#if RADAR_VECTOR_BYTES == 64
  v = maximum(RADAR_SHUFFLE(v, v, RADAR_ROTATE_HALF), v);
#endif
#if RADAR_VECTOR_BYTES >= 32
  v = maximum(RADAR_SHUFFLE(v, v, RADAR_ROTATE_QUARTER), v);
#endif
  v = maximum(RADAR_SHUFFLE(v, v, RADAR_ROTATE_PAIR), v);
  v = maximum(RADAR_SHUFFLE(v, v, RADAR_ROTATE_ONE), v);
  return v[0];
}

// ---- functions ------------------------------------------------------------------------------

// e^x for x <= 0 (and NaN), within 1.5 ulp; 0 where the result would be subnormal.
// x = n ln 2 + r with |r| <= ln(2) / 2; e^r = 1 + r + r^2 p(r), p a minimax polynomial of degree 4.
RADAR_INLINE Vector exp_nonpositive(Vector x) {
  x = maximum(broadcast(-88.0f), x);                     // there 2^n is 0
  const Vector shifted = x * 1.44269504f + 12582912.0f;  // n sits in the low bits of 1.5 * 2^23
  const Vector n = shifted - 12582912.0f;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = broadcast(1.3814602e-3f);
  p = p * r + 8.3687156e-3f;
  p = p * r + 4.1668389e-2f;
  p = p * r + 1.66665211e-1f;
  p = p * r + 4.9999994e-1f;
  const Vector e = (r * r) * p + r + 1.0f;
  const Vector power = (Vector)(((VectorI)shifted << 23) + 0x3f800000);
  return e * power;
}

// tanh: x + x^3 p(x^2) below 0.625, 1 - 2 / (e^2|x| + 1) above.
RADAR_INLINE Vector tanh(Vector x) {
  const Vector magnitude = (Vector)((VectorI)x & 0x7fffffff);
  const VectorI sign = (VectorI)x & (int32_t)0x80000000;
  const Vector e = exp_nonpositive(magnitude * -2.0f);
  const Vector large = (Vector)((VectorI)((1.0f - e) / (1.0f + e)) | sign);
  const Vector z = x * x;
  Vector p = broadcast(-5.717037e-3f);
  p = p * z + 2.065058e-2f;
  p = p * z + -5.3743497e-2f;
  p = p * z + 1.3331491e-1f;
  p = p * z + -3.3333284e-1f;
  return select(magnitude < 0.625f, x * z * p + x, large);
}

// ---- element types --------------------------------------------------------------------------

// A part of a pair through memory, for the instruction sets without masked loads.
template <class T>
RADAR_INLINE Pair load_part_copied(const typename T::Storage* p, int64_t count) {
  typename T::Storage copy[kPair] = {};
  for (int64_t i = 0; i < count; ++i) copy[i] = p[i];
  return T::load_pair(copy);
}
template <class T>
RADAR_INLINE void store_part_copied(typename T::Storage* p, int64_t count, Pair pair) {
  typename T::Storage copy[kPair];
  T::store_pair(copy, pair);
  for (int64_t i = 0; i < count; ++i) p[i] = copy[i];
}

struct Float32 {
  typedef float Storage;
  static constexpr bool kSplitsPairs = false;  // whether a pair holds even and odd elements
  RADAR_INLINE Pair load_pair(const float* p) { return {load(p), load(p + W)}; }
  RADAR_INLINE void store_pair(float* p, Pair pair) {
    store(p, pair.a);
    store(p + W, pair.b);
  }
  RADAR_INLINE void store_weights(float* p, Pair pair) { store_pair(p, pair); }
#if RADAR_VECTOR_BYTES == 64
  RADAR_INLINE Pair load_part(const float* p, int64_t count) {
    const uint32_t lanes = (uint32_t)((1ull << count) - 1);
    return {(Vector)_mm512_maskz_loadu_ps((__mmask16)lanes, p),
            (Vector)_mm512_maskz_loadu_ps((__mmask16)(lanes >> 16), p + W)};
  }
#else
  RADAR_INLINE Pair load_part(const float* p, int64_t count) {
    return load_part_copied<Float32>(p, count);
  }
#endif
  RADAR_INLINE void store_part(float* p, int64_t count, Pair pair) {
    store_part_copied<Float32>(p, count, pair);
  }
  RADAR_INLINE float to_float(float x) { return x; }
};

struct BFloat16 {
  typedef uint16_t Storage;
  static constexpr bool kSplitsPairs = true;
  RADAR_INLINE Pair split(VectorU words) {
    return {(Vector)(words << 16), (Vector)(words & 0xffff0000u)};
  }
  // Round to nearest even in the upper half of each word; NaN stays NaN.
  RADAR_INLINE VectorU round_up_half(Vector x) {
    const VectorU bits = (VectorU)x;
    const VectorU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (VectorU)select(x == x, (Vector)rounded, (Vector)(bits | 0x400000u));
  }
  // Softmax weights: positive, so halves may be rounded up; NaN stays NaN.
  RADAR_INLINE void store_weights(uint16_t* p, Pair pair) {
    const VectorU words = (((VectorU)pair.a + 0x8000u) >> 16) |
                          (((VectorU)pair.b + 0x8000u) & 0xffff0000u);
    __builtin_memcpy(p, &words, sizeof words);
  }
  RADAR_INLINE Pair load_pair(const uint16_t* p) { return split(load_words(p)); }
  RADAR_INLINE void store_pair(uint16_t* p, Pair pair) {
    const VectorU words =
        (round_up_half(pair.a) >> 16) | (round_up_half(pair.b) & 0xffff0000u);
    __builtin_memcpy(p, &words, sizeof words);
  }
#if RADAR_VECTOR_BYTES == 64
  RADAR_INLINE VectorU load_words_part(const uint16_t* p, int64_t count) {
    return (VectorU)_mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
  }
  RADAR_INLINE Pair load_part(const uint16_t* p, int64_t count) {
    return split(load_words_part(p, count));
  }
#else
  RADAR_INLINE Pair load_part(const uint16_t* p, int64_t count) {
    return load_part_copied<BFloat16>(p, count);
  }
#endif
  RADAR_INLINE void store_part(uint16_t* p, int64_t count, Pair pair) {
    store_part_copied<BFloat16>(p, count, pair);
  }
  RADAR_INLINE float to_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
  }
};

struct Float16 {
  typedef uint16_t Storage;
  static constexpr bool kSplitsPairs = false;
#if RADAR_VECTOR_BYTES == 64
  RADAR_INLINE Vector load_half(const uint16_t* p) {
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  }
  RADAR_INLINE void store_half(uint16_t* p, Vector v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
  RADAR_INLINE Pair load_part(const uint16_t* p, int64_t count) {
    const __m512i words = _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), p);
    return {(Vector)_mm512_cvtph_ps(_mm512_castsi512_si256(words)),
            (Vector)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
  }
#elif RADAR_VECTOR_BYTES == 32
  RADAR_INLINE Vector load_half(const uint16_t* p) {
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  }
  RADAR_INLINE void store_half(uint16_t* p, Vector v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__aarch64__)
  RADAR_INLINE Vector load_half(const uint16_t* p) {
    return (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  RADAR_INLINE void store_half(uint16_t* p, Vector v) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
  }
#else
  // The exponent is moved by a multiplication with 2^112, which also normalises subnormals.
  RADAR_INLINE Vector load_half(const uint16_t* p) {
    VectorI h;
    for (int i = 0; i < W; ++i) h[i] = p[i];
    const VectorI magnitude = (h & 0x7fff) << 13;
    const VectorI scaled = (VectorI)((Vector)magnitude * 0x1p112f);
    const VectorI special = (h & 0x7c00) == 0x7c00;
    return (Vector)((special & (magnitude | 0x7f800000)) | (~special & scaled) |
                    ((h & 0x8000) << 16));
  }
  RADAR_INLINE uint16_t to_half(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to 65536 or more
    if (bits >= 0x38800000u) {
      const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
      return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
    }
    // Subnormal: adding 0.5 leaves the value, rounded to 2^-24, in the low bits.
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    __builtin_memcpy(&bits, &magnitude, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  RADAR_INLINE void store_half(uint16_t* p, Vector v) {
    for (int i = 0; i < W; ++i) p[i] = to_half(v[i]);
  }
#endif
  RADAR_INLINE Pair load_pair(const uint16_t* p) { return {load_half(p), load_half(p + W)}; }
  RADAR_INLINE void store_pair(uint16_t* p, Pair pair) {
    store_half(p, pair.a);
    store_half(p + W, pair.b);
  }
  RADAR_INLINE void store_weights(uint16_t* p, Pair pair) { store_pair(p, pair); }
#if RADAR_VECTOR_BYTES != 64
  RADAR_INLINE Pair load_part(const uint16_t* p, int64_t count) {
    return load_part_copied<Float16>(p, count);
  }
#endif
  RADAR_INLINE void store_part(uint16_t* p, int64_t count, Pair pair) {
    store_part_copied<Float16>(p, count, pair);
  }
  RADAR_INLINE float to_float(uint16_t x) {
    uint16_t halves[W] = {x};
    return load_half(halves)[0];
  }
};

// Integers, read only.
struct Int8 {
  typedef int8_t Storage;
  static constexpr bool kSplitsPairs = false;
#if RADAR_VECTOR_BYTES == 64
  RADAR_INLINE Vector load_bytes(const int8_t* p) {
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
#elif RADAR_VECTOR_BYTES == 32
  RADAR_INLINE Vector load_bytes(const int8_t* p) {
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
#else
  RADAR_INLINE Vector load_bytes(const int8_t* p) {
    VectorI v;
    for (int i = 0; i < W; ++i) v[i] = p[i];
    return __builtin_convertvector(v, Vector);
  }
#endif
  RADAR_INLINE Pair load_pair(const int8_t* p) { return {load_bytes(p), load_bytes(p + W)}; }
  RADAR_INLINE Pair load_part(const int8_t* p, int64_t count) {
    return load_part_copied<Int8>(p, count);
  }
};

}  // namespace RADAR_ISA_NAME
}  // namespace radar
