// Logits of one row: the blend, its chunk maxima and masses, and the draw by Gumbel's trick.
//
// Selection needs no sort of the vocabulary. One pass leaves kChunkMaxima maxima of each chunk; from
// them follows a bound below which no token can be kept, and only the few chunks with a larger
// maximum are read again.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

typedef uint64_t VectorL __attribute__((vector_size(RADAR_VECTOR_BYTES)));
typedef int64_t VectorLI __attribute__((vector_size(RADAR_VECTOR_BYTES)));

constexpr int kHalf = W / 2;                // lanes of a VectorL
constexpr int kRunning = kChunkMaxima / W;  // vectors of a chunk's maxima
static_assert(kChunkTokens % (kPair * kRunning) == 0 && kChunkMaxima % W == 0, "whole vectors");

RADAR_INLINE VectorI infinite(Vector v) { return ((VectorI)v & 0x7fffffff) == 0x7f800000; }

// Infinite logits are rules, not measurements: they have no difference to scale.
RADAR_INLINE Vector blended(Vector full, Vector masked, float move) {
  return select(infinite(full) | infinite(masked), full, full + rounded((full - masked) * move));
}

// The place of each lane of a pair.
template <class T>
struct Places {
  VectorI a, b;
  Places() {
    for (int lane = 0; lane < W; ++lane) {
      a[lane] = T::kSplitsPairs ? 2 * lane : lane;
      b[lane] = T::kSplitsPairs ? 2 * lane + 1 : W + lane;
    }
  }
};

// Two vectors of logits from token `at` on; -inf beyond the row.
template <class T, bool kBlend>
RADAR_INLINE Pair logits_at(const LogitRow& row, const Places<T>& places, int64_t at) {
  using Storage = typename T::Storage;
  const Storage* full = (const Storage*)row.full + at;
  const int64_t left = row.tokens - at;
  if (left <= 0) return {broadcast(-kInfinity), broadcast(-kInfinity)};
  Pair x = left >= kPair ? T::load_pair(full) : T::load_part(full, left);
  if (kBlend) {
    const Storage* masked = (const Storage*)row.masked + at;
    const Pair y = left >= kPair ? T::load_pair(masked) : T::load_part(masked, left);
    x = {blended(x.a, y.a, row.move), blended(x.b, y.b, row.move)};
  }
  if (left < kPair) {
    const int32_t end = (int32_t)left;
    x.a = select(places.a < end, x.a, broadcast(-kInfinity));
    x.b = select(places.b < end, x.b, broadcast(-kInfinity));
  }
  return x;
}

template <class T>
static float logit_of(const LogitRow& row, int64_t token) {
  using Storage = typename T::Storage;
  const float full = T::to_float(((const Storage*)row.full)[token]);
  if (row.masked == nullptr) return full;
  const float masked = T::to_float(((const Storage*)row.masked)[token]);
  return blended(broadcast(full), broadcast(masked), row.move)[0];
}

// ---- maxima, counts, masses -----------------------------------------------------------------

template <class T, bool kBlend>
static void maxima_of(const LogitRow& row, int64_t begin, int64_t end, float* maxima) {
  const Places<T> places;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    Vector a[kRunning], b[kRunning];
    for (int i = 0; i < kRunning; ++i) a[i] = b[i] = broadcast(-kInfinity);
    for (int64_t at = 0; at < kChunkTokens; at += kPair * kRunning) {
      for (int i = 0; i < kRunning; ++i) {
        const Pair x = logits_at<T, kBlend>(row, places, chunk * kChunkTokens + at + i * kPair);
        a[i] = maximum(x.a, a[i]);
        b[i] = maximum(x.b, b[i]);
      }
    }
    for (int i = 0; i < kRunning; ++i) {
      store(maxima + chunk * kChunkMaxima + i * W, maximum(a[i], b[i]));
    }
  }
}

template <class T>
static void logit_maxima(const LogitRow& row, int64_t begin, int64_t end, float* maxima) {
  row.masked ? maxima_of<T, true>(row, begin, end, maxima)
             : maxima_of<T, false>(row, begin, end, maxima);
}

static float largest_of(const float* values, int64_t count) {
  Vector top = broadcast(-kInfinity);
  for (int64_t i = 0; i < count; i += W) top = maximum(load(values + i), top);
  return maximum_across(top);
}

static int64_t count_at_least(const float* values, int64_t count, float least) {
  VectorI found = {};
  for (int64_t i = 0; i < count; i += W) found -= load(values + i) >= least;
  int64_t total = 0;
  for (int lane = 0; lane < W; ++lane) total += found[lane];
  return total;
}

// Integers in the order of floats.
RADAR_INLINE int64_t ordered(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
RADAR_INLINE float float_of(int64_t order) {
  int32_t bits = (int32_t)order;
  bits ^= (bits >> 31) & 0x7fffffff;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// A number that at least k of the values reach, and not many more: a bisection over the bits.
static float reached_by(const float* values, int64_t count, int64_t k) {
  if (k > count) return -kInfinity;
  int64_t low = ordered(-kInfinity), high = ordered(largest_of(values, count)) + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t found = count_at_least(values, count, float_of(middle));
    (found >= k ? low : high) = middle;
    if (found >= k && found <= k + k / 4) break;
  }
  return float_of(low);
}

template <class T, bool kBlend, bool kScaled>
static void masses_of(const LogitRow& row, int64_t begin, int64_t end, float temperature,
                      float top, bool keep_nan, float* masses) {
  const Places<T> places;
  const Vector skip = broadcast(keep_nan ? kInfinity : -kInfinity);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    Vector a = {}, b = {};
    for (int64_t at = 0; at < kChunkTokens; at += kPair) {
      Pair x = logits_at<T, kBlend>(row, places, chunk * kChunkTokens + at);
      if (kScaled) x = {x.a / temperature, x.b / temperature};
      // NaN counts as -inf when tokens are drawn. Infinity less infinity is NaN again.
      x.a = select(x.a == x.a, x.a, skip) - top;
      x.b = select(x.b == x.b, x.b, skip) - top;
      a += exp_nonpositive(x.a);
      b += exp_nonpositive(x.b);
    }
    masses[chunk] = sum_across(a + b);
  }
}

template <class T>
static void logit_masses(const LogitRow& row, int64_t begin, int64_t end, float temperature,
                         float top, bool keep_nan, float* masses) {
  const auto chosen = row.masked
                          ? (temperature == 1 ? masses_of<T, true, false> : masses_of<T, true, true>)
                          : (temperature == 1 ? masses_of<T, false, false>
                                              : masses_of<T, false, true>);
  chosen(row, begin, end, temperature, top, keep_nan, masses);
}

// ---- selection ------------------------------------------------------------------------------

RADAR_INLINE bool any_reaches(const float* maxima, int64_t chunk, float least) {
  VectorI found = {};
  for (int i = 0; i < kRunning; ++i) found |= load(maxima + chunk * kChunkMaxima + i * W) >= least;
  return lane_bits(found) != 0;
}

RADAR_INLINE int64_t append(Vector v, VectorI tokens, VectorI wanted, int64_t count, float* values,
                            int32_t* ids) {
  uint32_t bits = lane_bits(wanted);
  if (bits == 0) return count;
#if RADAR_VECTOR_BYTES == 64
  store(values + count, (Vector)_mm512_maskz_compress_ps((__mmask16)bits, (__m512)v));
  const __m512i packed = _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)tokens);
  _mm512_storeu_si512(ids + count, packed);
  return count + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1, ++count) {
    const int lane = __builtin_ctz(bits);
    values[count] = v[lane];
    ids[count] = tokens[lane];
  }
  return count;
#endif
}

template <class T, bool kBlend>
static int64_t collect_of(const LogitRow& row, int64_t chunks, const float* maxima, float least,
                          float* values, int32_t* ids) {
  const Places<T> places;
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (!any_reaches(maxima, chunk, least)) continue;
    for (int64_t at = chunk * kChunkTokens; at < (chunk + 1) * kChunkTokens; at += kPair) {
      const Pair x = logits_at<T, kBlend>(row, places, at);
      count = append(x.a, places.a + (int32_t)at, x.a >= least, count, values, ids);
      count = append(x.b, places.b + (int32_t)at, x.b >= least, count, values, ids);
    }
  }
  return count;
}

// The tokens whose logit is at least `least`, in no particular order. The arrays hold a whole
// number of chunks: vectors are stored whole.
template <class T>
static int64_t logit_collect(const LogitRow& row, int64_t chunks, const float* maxima, float least,
                             float* values, int32_t* ids) {
  return row.masked ? collect_of<T, true>(row, chunks, maxima, least, values, ids)
                    : collect_of<T, false>(row, chunks, maxima, least, values, ids);
}

// The first token whose logit over the temperature is at least `least`, or -1.
template <class T>
static int64_t logit_first(const LogitRow& row, int64_t chunks, const float* maxima,
                           float temperature, float least) {
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const float top = largest_of(maxima + chunk * kChunkMaxima, kChunkMaxima);
    if (!(top / temperature >= least)) continue;
    const int64_t end = (chunk + 1) * kChunkTokens;
    for (int64_t token = chunk * kChunkTokens; token < end && token < row.tokens; ++token) {
      if (logit_of<T>(row, token) / temperature >= least) return token;
    }
  }
  return -1;
}

// In place; adding 0 turns -0 into 0.
static void divide(float* values, int64_t count, float temperature) {
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / temperature + 0.0f;
}

// e^(value - top), values at most top.
static void weights_of(const float* values, int64_t count, float top, float* weights) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(weights + i, exp_nonpositive(load(values + i) - top));
  for (; i < count; ++i) weights[i] = exp_nonpositive(broadcast(values[i] - top))[0];
}

// ---- the draw -------------------------------------------------------------------------------

// The product of the low halves of every lane.
RADAR_INLINE VectorL low_product(VectorL a, uint32_t factor) {
  const VectorL b = VectorL{} + (uint64_t)factor;
#if RADAR_VECTOR_BYTES == 64
  return (VectorL)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif RADAR_VECTOR_BYTES == 32
  return (VectorL)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VectorL)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * b;
#endif
}

// Philox4x32-10; one block a lane. Only the low halves of lanes count, in and out.
struct Words {
  VectorL word[4];
};
RADAR_INLINE Words philox(VectorL block, const Noise& noise) {
  VectorL one = block, two = VectorL{} + (noise.offset & 0xffffffffu);
  VectorL three = VectorL{} + (noise.offset >> 32), four = {};
  uint32_t low = (uint32_t)noise.seed, high = (uint32_t)(noise.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const VectorL first = low_product(one, 0xD2511F53u), second = low_product(three, 0xCD9E8D57u);
    one = (second >> 32) ^ two ^ (uint64_t)low;
    two = second;
    three = (first >> 32) ^ four ^ (uint64_t)high;
    four = first;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return {{one, two, three, four}};
}

static float gumbel_of(uint32_t word) {
  const float uniform = (float)(((double)word + 0.5) * 0x1p-32);
  const float most = 1.0f - 0x1p-24f;
  return -__builtin_logf(-__builtin_log1pf(-(uniform < most ? uniform : most)));
}

static void offer(float warm, uint32_t word, int64_t token, Draw* best) {
  const float score = warm + gumbel_of(word);
  if (score > best->score || (score == best->score && token < best->token)) {
    *best = {score, token};
  }
}

// A token can only win if its noise, which is at most -log(u), lifts it to the best score: if
// u <= e^(warm - best). What is added covers the rounding of scores and of the exponential.
RADAR_INLINE float reach(const Draw& best) {
  return best.score - (__builtin_fabsf(best.score) * 0x1p-21f + 1e-4f);
}

static uint32_t word_of(int64_t token, const Noise& noise) {
  const Words words = philox(VectorL{} + (uint64_t)(token >> 2), noise);
  return (uint32_t)words.word[token & 3][0];
}

// The best perturbed score among listed tokens of at least the floor. The lists are padded to
// whole vectors.
static void draw_listed(const float* warm, const int32_t* ids, int64_t count, float floor,
                        const Noise& noise, Draw* best) {
  VectorI lanes;
  for (int lane = 0; lane < W; ++lane) lanes[lane] = lane;
  for (int64_t i = 0; i < count; i += W) {
    const Vector x = load(warm + i);
    const int32_t left = (int32_t)(count - i < W ? count - i : W);
    const VectorI kept = (x >= floor) & (lanes < left);
    if (lane_bits(kept) == 0) continue;
    const VectorI token = (VectorI)load_words(ids + i);
    const VectorL block = (VectorL)(token >> 2);
    const Words even = philox(block, noise), odd = philox(block >> 32, noise);
    VectorU word = {};
    for (int j = 0; j < 4; ++j) {
      const VectorL both = (even.word[j] & 0xffffffffu) | (odd.word[j] << 32);
      word = (token & 3) == j ? (VectorU)both : word;
    }
    // u to 31 bits: the rest is within what `reach` allows for.
    const Vector uniform = __builtin_convertvector((VectorI)(word >> 1), Vector) * 0x1p-31f;
    const Vector lift = x - reach(*best);
    const Vector most = exp_nonpositive(select(lift < 0.0f, lift, broadcast(0.0f)));
    for (uint32_t bits = lane_bits(kept & (uniform <= most)); bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      offer(x[lane], word[lane], token[lane], best);
    }
  }
}

// The best perturbed score among all tokens of some chunks. `best` holds one already.
template <class T>
static void draw_all(const LogitRow& row, int64_t begin, int64_t end, const float* maxima,
                     float temperature, const Noise& noise, Draw* best) {
  VectorL lanes;
  for (int lane = 0; lane < kHalf; ++lane) lanes[lane] = (uint64_t)lane;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const float top = largest_of(maxima + chunk * kChunkMaxima, kChunkMaxima) / temperature;
    const auto limit_of = [&]() {
      const float lift = top - reach(*best);
      return (int64_t)(4294967296.0 * __builtin_expf(lift < 0 ? lift : 0));
    };
    int64_t limit = limit_of();
    if (limit == 0 && top < reach(*best) - 23.0f) continue;  // no noise is larger
    const int64_t last = (chunk + 1) * kChunkTokens;
    for (int64_t at = chunk * kChunkTokens; at < last && at < row.tokens; at += 4 * kHalf) {
      const Words words = philox(lanes + (uint64_t)(at >> 2), noise);
      VectorLI least = (VectorLI)(words.word[0] & 0xffffffffu);
      for (int j = 1; j < 4; ++j) {
        const VectorLI word = (VectorLI)(words.word[j] & 0xffffffffu);
        least = word < least ? word : least;
      }
      if (lane_bits((VectorI)(least <= limit)) == 0) continue;
      for (int i = 0; i < 4 * kHalf && at + i < row.tokens; ++i) {
        const uint32_t word = (uint32_t)words.word[i & 3][i >> 2];
        if (word > limit) continue;
        const float warm = logit_of<T>(row, at + i) / temperature;
        if (warm > -kInfinity) offer(warm, word, at + i, best);
      }
      limit = limit_of();
    }
  }
}

// ---- the blend alone ------------------------------------------------------------------------

RADAR_INLINE Vector limited(Vector x, float most) {
  x = select(x > most, broadcast(most), x);
  return select(x < -most, broadcast(-most), x);
}

// The released SPA package's variant: the move weighted by the probability over the largest.
RADAR_INLINE Vector modulated(Vector full, Vector masked, const LogitRow& row) {
  Vector move = (full - masked) * row.move;
  if (row.weighted) {
    Vector share = exp_nonpositive(full - row.top) * (1.0f / row.mass);
    share = select(share < 1e-6f, broadcast(1e-6f), share);
    const float most = 1.0f / row.mass < 1e-6f ? 1e-6f : 1.0f / row.mass;
    move = limited(move * (share / most), 1e2f);
  } else {
    move = limited(move, 1e3f);
  }
  const Vector moved = limited(full + move, 1e3f);
  return select(infinite(full) | infinite(masked), full, moved);
}

RADAR_INLINE Vector out_of(Vector full, Vector masked, const LogitRow& row) {
  return row.modulated ? modulated(full, masked, row) : blended(full, masked, row.move);
}

template <class T>
static void logit_blend(const LogitRow& row, int64_t begin, int64_t end, float* out) {
  using Storage = typename T::Storage;
  const Storage* full = (const Storage*)row.full;
  const Storage* masked = (const Storage*)row.masked;
  int64_t at = begin * kChunkTokens;
  const int64_t last = end * kChunkTokens < row.tokens ? end * kChunkTokens : row.tokens;
  for (; at < last; at += kPair) {
    const int64_t left = last - at < kPair ? last - at : kPair;
    const bool whole = left == kPair;
    Pair x = whole ? T::load_pair(full + at) : T::load_part(full + at, left);
    if (masked) {
      const Pair y = whole ? T::load_pair(masked + at) : T::load_part(masked + at, left);
      x = {out_of(x.a, y.a, row), out_of(x.b, y.b, row)};
    }
    float ready[kPair];
    float* to = whole ? out + at : ready;
    if (T::kSplitsPairs) {
      store(to, RADAR_SHUFFLE(x.a, x.b, RADAR_ZIP_LOW));
      store(to + W, RADAR_SHUFFLE(x.a, x.b, RADAR_ZIP_HIGH));
    } else {
      store(to, x.a);
      store(to + W, x.b);
    }
    if (!whole) __builtin_memcpy(out + at, ready, left * sizeof(float));
  }
}

template <class T>
static constexpr LogitKernels logit_kernels() {
  return {logit_maxima<T>, logit_masses<T>, logit_collect<T>, logit_first<T>,
          largest_of,      reached_by,      divide,           weights_of,
          word_of,         gumbel_of,       draw_listed,      draw_all<T>,
          logit_blend<T>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
