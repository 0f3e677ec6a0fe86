// Cosines of sentences with queries, times decays: every sentence is read from memory once, with
// its norm, for all queries.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Sentences whose sums are gathered before they are folded; with all queries they stay in the
// caches.
constexpr int64_t kGather = 16;
constexpr int64_t kMostRows = 8;

// R packed queries times K sentences in registers, and the K sums of squares with the first ones.
template <int R>
struct RelevanceShape {
  static constexpr int kLines = R == 8 ? (W == 16 ? 2 : 1)
                                : R == 4 ? (W == 16 ? 4 : 2)
                                         : (W == 16 ? 8 : 4);
};

// Where the tile that comes next lies: it is asked for in pieces of a pair, from kPlaces places in
// turn.
struct Ahead {
  const char* first;
  int64_t apart;  // bytes from place to place
};

// Past the first `bytes` of a tile.
RADAR_INLINE Ahead past(const Ahead& ahead, int64_t bytes) {
  return {ahead.first + bytes / kPlaces, ahead.apart};
}

template <class T>
RADAR_INLINE void ask(const Ahead& ahead, int64_t piece) {
  constexpr int64_t kBytes = sizeof(typename T::Storage) * kPair;
  const char* at = ahead.first + piece % kPlaces * ahead.apart + piece / kPlaces * kBytes;
  __builtin_prefetch(at, 0, 2);
  if (kBytes > 64) __builtin_prefetch(at + 64, 0, 2);
}

template <class Dots, int R, bool kSquares>
RADAR_INLINE void relevance_step(const typename Dots::Packed* rows, int64_t row_stride,
                                 const typename Dots::Line* y, Vector* sums, Vector* squares) {
  constexpr int K = RelevanceShape<R>::kLines;
  if (kSquares) {
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) Dots::add(squares[k], y[k], y[k]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename Dots::Line x = Dots::packed(rows + r * row_stride);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) Dots::add(sums[k * R + r], x, y[k]);
  }
}

// Vectors whose lanes sum up to row r . line k (at k * R + r) and to line k . line k.
template <class Dots, int R, bool kSquares>
RADAR_INLINE void relevance_block(const typename Dots::Packed* rows, int64_t row_stride,
                                  const typename Dots::Element::Storage* const* lines,
                                  int64_t size, const Ahead& ahead, Vector* sums_out,
                                  Vector* squares_out) {
  constexpr int K = RelevanceShape<R>::kLines;
  Vector sums[K * R] = {}, squares[K] = {};
  typename Dots::Line y[K];
  const int64_t whole = size / kPair * kPair;
  for (int64_t d = 0; d < whole; d += kPair) {
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) {
      y[k] = Dots::line(lines[k] + d);
      if (kSquares) ask<typename Dots::Element>(ahead, d / kPair * K + k);
    }
    relevance_step<Dots, R, kSquares>(rows + d, row_stride, y, sums, squares);
  }
  if (whole < size) {
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) y[k] = Dots::part(lines[k] + whole, size - whole);
    relevance_step<Dots, R, kSquares>(rows + whole, row_stride, y, sums, squares);
  }
#pragma GCC unroll 64
  for (int i = 0; i < K * R; ++i) sums_out[i] = sums[i];
  if (kSquares) {
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) squares_out[k] = squares[k];
  }
}

RADAR_INLINE void fold_vectors(const Vector* vectors, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; i += W) store(sums + i, sum_lanes(vectors + i));
}

// kGather lines times R rows, to `scores` [kGather, width]; the lines' sums of squares as well.
template <class Dots, int R, bool kSquares>
static inline void relevance_gather(const typename Dots::Packed* rows, int64_t row_stride,
                                    const typename Dots::Element::Storage* const* lines,
                                    int64_t size, const Ahead& ahead, int64_t width, float* scores,
                                    float* squares) {
  constexpr int K = RelevanceShape<R>::kLines;
  Vector sums[kGather * R], square_sums[kGather];
  for (int64_t i = 0; i < kGather; i += K) {
    const Ahead next = past(ahead, i * size * (int64_t)sizeof(**lines));
    relevance_block<Dots, R, kSquares>(rows, row_stride, lines + i, size, next, sums + i * R,
                                       square_sums + i);
  }
  float folded[kGather * R];
  fold_vectors(sums, kGather * R, folded);
  for (int64_t i = 0; i < kGather; ++i) {
    __builtin_memcpy(scores + i * width, folded + i * R, R * sizeof(float));
  }
  if (kSquares) fold_vectors(square_sums, kGather, squares);
}

template <class Dots, bool kSquares>
static inline void relevance_rows(int64_t rows, const typename Dots::Packed* packed,
                                  int64_t row_stride,
                                  const typename Dots::Element::Storage* const* lines,
                                  int64_t size, const Ahead& ahead, int64_t width, float* scores,
                                  float* squares) {
  if (rows > 4) {
    relevance_gather<Dots, 8, kSquares>(packed, row_stride, lines, size, ahead, width, scores,
                                        squares);
  } else if (rows > 2) {
    relevance_gather<Dots, 4, kSquares>(packed, row_stride, lines, size, ahead, width, scores,
                                        squares);
  } else if (rows > 1) {
    relevance_gather<Dots, 2, kSquares>(packed, row_stride, lines, size, ahead, width, scores,
                                        squares);
  } else {
    relevance_gather<Dots, 1, kSquares>(packed, row_stride, lines, size, ahead, width, scores,
                                        squares);
  }
}

// What a row of products is multiplied with to become cosines. A NaN stays one.
RADAR_INLINE float inverse_norm(float square, const float* scale) {
  float norm = __builtin_sqrtf(square);
  if (scale) norm *= *scale < 0 ? -*scale : *scale;
  norm = norm < 1e-12f ? 1e-12f : norm;
  return (scale ? *scale : 1.0f) / norm;
}

// Products to scores, in place.
static inline void relevance_decay(float inverse, const float* spatial, const float* temporal,
                                   int64_t width, float* scores) {
  for (int64_t q = 0; q < width; q += W) {
    const Vector s = load(spatial + q), t = load(temporal + q);
    const Vector score = load(scores + q) * inverse * (s * t);
    store(scores + q, select((s < 0) | (t < 0), broadcast(-kInfinity), score));
  }
}

static int64_t relevance_packed_rows(const RelevanceCall& call) {
  return (call.queries + kMostRows - 1) / kMostRows * kMostRows;
}

template <class Dots>
static int64_t relevance_packed_bytes(const RelevanceCall& call) {
  return relevance_packed_rows(call) * padded(call.size) * (int64_t)sizeof(typename Dots::Packed);
}

// A norm as float32 has it, overflow and underflow included.
static inline float query_norm(const float* query, int64_t size) {
  double sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += (double)query[d] * query[d];
  const float norm = __builtin_sqrtf((float)sum);
  return norm < 1e-12f ? 1e-12f : norm;
}

template <class T>
static void relevance_pack(const RelevanceCall& call, void* packed, float* factors) {
  const int64_t stride = padded(call.size);
  __builtin_memset(packed, 0, relevance_packed_bytes<SingleDots<T>>(call));
  for (int64_t q = 0; q < call.queries; ++q) {
    const float* query = call.query_values + q * call.size;
    float* to = (float*)packed + q * stride;
    const float norm = query_norm(query, call.size);
    for (int64_t d = 0; d < call.size; ++d) {
      const int64_t step = d % kPair;
      const int64_t place = T::kSplitsPairs ? step / 2 + step % 2 * W : step;
      to[d - step + place] = query[d] / norm;
    }
    factors[q] = 1.0f;
  }
}

// The power of two that brings a row's largest element to 1 or above, below 2.
static inline float scale_to_one(const float* row, int64_t size) {
  float largest = 0;
  for (int64_t d = 0; d < size; ++d) {
    const float magnitude = __builtin_fabsf(row[d]);
    if (!(magnitude < kInfinity)) return 1.0f;
    if (magnitude > largest) largest = magnitude;
  }
  uint32_t bits;
  __builtin_memcpy(&bits, &largest, sizeof bits);
  const int32_t exponent = (int32_t)(bits >> 23) - 127;
  // Both the scale and its inverse are normal numbers.
  const int32_t up = exponent < -126 ? 126 : exponent > 126 ? -126 : -exponent;
  const uint32_t scale = (uint32_t)(up + 127) << 23;
  float result;
  __builtin_memcpy(&result, &scale, sizeof result);
  return largest == 0 ? 1.0f : result;
}

// Calls put(d, word) for every element of a query as bfloat16: it keeps its bits, moved by a power of
// two. Returns what makes products with it cosines.
template <class Put>
static inline float put_words(const float* query, int64_t size, const Put& put) {
  const float scale = scale_to_one(query, size);
  for (int64_t d = 0; d < size; ++d) {
    const float value = query[d] * scale;
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    put(d, (uint16_t)(bits >> 16));
  }
  const float factor = (1.0f / scale) / query_norm(query, size);
  // No sign: below 0 would mean hidden.
  return factor == factor ? factor : __builtin_nanf("");
}

static int64_t relevance_scratch_bytes(const RelevanceCall&) { return 0; }

template <class T>
RADAR_INLINE Ahead tile_ahead(const RelevanceCall& call, int64_t begin, int64_t done) {
  const int64_t row = call.row_stride * (int64_t)sizeof(typename T::Storage);
  const Ahead tile = {(const char*)call.sentences + (begin + kRelevanceTile) * row,
                      kRelevanceTile * row / kPlaces};
  return past(tile, done * row);
}

template <class Dots>
static void relevance_tile(const RelevanceCall& call, const void* packed_queries, int64_t begin,
                           int64_t count, const float* const* spatial,
                           const float* const* temporal, void*, float* scores) {
  using Storage = typename Dots::Element::Storage;
  const auto* packed = (const typename Dots::Packed*)packed_queries;
  const int64_t stride = padded(call.size), width = call.width;
  for (int64_t first = 0; first < count; first += kGather) {
    const int64_t lines = count - first < kGather ? count - first : kGather;
    const Storage* pointers[kGather];
    for (int64_t i = 0; i < kGather; ++i) {
      const int64_t line = begin + first + (i < lines ? i : lines - 1);
      pointers[i] = (const Storage*)call.sentences + line * call.row_stride;
    }
    const Ahead ahead = tile_ahead<typename Dots::Element>(call, begin, first);
    float squares[kGather];
    float* to = scores + first * width;
    for (int64_t q = 0; q < call.queries; q += kMostRows) {
      if (q == 0) {
        relevance_rows<Dots, true>(call.queries, packed, stride, pointers, call.size, ahead,
                                   width, to, squares);
      } else {
        relevance_rows<Dots, false>(call.queries - q, packed + q * stride, stride, pointers,
                                    call.size, ahead, width, to + q, squares);
      }
    }
    for (int64_t i = 0; i < lines; ++i) {
      const int64_t line = first + i;
      const float* scale = call.scales ? call.scales + begin + line : nullptr;
      relevance_decay(inverse_norm(squares[i], scale), spatial[line], temporal[line], width,
                      scores + line * width);
    }
  }
}

static int64_t scores_passing(const float* scores, int64_t count, int64_t width,
                              const float* limits, int32_t* places) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t q = 0; q < width; q += W) {
      const Vector score = load(scores + i * width + q);
      uint32_t bits = lane_bits((score >= load(limits + q)) & (score > -kInfinity));
      for (; bits; bits &= bits - 1) {
        places[found++] = (int32_t)(i * width + q + __builtin_ctz(bits));
      }
    }
  }
  return found;
}

static void scores_transpose(const float* scores, int64_t count, int64_t width, int64_t columns,
                             float* out, int64_t stride) {
  for (int64_t q = 0; q < columns; ++q) {
    for (int64_t i = 0; i < count; ++i) out[q * stride + i] = scores[i * width + q];
  }
}

template <class T>
static constexpr RelevanceKernels relevance_kernels() {
  using Dots = SingleDots<T>;
  return {relevance_packed_bytes<Dots>, relevance_pack<T>, relevance_scratch_bytes,
          relevance_tile<Dots>};
}

static constexpr ScoreKernels score_kernels() { return {scores_passing, scores_transpose}; }

}  // namespace RADAR_ISA_NAME
}  // namespace radar
