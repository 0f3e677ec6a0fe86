// Products of bfloat16 decode attention by AVX512_BF16. With many rows values are taken two keys at
// a time; the weights of a row then become bfloat16, as in prefill.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// The same elements of two keys side by side: even elements, then odd ones, as a Pair has them.
struct KeyPair {
  VectorU even, odd;
};
RADAR_INLINE KeyPair pair_keys(VectorU first, VectorU second) {
  return {(first & 0xffffu) | (second << 16), (first >> 16) | (second & 0xffff0000u)};
}

// values_block for weights in pairs of keys [R, kTileKeys / 2].
template <int R, int B>
RADAR_INLINE void pair_values_block(const uint32_t* weights, const uint16_t* values, int64_t stride,
                                    int64_t count, int64_t part, const uint16_t* next,
                                    const float* correction, float* to, int64_t to_stride) {
  Pair sums[R][B];
  load_sums<R, B>(to, to_stride, correction, sums);
  const auto line = [&](int64_t key, int b) {
    if (key >= count) return VectorU{};
    const uint16_t* at = values + key * stride + b * kPair;
    return part ? BFloat16::load_words_part(at, part) : load_words(at);
  };
  for (int64_t n = 0; n < count; n += 2) {
    prefetch_beside(next, stride, n, B * kPair * (int64_t)sizeof(*values));
    prefetch_beside(next, stride, n + 1, B * kPair * (int64_t)sizeof(*values));
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const KeyPair keys = pair_keys(line(n, b), line(n + 1, b));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const VectorU weight = VectorU{} + weights[r * (kTileKeys / 2) + n / 2];
        add_products(sums[r][b].a, keys.even, weight);
        add_products(sums[r][b].b, keys.odd, weight);
      }
    }
  }
  store_sums<R, B>(sums, to, to_stride);
}

template <int R>
static inline void add_pair_values(const uint32_t* weights, const uint16_t* values, int64_t stride,
                                   int64_t count, int64_t dim, const uint16_t* next,
                                   const float* correction, float* to, int64_t to_stride) {
  constexpr int kWide = R > 2 ? 2 : 4;
  int64_t d = 0;
  const auto soon = [&] { return next ? next + d : nullptr; };
  for (; d + kWide * kPair <= dim; d += kWide * kPair) {
    pair_values_block<R, kWide>(weights, values + d, stride, count, 0, soon(), correction, to + d,
                                to_stride);
  }
  for (; d + kPair <= dim; d += kPair) {
    pair_values_block<R, 1>(weights, values + d, stride, count, 0, soon(), correction, to + d,
                            to_stride);
  }
  if (d < dim) {
    pair_values_block<R, 1>(weights, values + d, stride, count, dim - d, soon(), correction, to + d,
                            to_stride);
  }
}

class PairProducts : public VectorProducts<WordDots> {
  using Base = VectorProducts<WordDots>;

 public:
  using Base::Base;

  void values(const float* weights, const Storage* values, const int32_t* list, int64_t count,
              const float* correction, float* to) {
    if (list) return Base::values(weights, values, list, count, correction, to);
    const int64_t stride = call_.value_stride[2], size = call_.value_dim;
    for (int64_t r = 0; r < call_.rows;) {
      const int64_t left = call_.rows - r;
      const int64_t taken = left < 4 ? left : 4;
      uint32_t pairs[4 * kTileKeys / 2];
      for (int64_t i = 0; i < taken * kTileKeys; i += kPair) {
        const float* from = weights + r * kTileKeys + i;
        const __m512bh words = _mm512_cvtne2ps_pbh((__m512)load(from + W), (__m512)load(from));
        __builtin_memcpy(pairs + i / 2, &words, sizeof words);
      }
      const auto add = taken == 4   ? add_pair_values<4>
                       : taken == 3 ? add_pair_values<3>
                       : taken == 2 ? add_pair_values<2>
                                    : add_pair_values<1>;
      add(pairs, values, stride, count, size, next_values_, correction + r, to + r * padded(size),
          padded(size));
      next_values_ = nullptr;
      r += taken;
    }
  }
};

// With more rows multiplying takes longer than memory.
constexpr int64_t kLeastPairedRows = 5;

static void decode_bf16_chunk(const AttentionCall& call, const KeyChunk& chunk,
                              const KeyChunk* next, float* partial, void* scratch) {
  if (call.rows < kLeastPairedRows) {
    decode_chunk<VectorProducts<WordDots>>(call, chunk, next, partial, scratch);
  } else {
    decode_chunk<PairProducts>(call, chunk, next, partial, scratch);
  }
}

static DecodeKernels decode_bf16_kernels() {
  return {scratch_bytes<PairProducts>, partial_floats, decode_bf16_chunk, decode_fold,
          decode_finish<BFloat16>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
