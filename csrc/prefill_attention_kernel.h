// The parts of prefill attention that are not matrix products: packing keys and values for them,
// and the online softmax between them. T is what is in memory, C what the products read.
//
// The order of elements follows the pairs of C and T: weights are stored pair by pair, so the rows
// of packed values are paired likewise, and the columns of the values lie in the order in which a
// pair of T is stored in the end.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0 (and NaN); 0 below 2^-126. x = n + f with |f| <= 1/2, 2^f a minimax polynomial:
// off by 7.5e-8 where the weights are float32, by 2.6e-6 where they are rounded to 16 bits.
template <class C>
RADAR_INLINE Vector exp2_nonpositive(Vector x) {
  x = maximum(broadcast(-127.0f), x);  // there the power is 0
  const Vector shifted = x + 12582912.0f;
  const Vector f = x - (shifted - 12582912.0f);
  Vector p;
  if (sizeof(typename C::Storage) == 4) {
    p = broadcast(1.3276472e-3f);
    p = p * f + 9.6755410e-3f;
    p = p * f + 5.5507131e-2f;
    p = p * f + 2.4022120e-1f;
    p = p * f + 6.9314694e-1f;
    p = p * f + 1.0f;
  } else {
    p = broadcast(9.5701021e-3f);
    p = p * f + 5.5917859e-2f;
    p = p * f + 2.4024744e-1f;
    p = p * f + 6.9312179e-1f;
    p = p * f + 0.99999928f;
  }
  return p * (Vector)(((VectorI)shifted << 23) + 0x3f800000);
}
RADAR_INLINE float exp2_scalar(float x) { return exp2_nonpositive<Float32>(broadcast(x))[0]; }

// ---- packing ------------------------------------------------------------------------------------

// Column i of the W rows becomes row i.
RADAR_INLINE void transpose_words(VectorU* rows) {
#if defined(__clang__)
  uint32_t in[W][W], out[W][W];
  __builtin_memcpy(in, rows, sizeof in);
  for (int r = 0; r < W; ++r) {
    for (int c = 0; c < W; ++c) out[c][r] = in[r][c];
  }
  __builtin_memcpy(rows, out, sizeof out);
#else
  VectorI lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int step = W / 2; step >= 1; step /= 2) {
    const VectorI high = (lane & step) != 0;
    const VectorI first = high ? lane - step + W : lane;
    const VectorI second = high ? lane + W : lane + step;
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) {
      if (r & step) continue;
      const VectorU a = rows[r], b = rows[r + step];
      rows[r] = __builtin_shuffle(a, b, first);
      rows[r + step] = __builtin_shuffle(a, b, second);
    }
  }
#endif
}

// kPair elements from `at` on of a row of `count`, zeros after its end.
template <class T>
RADAR_INLINE Pair row_pair(const typename T::Storage* row, int64_t at, int64_t count) {
  return count - at >= kPair ? T::load_pair(row + at) : T::load_part(row + at, count - at);
}
RADAR_INLINE VectorU row_words(const uint16_t* row, int64_t at, int64_t count) {
  if (count - at >= kPair) return load_words(row + at);
  uint16_t copy[kPair] = {};
  for (int64_t i = at; i < count; ++i) copy[i - at] = row[i];
  return load_words(copy);
}

template <class T>
RADAR_INLINE const typename T::Storage* head_row(const void* memory, const int64_t* stride,
                                                 int64_t batch, int64_t head, int64_t token) {
  return (const typename T::Storage*)memory + batch * stride[0] + head * stride[1] +
         token * stride[2];
}

RADAR_INLINE bool can_read(const uint8_t* readable, int64_t start, int64_t end, int64_t key) {
  return start + key < end && (!readable || readable[key]);
}

template <class T, class C>
static void prefill_pack_keys(const AttentionCall& call, int64_t batch, int64_t kv_head,
                              int64_t start, int64_t end, const uint8_t* readable, void* to) {
  constexpr bool kHalf = sizeof(typename C::Storage) == 2;
  for (int64_t key = 0; key < kBlockKeys; key += W) {
    for (int64_t d = 0; d < call.key_dim; d += kPair) {
      VectorU a[W], b[W];
      for (int i = 0; i < W; ++i) {
        a[i] = b[i] = VectorU{};
        if (!can_read(readable, start, end, key + i)) continue;
        const auto* row = head_row<T>(call.key, call.key_stride, batch, kv_head, start + key + i);
        if constexpr (kHalf) {
          a[i] = row_words(row, d, call.key_dim);
        } else {
          const Pair pair = row_pair<T>(row, d, call.key_dim);
          a[i] = (VectorU)pair.a;
          b[i] = (VectorU)pair.b;
        }
      }
      transpose_words(a);
      if constexpr (!kHalf) transpose_words(b);
      // Half: a row of W words holds elements 2 i and 2 i + 1 of W keys.
      uint32_t* out = (uint32_t*)to + (kHalf ? d / 2 : d) * kBlockKeys + key;
      for (int i = 0; i < W; ++i) {
        __builtin_memcpy(out + i * kBlockKeys, &a[i], sizeof a[i]);
        if constexpr (!kHalf) __builtin_memcpy(out + (W + i) * kBlockKeys, &b[i], sizeof b[i]);
      }
    }
  }
}

// Two value rows side by side, word by word; columns in the order of a pair of bfloat16.
RADAR_INLINE void join_rows(const uint16_t* low, const uint16_t* high, int64_t dim,
                            uint32_t* out) {
  for (int64_t d = 0; d < dim; d += kPair) {
    const VectorU a = low ? row_words(low, d, dim) : VectorU{};
    const VectorU b = high ? row_words(high, d, dim) : VectorU{};
    const VectorU even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
    __builtin_memcpy(out + d, &even, sizeof even);
    __builtin_memcpy(out + d + W, &odd, sizeof odd);
  }
}
RADAR_INLINE void join_rows_in_order(const uint16_t* low, const uint16_t* high, int64_t dim,
                                     uint32_t* out) {
  for (int64_t d = 0; d < padded(dim); ++d) {
    const uint32_t a = low && d < dim ? low[d] : 0u, b = high && d < dim ? high[d] : 0u;
    out[d] = a | (b << 16);
  }
}

template <class T, class C>
static void prefill_pack_values(const AttentionCall& call, int64_t batch, int64_t kv_head,
                                int64_t start, int64_t end, const uint8_t* readable, void* to) {
  using Storage = typename T::Storage;
  const int64_t dim = call.value_dim, width = padded(dim);
  const auto row = [&](int64_t key) -> const Storage* {
    if (!can_read(readable, start, end, key)) return nullptr;
    return head_row<T>(call.value, call.value_stride, batch, kv_head, start + key);
  };
  if constexpr (sizeof(typename C::Storage) == 4) {
    for (int64_t key = 0; key < kBlockKeys; ++key) {
      const Storage* from = row(key);
      float* out = (float*)to + key * width;
      for (int64_t d = 0; d < dim; d += kPair) {
        const Pair pair = from ? row_pair<T>(from, d, dim) : Pair{};
        store(out + d, pair.a);
        store(out + d + W, pair.b);
      }
    }
  } else {
    for (int64_t pair = 0; pair < kBlockKeys / 2; ++pair) {
      uint32_t* out = (uint32_t*)to + pair * width;
      if constexpr (C::kSplitsPairs) {
        const int64_t key = pair / W * kPair + pair % W;
        join_rows(row(key), row(key + W), dim, out);
      } else {
        join_rows_in_order(row(2 * pair), row(2 * pair + 1), dim, out);
      }
    }
  }
}

template <class T, class C>
static void prefill_pack_queries(const AttentionCall& call, const RowBlock& block, void* to) {
  const int64_t width = padded(call.key_dim);
  for (int64_t r = 0; r < block.rows(); ++r) {
    const auto* row = head_row<T>(call.query, call.query_stride, block.batch,
                                  block.head + r / block.tokens, block.token + r % block.tokens);
    if constexpr (sizeof(typename C::Storage) == 4) {
      SingleDots<T>::pack((float*)to + r * width, row, call.key_dim);
    } else {
      for (int64_t d = 0; d < call.key_dim; d += kPair) {
        const VectorU words = row_words(row, d, call.key_dim);
        __builtin_memcpy((uint16_t*)to + r * width + d, &words, sizeof words);
      }
    }
  }
}

// ---- scores -------------------------------------------------------------------------------------

static void prefill_adjust(const AttentionCall& call, const RowBlock& block,
                           const ScoreTile& tile) {
  const float inside = call.softcap != 0.0f ? call.scale / call.softcap : call.scale;
  const int64_t keys = call.keys - tile.start < tile.columns ? call.keys - tile.start : tile.columns;
  for (int64_t r = 0; r < block.rows(); ++r) {
    float* scores = tile.scores + r * kBlockKeys;
    for (int64_t i = 0; i < tile.columns; i += W) {
      Vector s = load(scores + i) * inside;
      if (call.softcap != 0.0f) s = tanh(s) * call.softcap;
      store(scores + i, s);
    }
    if (!call.mask) continue;
    const uint8_t* mask = call.mask + block.batch * call.mask_stride[0] +
                          (block.head + r / block.tokens) * call.mask_stride[1] +
                          (block.token + r % block.tokens) * call.mask_stride[2] +
                          tile.start * call.mask_stride[3];
    int64_t i = 0;
    if (call.mask_stride[3] == 1) {
      for (; i + W <= keys; i += W) {
        store(scores + i, select(lanes_set(mask + i), load(scores + i), broadcast(-kInfinity)));
      }
    }
    for (; i < keys; ++i) {
      if (!mask[i * call.mask_stride[3]]) scores[i] = -kInfinity;
    }
  }
}

// ---- online softmax -------------------------------------------------------------------------

// The rows' running maximum (of logits times log2 e) and sum.
constexpr int64_t kPrefillStats = 2;

// The weights of one row on the columns begin..end; returns the factor by which what the row has
// gathered before shrinks. `hidden` is -inf for keys left out, else 0.
template <class C, bool kHidden>
RADAR_INLINE float row_softmax(const float* scores, const float* hidden, float factor,
                               int64_t begin, int64_t end, float* stats,
                               typename C::Storage* weights) {
  // Two running maxima, so that one does not wait for the other.
  Vector top = broadcast(-kInfinity), other = top;
  for (int64_t i = begin; i < end; i += kPair) {
    Vector a = load(scores + i) * factor, b = load(scores + i + W) * factor;
    if (kHidden) {
      a += load(hidden + i);
      b += load(hidden + i + W);
    }
    top = maximum(a, top);
    other = maximum(b, other);
  }
  const float tile = maximum_across(maximum(top, other));
  const float before = stats[0];
  const float after = tile > before ? tile : before;
  const float point = reference_point(after);
  Vector sum = {}, second = {};
  for (int64_t i = begin; i < end; i += kPair) {
    // Rounded as for the maximum: of huge logits an ulp is many powers of two.
    Vector a = rounded(load(scores + i) * factor) - point;
    Vector b = rounded(load(scores + i + W) * factor) - point;
    if (kHidden) {
      a += load(hidden + i);
      b += load(hidden + i + W);
    }
    const Pair e = {exp2_nonpositive<C>(a), exp2_nonpositive<C>(b)};
    sum += e.a;
    second += e.b;
    C::store_weights(weights + i, e);
  }
  const float shrink = before == after ? 1.0f : exp2_scalar(before - point);
  stats[0] = after;
  stats[1] = stats[1] * shrink + sum_across(sum + second);
  return shrink;
}

// The pairs of a tile's columns that hold an anchored key.
struct AnchoredPairs {
  int32_t at[kBlockKeys / kPair];
  int64_t count = 0;
};

static inline void find_pairs(const float* factors, int64_t begin, int64_t end,
                              AnchoredPairs* pairs) {
  for (int64_t i = begin; i < end; i += kPair) {
    bool any = false;
    for (int64_t j = 0; j < kPair; ++j) any |= factors[i + j] != 0.0f;
    if (any) pairs->at[pairs->count++] = (int32_t)i;
  }
}

// Anchors are few and come in runs: their bias is added to the scores themselves, so that the
// softmax need not look for it.
RADAR_INLINE void add_bias(float* scores, const float* factors, const AnchoredPairs& pairs,
                           float bias, float most) {
  bias = bias > most ? most : bias < -most ? -most : bias;
  for (int64_t n = 0; n < pairs.count; ++n) {
    for (int64_t i = pairs.at[n]; i < pairs.at[n] + kPair; i += W) {
      const Vector added = load(factors + i) * bias;
      const Vector least = select(added < -most, broadcast(-most), added);
      store(scores + i, load(scores + i) + select(least > most, broadcast(most), least));
    }
  }
}

template <class C>
static void prefill_weights(const AttentionCall& call, const RowBlock& block,
                            const ScoreTile& tile, bool adjusted, int64_t begin, int64_t end,
                            const float* factors, const float* hidden, float* stats, void* to,
                            float* values) {
  using Storage = typename C::Storage;
  const float scale = adjusted ? 1.0f : call.scale;
  const int64_t width = padded(call.value_dim);
  AnchoredPairs pairs;
  if (factors) find_pairs(factors, begin, end, &pairs);
  // A bias beyond this decides everything, and stays finite when scaled.
  constexpr float kDecisive = 1e37f;
  const float most = kDecisive / (scale > 1.0f ? scale : 1.0f);
  for (int64_t r = 0; r < block.rows(); ++r) {
    const int64_t head = block.head + r / block.tokens, token = block.token + r % block.tokens;
    Storage* weights = (Storage*)to + r * kBlockKeys;
    float* scores = tile.scores + r * kBlockKeys;
    int64_t first = call.first_key(block.batch, token) - tile.start;
    int64_t last = call.last_key(block.batch, token) - tile.start;
    first = first > begin ? first : begin;
    last = last < end ? last : end;
    if (last <= first) {
      __builtin_memset(weights + begin, 0, (uint64_t)(end - begin) * sizeof(Storage));
      continue;
    }
    if (pairs.count) {
      const float bias = call.bias[block.batch * call.bias_stride + head];
      add_bias(scores, factors, pairs, bias / scale, most);
    }
    const int64_t from = first / kPair * kPair, until = padded(last);
    for (int64_t i = from; i < first; ++i) scores[i] = -kInfinity;
    for (int64_t i = last; i < until; ++i) scores[i] = -kInfinity;
    __builtin_memset(weights + begin, 0, (uint64_t)(from - begin) * sizeof(Storage));
    __builtin_memset(weights + until, 0, (uint64_t)(end - until) * sizeof(Storage));
    const float shrink =
        hidden ? row_softmax<C, true>(scores, hidden, scale * kLog2E, from, until,
                                     stats + r * kPrefillStats, weights)
              : row_softmax<C, false>(scores, nullptr, scale * kLog2E, from, until,
                                      stats + r * kPrefillStats, weights);
    if (shrink != 1.0f) {
      float* row = values + r * width;
      for (int64_t d = 0; d < width; d += W) store(row + d, load(row + d) * shrink);
    }
  }
}

static void prefill_sum_rows(const float* rows, const float* factors, int64_t count,
                             int64_t columns, float* to) {
  for (int64_t i = 0; i < columns; i += kPair) {
    Vector a = {}, b = {};
    for (int64_t r = 0; r < count; ++r) {
      a += load(rows + r * kBlockKeys + i) * factors[r];
      b += load(rows + r * kBlockKeys + i + W) * factors[r];
    }
    store(to + i, a);
    store(to + i + W, b);
  }
}

// ---- the epilogue -----------------------------------------------------------------------------

RADAR_INLINE double prefill_log_sum(const float* stats) {
  if (stats[1] == 0.0f) return -kInfinity;
  return (double)reference_point(stats[0]) * 0.69314718055994531 +
         __builtin_log((double)stats[1]);
}

// log(e^sum + e^logit)
RADAR_INLINE double add_to_log_sum(double sum, double logit) {
  if (sum == -kInfinity) return logit;
  if (logit == -kInfinity) return sum;
  const double larger = sum > logit ? sum : logit, smaller = sum > logit ? logit : sum;
  return larger + __builtin_log1p(__builtin_exp(smaller - larger));
}

RADAR_INLINE float at_most_finite(float x) { return x > kLargest ? kLargest : x; }

template <class T>
static void prefill_finish(const AttentionCall& call, const RowBlock& block,
                           const float* const* stats, const float* const* values) {
  const int64_t width = padded(call.value_dim);
  for (int64_t r = 0; r < block.rows(); ++r) {
    const OutputRow row = {block.batch, block.head + r / block.tokens,
                           block.token + r % block.tokens};
    const float* rest = values[0] + r * width;
    float sums[2] = {stats[0][r * kPrefillStats], stats[0][r * kPrefillStats + 1]};
    float keep = 1.0f;
    if (call.sinks) {
      const float sink = at_most_finite(call.sinks[row.head] * kLog2E);
      const float point = reference_point(sink > sums[0] ? sink : sums[0]);
      keep = exp2_scalar(sums[0] - point);
      sums[1] = sums[1] * keep + exp2_scalar(sink - point);
      sums[0] = point;
    }
    if (call.parts == 1) {
      finish_plain<T>(call, row, rest, keep * inverse(sums[1]));
      continue;
    }
    double rest_sum = prefill_log_sum(stats[0] + r * kPrefillStats);
    if (call.sinks) rest_sum = add_to_log_sum(rest_sum, (double)call.sinks[row.head]);
    const float* anchored = stats[1] + r * kPrefillStats;
    const double anchored_sum = prefill_log_sum(anchored);
    finish_parts<T>(call, row, {rest_sum, anchored_sum, anchored_sum}, rest,
                    keep * inverse(sums[1]), values[1] + r * width, inverse(anchored[1]));
  }
}

template <class T, class C>
static constexpr PrefillKernels prefill_kernels() {
  return {(int64_t)sizeof(typename C::Storage),
          kPair,
          prefill_pack_keys<T, C>,
          prefill_pack_values<T, C>,
          prefill_pack_queries<T, C>,
          prefill_adjust,
          prefill_weights<C>,
          prefill_sum_rows,
          prefill_finish<T>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
