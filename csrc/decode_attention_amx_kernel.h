// Products of bfloat16 decode attention in AMX's tiles. Keys and values are loaded into tiles as
// they lie in memory. Products are exact and summed in float32; numbers and sums that are
// subnormal count as 0.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Sixteen keys times 16 query rows give a tile of logits. For the values, tiles multiply pairs of
// neighbours in a row: a weight next to a 0 adds up a value's even elements, after a 0 the odd
// ones. Each query row has two rows of a tile for that, and its float32 weights are the sum of two
// bfloat16 numbers in two tiles.
class TileProducts {
 public:
  using Element = BFloat16;
  using Storage = uint16_t;

  static int64_t scratch_bytes(const AttentionCall& call) {
    return (Scratch::kElements + query_blocks(call) * depths(call) * kTileElements) *
           (int64_t)sizeof(Storage);
  }

  TileProducts(const AttentionCall& call, int64_t batch, int64_t kv_head, void* memory)
      : call_(call), scratch_((Storage*)memory) {
    const int64_t tiles = query_blocks(call) * depths(call);
    __builtin_memset(scratch_.queries, 0, (uint64_t)(tiles * kTileElements) * sizeof(Storage));
    // A tile's row holds two elements of 16 query rows.
    for (int64_t r = 0; r < call.rows; ++r) {
      const Storage* row = query_row<BFloat16>(call, batch, kv_head, r);
      Storage* to = query_tiles(r / kTileRows) + r % kTileRows * 2;
      const int64_t whole = call.key_dim / 2;
      for (int64_t pair = 0; pair < whole; ++pair) {
        __builtin_memcpy(to + pair * kTileDepth, row + 2 * pair, 2 * sizeof *row);
      }
      if (call.key_dim % 2) to[whole * kTileDepth] = row[2 * whole];
    }
    order_memory();
  }

  void look_ahead(const Storage* keys, const Storage* values) {
    ahead_.begin(call_, keys, values);
  }
  void row_weighed() { ahead_.pass(kRowTime); }

  void logits(const Storage* keys, int64_t count, float* to) {
    for (int64_t block = 0; block < query_blocks(call_); ++block) {
      key_products(block, keys, count);
      const int64_t first = block * kTileRows;
      const int64_t rows = call_.rows - first < kTileRows ? call_.rows - first : kTileRows;
      for (int64_t r = 0; r < rows; r += 4) {
        for (int64_t i = 0; i < kTileKeys; i += kTileRows) {
          Vector columns[4];
          transpose(scratch_.sums + i * kTileRows + r, columns);
          for (int64_t k = 0; k < 4 && r + k < rows; ++k) {
            store(to + (first + r + k) * kTileKeys + i, columns[k]);
          }
        }
      }
    }
  }

  void values(const float* weights, const Storage* values, const int32_t* list, int64_t count,
              const float* correction, float* to) {
    const int64_t size = call_.value_dim, to_stride = padded(size);
    for (int64_t first = 0; first < call_.rows; first += kWeightRows) {
      const int64_t left = call_.rows - first;
      const int64_t rows = left < kWeightRows ? left : kWeightRows;
      const float* of = weights + first * kTileKeys;
      if (!list) split_weights(of, rows);
      for (int64_t d = 0; d < size; d += kColumns) {
        const int64_t columns = size - d < kColumns ? size - d : kColumns;
        const int64_t groups = (columns + kTileDepth - 1) / kTileDepth;
        float* sums = to + first * to_stride + d;
        if (!list) value_products(values + d, count, columns);
        // A 0 next to a weight may have met NaN or infinity.
        if (list || !finite(rows, groups)) {
          add_row_values<BFloat16>(rows, of, values + d, call_.value_stride[2], list, count, columns,
                                   nullptr, correction + first, sums, to_stride);
        } else {
          add_sums(rows, groups, correction + first, sums, to_stride);
        }
      }
    }
  }

 private:
  static constexpr int64_t kWeightRows = kTileRows / 2;
  static constexpr int64_t kColumns = 4 * kTileDepth;

  struct Scratch {
    static constexpr int64_t kGroups = kTileKeys / kTileRows;
    static constexpr int64_t kElements = (2 * kGroups + 2 * kGroups + 1) * kTileElements;
    explicit Scratch(Storage* memory)
        : weights(memory),
          sums((float*)(memory + 2 * kGroups * kTileElements)),
          copy(memory + 4 * kGroups * kTileElements),
          queries(memory + kElements) {}
    Storage* weights;  // of each group of 16 keys a tile of upper parts and one of lower parts
    float* sums;       // four tiles
    Storage* copy;     // a tile
    Storage* queries;
  };

  // Prefetches the next tile in even steps over the time that this one takes: memory answers
  // slower than tiles multiply. A step asks for a line from each of kPlaces places.
  static constexpr int64_t kRowTime = 8;  // of a row's weights, in products of two tiles
  class Ahead {
   public:
    void begin(const AttentionCall& call, const Storage* keys, const Storage* values) {
      const Piece pieces[] = {piece(keys, call.key_stride[2], call.key_dim),
                              piece(values, call.value_stride[2], call.value_dim)};
      now_ = pieces[0];
      then_ = pieces[1];
      steps_ = keys ? now_.left() + then_.left() : 0;
      owed_ = 0;
      const int64_t groups = kTileKeys / kTileRows;
      time_ = query_blocks(call) * depths(call) * groups + call.rows * kRowTime +
              2 * ((call.rows + kWeightRows - 1) / kWeightRows) * groups *
                  ((call.value_dim + kTileDepth - 1) / kTileDepth);
    }
    void pass(int64_t time) {
      owed_ += time * steps_;
      while (owed_ >= time_) {
        owed_ -= time_;
        step();
      }
    }

   private:
    struct Piece {
      const char* at;
      int64_t stride, lines, line, key;  // bytes from key to key, lines of a key
      int64_t left() const { return kTileKeys / kPlaces * lines; }
    };
    static Piece piece(const Storage* first, int64_t stride, int64_t size) {
      return {(const char*)first, stride * 2, (size + kTileDepth - 1) / kTileDepth, 0, 0};
    }
    void step() {
      if (now_.key == kTileKeys / kPlaces) now_ = then_;
      const char* at = now_.at + now_.key * now_.stride + now_.line * 64;
      for (int place = 0; place < kPlaces; ++place) {
        __builtin_prefetch(at + place * (kTileKeys / kPlaces) * now_.stride, 0, 2);
      }
      if (++now_.line == now_.lines) {
        now_.line = 0;
        ++now_.key;
      }
    }
    Piece now_, then_;
    int64_t steps_, owed_, time_;
  };

  static int64_t query_blocks(const AttentionCall& call) {
    return (call.rows + kTileRows - 1) / kTileRows;
  }
  static int64_t depths(const AttentionCall& call) {
    return (call.key_dim + kTileDepth - 1) / kTileDepth;
  }
  Storage* query_tiles(int64_t block) const {
    return scratch_.queries + block * depths(call_) * kTileElements;
  }

  // Where 16 lines can be loaded from: in place, or from a copy filled up with zeros.
  struct Lines {
    const Storage* first;
    int64_t bytes;  // from line to line
  };
  Lines lines(const Storage* first, int64_t stride, int64_t count, int64_t columns) const {
    if (count >= kTileRows && columns >= kTileDepth) return {first, stride * 2};
    const int64_t width = columns < kTileDepth ? columns : kTileDepth;
    order_memory();
    for (int64_t i = 0; i < kTileRows; ++i) {
      const VectorU line =
          i < count ? BFloat16::load_words_part(first + i * stride, width) : VectorU{};
      __builtin_memcpy(scratch_.copy + i * kTileDepth, &line, sizeof line);
    }
    order_memory();
    return {scratch_.copy, kTileDepth * 2};
  }

  void key_products(int64_t block, const Storage* keys, int64_t count) {
    const int64_t stride = call_.key_stride[2];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < call_.key_dim; d += kTileDepth) {
      _tile_loadd(7, query_tiles(block) + d / kTileDepth * kTileElements, 64);
#define RADAR_GROUP(sums, from)                                                              \
  if (sums * kTileRows < count) {                                                            \
    const int64_t first = sums * kTileRows;                                                  \
    const Lines at = lines(keys + first * stride + d, stride, count - first, call_.key_dim - d); \
    _tile_loadd(from, at.first, at.bytes);                                                   \
    _tile_dpbf16ps(sums, from, 7);                                                           \
    ahead_.pass(1);                                                                          \
  }
      RADAR_GROUP(0, 4)
      RADAR_GROUP(1, 5)
      RADAR_GROUP(2, 4)
      RADAR_GROUP(3, 5)
#undef RADAR_GROUP
    }
    store_sums();
  }

  void store_sums() const {
    _tile_stored(0, scratch_.sums, 64);
    _tile_stored(1, scratch_.sums + 256, 64);
    _tile_stored(2, scratch_.sums + 512, 64);
    _tile_stored(3, scratch_.sums + 768, 64);
  }

  // Four columns of 16 rows.
  static void transpose(const float* from, Vector* columns) {
    __m512 v[4];
    for (int i = 0; i < 4; ++i) {
      const float* at = from + i * kTileRows;
      v[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
      v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(at + 4 * kTileRows), 1);
      v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(at + 8 * kTileRows), 2);
      v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(at + 12 * kTileRows), 3);
    }
    const Vector a = RADAR_SHUFFLE((Vector)v[0], (Vector)v[1], RADAR_UNPACK_LOW);
    const Vector b = RADAR_SHUFFLE((Vector)v[2], (Vector)v[3], RADAR_UNPACK_LOW);
    const Vector c = RADAR_SHUFFLE((Vector)v[0], (Vector)v[1], RADAR_UNPACK_HIGH);
    const Vector d = RADAR_SHUFFLE((Vector)v[2], (Vector)v[3], RADAR_UNPACK_HIGH);
    columns[0] = RADAR_SHUFFLE(a, b, RADAR_MOVE_LOW);
    columns[1] = RADAR_SHUFFLE(a, b, RADAR_MOVE_HIGH);
    columns[2] = RADAR_SHUFFLE(c, d, RADAR_MOVE_LOW);
    columns[3] = RADAR_SHUFFLE(c, d, RADAR_MOVE_HIGH);
  }

  // Lines 2 r and 2 r + 1 of a tile: row r's weights in front of zeros and behind them.
  void split_weights(const float* weights, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      Storage* to = scratch_.weights + 2 * r * kTileDepth;
      for (int64_t i = 0; i < kTileKeys; i += W) {
        const Vector weight = load(weights + r * kTileKeys + i);
        const VectorU upper = (VectorU)weight & 0xffff0000u;
        const VectorU lower = ((VectorU)(weight - (Vector)upper) + 0x8000u) & 0xffff0000u;
        store_weights(upper, to);
        store_weights(lower, to + kTileElements);
        to += 2 * kTileElements;
      }
    }
  }

  static void store_weights(VectorU weights, Storage* to) {
    const VectorU front = weights >> 16;
    __builtin_memcpy(to, &front, sizeof front);
    __builtin_memcpy(to + kTileDepth, &weights, sizeof weights);
  }

  void value_products(const Storage* values, int64_t count, int64_t columns) {
    const int64_t stride = call_.value_stride[2];
    order_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < count; i += kTileRows) {
      const Storage* weights = scratch_.weights + i / kTileRows * 2 * kTileElements;
      _tile_loadd(4, weights, 64);
      _tile_loadd(5, weights + kTileElements, 64);
#define RADAR_GROUP(sums, from)                                                             \
  if (sums * kTileDepth < columns) {                                                        \
    const int64_t d = sums * kTileDepth;                                                    \
    const Lines at = lines(values + i * stride + d, stride, count - i, columns - d);        \
    _tile_loadd(from, at.first, at.bytes);                                                  \
    _tile_dpbf16ps(sums, 4, from);                                                          \
    _tile_dpbf16ps(sums, 5, from);                                                          \
    ahead_.pass(2);                                                                         \
  }
      RADAR_GROUP(0, 6)
      RADAR_GROUP(1, 7)
      RADAR_GROUP(2, 6)
      RADAR_GROUP(3, 7)
#undef RADAR_GROUP
    }
    store_sums();
  }

  bool finite(int64_t rows, int64_t groups) const {
    Vector zero = {};
    for (int64_t g = 0; g < groups; ++g) {
      const float* sums = scratch_.sums + g * kTileRows * kTileRows;
      for (int64_t i = 0; i < rows * kPair; i += W) zero += load(sums + i) * 0.0f;
    }
    return lane_bits(zero == 0.0f) == 0xffff;
  }

  void add_sums(int64_t rows, int64_t groups, const float* correction, float* to,
                int64_t to_stride) const {
    for (int64_t r = 0; r < rows; ++r) {
      const Vector keep = broadcast(correction[r]);
      const float* sums = scratch_.sums + r * kPair;
      float* row = to + r * to_stride;
      for (int64_t g = 0; g < groups; ++g, row += kPair, sums += kTileRows * kTileRows) {
        const Pair sum = load_packed(sums);
        store(row, load(row) * keep + sum.a);
        store(row + W, load(row + W) * keep + sum.b);
      }
    }
  }

  const Tiles tiles_;
  const AttentionCall& call_;
  const Scratch scratch_;
  Ahead ahead_;
};

// One or two rows take AVX-512 less time than memory takes to answer, which it keeps busy better.
constexpr int64_t kLeastTileRows = 3;

static int64_t decode_amx_scratch_bytes(const AttentionCall& call) {
  return call.rows < kLeastTileRows ? scratch_bytes<VectorProducts<SingleDots<BFloat16>>>(call)
                                    : scratch_bytes<TileProducts>(call);
}

static void decode_amx_chunk(const AttentionCall& call, const KeyChunk& chunk,
                             const KeyChunk* next, float* partial, void* scratch) {
  if (call.rows < kLeastTileRows) {
    decode_chunk<VectorProducts<SingleDots<BFloat16>>>(call, chunk, next, partial, scratch);
  } else {
    decode_chunk<TileProducts>(call, chunk, next, partial, scratch);
  }
}

static DecodeKernels decode_amx_kernels() {
  return {decode_amx_scratch_bytes, partial_floats, decode_amx_chunk, decode_fold,
          decode_finish<BFloat16>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
