// Products of bfloat16 sentences and queries in AMX's tiles: 16 sentences times 16 queries at once,
// exact products summed in float32. The norms are AVX-512's.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Two tiles of sentences times two of queries are multiplied together: their sums are in tiles 0 to
// 3, sentences in 4 and 5, queries in 6 and 7.
constexpr int64_t kPairedRows = 2 * kTileRows;

// A row of bfloat16 pieces of sentences, and how far it is from the next.
struct Lines {
  const uint16_t* first;
  int64_t stride;
  const uint16_t* at(int64_t line) const { return first + line * stride; }
};

static int64_t tile_depths(const RelevanceCall& call) {
  return (call.size + kTileDepth - 1) / kTileDepth;
}

static int64_t amx_packed_bytes(const RelevanceCall& call) {
  return call.width / kTileRows * tile_depths(call) * kTileElements * 2;
}

// A tile holds two elements of 16 queries a row.
static void amx_pack(const RelevanceCall& call, void* packed, float* factors) {
  __builtin_memset(packed, 0, amx_packed_bytes(call));
  for (int64_t q = 0; q < call.queries; ++q) {
    uint16_t* tiles = (uint16_t*)packed + q / kTileRows * tile_depths(call) * kTileElements;
    factors[q] = put_words(call.query_values + q * call.size, call.size, [&](int64_t d, uint16_t word) {
      const int64_t step = d % kTileDepth;
      tiles[d / kTileDepth * kTileElements + step / 2 * kTileDepth + q % kTileRows * 2 + step % 2] =
          word;
    });
  }
}

// Sentences copied where 32 whole rows cannot be read in place, and what is left of the last
// depth of those that can.
static int64_t amx_scratch_bytes(const RelevanceCall& call) {
  return kPairedRows * (tile_depths(call) + 1) * kTileDepth * 2;
}

static inline void copy_lines(Lines from, int64_t lines, int64_t size, Lines to) {
  for (int64_t i = 0; i < kPairedRows; ++i) {
    uint16_t* row = (uint16_t*)to.at(i);
    __builtin_memset(row, 0, to.stride * 2);
    if (i < lines) __builtin_memcpy(row, from.at(i), size * 2);
  }
}

// Two tiles of sentences times one or two of queries, `whole` depths of `lines` and one of `rest`.
template <bool kTwo>
static inline void amx_products(Lines lines, int64_t whole, Lines rest, bool with_rest,
                                const uint16_t* queries, int64_t depths, float* scores,
                                int64_t width) {
  order_memory();
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < whole + with_rest; ++k) {
    const bool in_place = k < whole;
    const uint16_t* at = in_place ? lines.first + k * kTileDepth : rest.first;
    const int64_t stride = in_place ? lines.stride : rest.stride;
    const uint16_t* tile = queries + k * kTileElements;
    _tile_loadd(4, at, stride * 2);
    _tile_loadd(6, tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, at + kTileRows * stride, stride * 2);
    _tile_dpbf16ps(1, 5, 6);
    if (kTwo) {
      _tile_loadd(7, tile + depths * kTileElements, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  const int64_t step = width * (int64_t)sizeof(float);
  _tile_stored(0, scores, step);
  _tile_stored(1, scores + kTileRows * width, step);
  if (kTwo) {
    _tile_stored(2, scores + kTileRows, step);
    _tile_stored(3, scores + kTileRows * width + kTileRows, step);
  }
}

// Sums of squares of 16 lines; asks memory for what comes later.
static inline void amx_squares(const uint16_t* const* lines, int64_t size, const Ahead& ahead,
                               float* squares) {
  constexpr int kLines = 8;
  Vector sums[kTileRows] = {};
  for (int64_t first = 0; first < kTileRows; first += kLines) {
    const Ahead next = past(ahead, first * size * 2);
    Vector a[kLines] = {}, b[kLines] = {};
    int64_t d = 0;
    for (; d + kPair <= size; d += kPair) {
#pragma GCC unroll 8
      for (int k = 0; k < kLines; ++k) {
        const Pair y = BFloat16::load_pair(lines[first + k] + d);
        ask<BFloat16>(next, d / kPair * kLines + k);
        a[k] += y.a * y.a;
        b[k] += y.b * y.b;
      }
    }
    for (int k = 0; k < kLines; ++k) {
      if (d < size) {
        const Pair y = BFloat16::load_part(lines[first + k] + d, size - d);
        a[k] += y.a * y.a;
        b[k] += y.b * y.b;
      }
      sums[first + k] = a[k] + b[k];
    }
  }
  fold_vectors(sums, kTileRows, squares);
}

static void amx_tile(const RelevanceCall& call, const void* packed, int64_t begin, int64_t count,
                     const float* const* spatial, const float* const* temporal, void* scratch,
                     float* scores) {
  const Tiles tiles;
  const int64_t depths = tile_depths(call), width = call.width;
  const int64_t tail = call.size % kTileDepth;
  const Lines copy = {(const uint16_t*)scratch, depths * kTileDepth};
  const Lines rest = {copy.first + kPairedRows * copy.stride, kTileDepth};
  for (int64_t first = 0; first < count; first += kPairedRows) {
    const int64_t held = count - first < kPairedRows ? count - first : kPairedRows;
    Lines lines = {(const uint16_t*)call.sentences + (begin + first) * call.row_stride,
                   call.row_stride};
    float squares[kPairedRows];
    for (int64_t half = 0; half < kPairedRows; half += kTileRows) {
      const uint16_t* pointers[kTileRows];
      for (int64_t i = 0; i < kTileRows; ++i) {
        pointers[i] = lines.at(half + i < held ? half + i : held - 1);
      }
      amx_squares(pointers, call.size, tile_ahead<BFloat16>(call, begin, first + half),
                  squares + half);
    }
    int64_t whole = call.size / kTileDepth;
    if (held < kPairedRows) {
      copy_lines(lines, held, call.size, copy);
      lines = copy;
      whole = depths;
    } else if (tail) {
      copy_lines({lines.first + whole * kTileDepth, lines.stride}, held, tail, rest);
    }
    const bool with_rest = whole < depths;
    const uint16_t* queries = (const uint16_t*)packed;
    float* to = scores + first * width;
    int64_t column = 0;
    for (; column + kPairedRows <= width; column += kPairedRows) {
      amx_products<true>(lines, whole, rest, with_rest, queries, depths, to + column, width);
      queries += 2 * depths * kTileElements;
    }
    if (column < width) {
      amx_products<false>(lines, whole, rest, with_rest, queries, depths, to + column, width);
    }
    for (int64_t i = 0; i < held; ++i) {
      const int64_t line = first + i;
      relevance_decay(inverse_norm(squares[i], nullptr), spatial[line], temporal[line], width,
                      scores + line * width);
    }
  }
}

static RelevanceKernels relevance_amx_kernels() {
  return {amx_packed_bytes, amx_pack, amx_scratch_bytes, amx_tile};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
