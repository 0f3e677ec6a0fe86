// Attention of a few query rows over one chunk of keys, tile by tile: logits, online softmax,
// weighted values. All query heads of a kv head and all query tokens go through a tile together,
// so that keys and values are read from memory once.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Which keys of a tile the rows may attend to.
enum class Valid { kNone, kAll, kShared, kPerRow };

// One thread's working memory for a chunk.
struct Workspace {
  void* products;            // what the products need
  float* logits;             // [rows, kTileKeys]
  float* weights;            // [rows, kTileKeys]
  float* correction;         // [rows] factor of what the row has accumulated so far
  uint8_t* valid;            // [rows, kTileKeys]
  uint8_t* part_valid;       // [rows, kTileKeys]
  float factors[kTileKeys];  // of the bias
  int32_t list[kTileKeys];   // indices of the valid keys
};

template <class Products>
static int64_t place_workspace(const AttentionCall& call, char* memory, Workspace* workspace) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += (bytes + 63) / 64 * 64;
    return at;
  };
  const int64_t tile = call.rows * kTileKeys;
  workspace->products = take(Products::scratch_bytes(call));
  workspace->logits = (float*)take(tile * (int64_t)sizeof(float));
  workspace->weights = (float*)take(tile * (int64_t)sizeof(float));
  workspace->correction = (float*)take(call.rows * (int64_t)sizeof(float));
  workspace->valid = (uint8_t*)take(tile);
  workspace->part_valid = (uint8_t*)take(tile);
  return used;
}

template <class Products>
static int64_t scratch_bytes(const AttentionCall& call) {
  Workspace workspace;
  return place_workspace<Products>(call, nullptr, &workspace);
}

template <class T>
RADAR_INLINE const typename T::Storage* query_row(const AttentionCall& call, int64_t batch,
                                                  int64_t kv_head, int64_t row) {
  const int64_t head = kv_head * (call.heads / call.kv_heads) + row / call.queries;
  return (const typename T::Storage*)call.query + batch * call.query_stride[0] +
         head * call.query_stride[1] + row % call.queries * call.query_stride[2];
}

// Where a row's numbers sit in a partial result: [parts][rows][kStats], then the values.
RADAR_INLINE float* row_stats(const AttentionCall& call, float* partial, int64_t part, int64_t row) {
  return partial + (part * call.rows + row) * kStats;
}
RADAR_INLINE float* row_values(const AttentionCall& call, float* partial, int64_t part, int64_t row) {
  return partial + call.parts * call.rows * kStats +
         (part * call.rows + row) * padded(call.value_dim);
}

static int64_t partial_floats(const AttentionCall& call) {
  const int64_t count = call.parts * call.rows * (kStats + padded(call.value_dim));
  return (count + 15) / 16 * 16;
}

// A running maximum of -inf has seen nothing finite: exponents are then taken from 0, so that
// logits of -inf weigh nothing and NaN stays NaN.
RADAR_INLINE float reference_point(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }
RADAR_INLINE float exp_scalar(float x) { return exp_nonpositive(broadcast(x))[0]; }

// ---- which keys are attended to ---------------------------------------------------------------

static inline void copy_flags(uint8_t* to, const uint8_t* from, int64_t stride, int64_t count) {
  if (stride == 1) {
    __builtin_memcpy(to, from, (uint64_t)count);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
  }
  __builtin_memset(to + count, 0, (uint64_t)(kTileKeys - count));
}

static inline int64_t count_flags(const uint8_t* flags) {
  int64_t count = 0;
  for (int64_t i = 0; i < kTileKeys; ++i) count += flags[i] != 0;
  return count;
}

static inline Valid classify_rows(const uint8_t* valid, int64_t rows, int64_t count) {
  int64_t most = 0, least = count;
  bool same = true;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t here = count_flags(valid + r * kTileKeys);
    most = here > most ? here : most;
    least = here < least ? here : least;
    same = same && __builtin_memcmp(valid, valid + r * kTileKeys, kTileKeys) == 0;
  }
  if (most == 0) return Valid::kNone;
  if (least == count) return Valid::kAll;
  return same ? Valid::kShared : Valid::kPerRow;
}

static inline Valid tile_validity(const AttentionCall& call, int64_t batch, int64_t kv_head,
                                  int64_t start, int64_t count, uint8_t* valid) {
  // Whether causality or the window cuts this tile for some query.
  const bool bounded = call.causal && (start < call.first_key(batch, call.queries - 1) ||
                                       start + count > call.last_key(batch, 0));
  if (!call.mask && !bounded) return Valid::kAll;
  const int64_t group = call.heads / call.kv_heads;
  const bool per_row = bounded || (call.mask && ((call.mask_stride[1] != 0 && group > 1) ||
                                                 (call.mask_stride[2] != 0 && call.queries > 1)));
  const int64_t rows = per_row ? call.rows : 1;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* flags = valid + r * kTileKeys;
    const int64_t query = r % call.queries;
    if (call.mask) {
      const uint8_t* mask = call.mask + batch * call.mask_stride[0] +
                            (kv_head * group + r / call.queries) * call.mask_stride[1] +
                            query * call.mask_stride[2] + start * call.mask_stride[3];
      copy_flags(flags, mask, call.mask_stride[3], count);
    } else {
      __builtin_memset(flags, 1, (uint64_t)count);
      __builtin_memset(flags + count, 0, (uint64_t)(kTileKeys - count));
    }
    if (bounded) {
      const int64_t first = call.first_key(batch, query), last = call.last_key(batch, query);
      for (int64_t i = 0; i < count; ++i) flags[i] &= start + i >= first && start + i < last;
    }
  }
  return classify_rows(valid, rows, count);
}

// The factors of the bias on a tile; false if no key of it is anchored.
static inline bool tile_factors(const AttentionCall& call, int64_t batch, int64_t start,
                                int64_t count, float* factors) {
  bool any = false;
  if (call.anchor_flags) {
    const uint8_t* flags = call.anchor_flags + batch * call.anchor_stride + start;
    uint8_t found = 0;
    for (int64_t i = 0; i < count; ++i) found |= flags[i];
    any = found != 0;
    if (any) {
      for (int64_t i = 0; i < count; ++i) factors[i] = flags[i] ? 1.0f : 0.0f;
    }
  } else if (call.anchor_factors) {
    const float* from = call.anchor_factors + batch * call.anchor_stride + start;
    for (int64_t i = 0; i < count; ++i) {
      factors[i] = from[i];
      any |= from[i] != 0.0f;
    }
  }
  if (any) {
    for (int64_t i = count; i < kTileKeys; ++i) factors[i] = 0.0f;
  }
  return any;
}

// ---- logits -----------------------------------------------------------------------------------

// Raw products to logits [rows, kTileKeys], -inf from `count` on.
static inline void scale_logits(const AttentionCall& call, int64_t count, float* to) {
  const Vector scale = broadcast(call.scale);
  for (int64_t r = 0; r < call.rows; ++r) {
    float* logits = to + r * kTileKeys;
    for (int64_t i = 0; i < count; i += W) {
      Vector s = load(logits + i) * scale;
      if (call.softcap != 0.0f) s = tanh(s / call.softcap) * call.softcap;
      store(logits + i, s);
    }
    for (int64_t i = count; i < kTileKeys; ++i) logits[i] = -kInfinity;
  }
}

// ---- online softmax ---------------------------------------------------------------------------

// Adds the exponentials of a tile of logits to (maximum, sum); returns the factor by which what
// was summed before shrinks. `weights` may be null.
RADAR_INLINE float add_exponentials(const Vector* logits, float* stats, float* weights) {
  constexpr int kVectors = kTileKeys / W;
  Vector top = broadcast(-kInfinity);
  for (int v = 0; v < kVectors; ++v) top = maximum(logits[v], top);
  const float before = stats[0];
  const float tile = maximum_across(top);
  const float after = tile > before ? tile : before;
  const float point = reference_point(after);
  Vector sum = {};
  for (int v = 0; v < kVectors; ++v) {
    const Vector e = exp_nonpositive(logits[v] - point);
    if (weights) store(weights + v * W, e);
    sum += e;
  }
  const float shrink = before == after ? 1.0f : exp_scalar(before - point);
  stats[0] = after;
  stats[1] = stats[1] * shrink + sum_across(sum);
  return shrink;
}

// The weights of one row on a tile. `valid` null: all keys; `factors` null: no bias here.
RADAR_INLINE float row_weights(const float* logits, const uint8_t* valid, const float* factors,
                               float bias, bool track_unbiased, float* stats, float* weights) {
  constexpr int kVectors = kTileKeys / W;
  Vector s[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    s[v] = load(logits + v * W);
    if (valid) s[v] = select(lanes_set(valid + v * W), s[v], broadcast(-kInfinity));
  }
  if (track_unbiased) add_exponentials(s, stats + 2, nullptr);
  if (factors) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector f = load(factors + v * W);
      s[v] += select(f != 0.0f, f * bias, Vector{});
      if (valid) s[v] = select(lanes_set(valid + v * W), s[v], broadcast(-kInfinity));
    }
  }
  return add_exponentials(s, stats, weights);
}

// ---- weighted values --------------------------------------------------------------------------

// The values of the next tile are prefetched along with those of this one, one key for each, but
// for every kSpareEvery-th: these are left to the time that the weights take, so that memory is
// busy then too.
constexpr int64_t kSpareEvery = 4;
constexpr int64_t kSparedKeys = kTileKeys / kSpareEvery;

// The n-th key of a tile, from kPlaces places in turn.
template <class Storage>
RADAR_INLINE void prefetch_key(const Storage* tile, int64_t stride, int64_t n, int64_t bytes) {
  const int64_t key = n % kPlaces * (kTileKeys / kPlaces) + n / kPlaces;
  const char* at = (const char*)(tile + key * stride);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}
template <class Storage>
RADAR_INLINE void prefetch_beside(const Storage* tile, int64_t stride, int64_t n, int64_t bytes) {
  if (tile && n % kSpareEvery != kSpareEvery - 1) prefetch_key(tile, stride, n, bytes);
}

// R rows and B pairs of what has been summed, shrunk by each row's correction; and back.
template <int R, int B>
RADAR_INLINE void load_sums(const float* from, int64_t stride, const float* correction,
                            Pair (&sums)[R][B]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      sums[r][b].a = load(from + r * stride + b * kPair) * correction[r];
      sums[r][b].b = load(from + r * stride + b * kPair + W) * correction[r];
    }
  }
}
template <int R, int B>
RADAR_INLINE void store_sums(const Pair (&sums)[R][B], float* to, int64_t stride) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      store(to + r * stride + b * kPair, sums[r][b].a);
      store(to + r * stride + b * kPair + W, sums[r][b].b);
    }
  }
}

// to[r] = to[r] * correction[r] + sum over keys of weights[r][key] * values[key], for R rows and
// B pairs of the value dimension (`part` elements of one pair if part is not 0). `list` null: the
// first `count` keys in order. Meanwhile the tile at `next` (or null) is prefetched.
template <class T, int R, int B>
RADAR_INLINE void values_block(const float* weights, const typename T::Storage* values,
                               int64_t stride, const int32_t* list, int64_t count, int64_t part,
                               const typename T::Storage* next, const float* correction,
                               float* to, int64_t to_stride) {
  Pair sums[R][B];
  load_sums<R, B>(to, to_stride, correction, sums);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t key = list ? list[n] : n;
    const typename T::Storage* line = values + key * stride;
    prefetch_beside(next, stride, n, B * kPair * (int64_t)sizeof(*line));
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const Pair v = part ? T::load_part(line, part) : T::load_pair(line + b * kPair);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float weight = weights[r * kTileKeys + key];
        sums[r][b].a += v.a * weight;
        sums[r][b].b += v.b * weight;
      }
    }
  }
  store_sums<R, B>(sums, to, to_stride);
}

template <class T, int R>
static inline void add_values(const float* weights, const typename T::Storage* values,
                              int64_t stride, const int32_t* list, int64_t count, int64_t dim,
                              const typename T::Storage* next, const float* correction, float* to,
                              int64_t to_stride) {
  // As many sums as the registers hold.
  constexpr int kRegisters = W == 16 ? 8 : 4;
  constexpr int kWide = kRegisters / (R == 3 ? 4 : R) > 4 ? 4 : kRegisters / (R == 3 ? 4 : R);
  int64_t d = 0;
  const auto soon = [&] { return next ? next + d : nullptr; };
  for (; d + kWide * kPair <= dim; d += kWide * kPair) {
    values_block<T, R, kWide>(weights, values + d, stride, list, count, 0, soon(), correction,
                              to + d, to_stride);
  }
  if (kWide > 2 && d + 2 * kPair <= dim) {
    values_block<T, R, 2>(weights, values + d, stride, list, count, 0, soon(), correction, to + d,
                          to_stride);
    d += 2 * kPair;
  }
  for (; d + kPair <= dim; d += kPair) {
    values_block<T, R, 1>(weights, values + d, stride, list, count, 0, soon(), correction, to + d,
                          to_stride);
  }
  if (d < dim) {
    values_block<T, R, 1>(weights, values + d, stride, list, count, dim - d, soon(), correction,
                          to + d, to_stride);
  }
}

// The same for any number of rows, each of which has kTileKeys weights.
template <class T>
static inline void add_row_values(int64_t rows, const float* weights,
                                  const typename T::Storage* values, int64_t stride,
                                  const int32_t* list, int64_t count, int64_t dim,
                                  const typename T::Storage* next, const float* correction,
                                  float* to, int64_t to_stride) {
  while (rows > 0) {
    const int64_t taken = rows < 4 ? rows : 4;
    const auto add = taken == 4   ? add_values<T, 4>
                     : taken == 3 ? add_values<T, 3>
                     : taken == 2 ? add_values<T, 2>
                                  : add_values<T, 1>;
    add(weights, values, stride, list, count, dim, next, correction, to, to_stride);
    rows -= taken;
    weights += taken * kTileKeys;
    correction += taken;
    to += taken * to_stride;
    next = nullptr;
  }
}

static inline int64_t list_keys(const uint8_t* valid, int32_t* list) {
  int64_t count = 0;
  for (int32_t i = 0; i < kTileKeys; ++i) {
    list[count] = i;
    count += valid[i] != 0;
  }
  return count;
}

// ---- products ---------------------------------------------------------------------------------

// What a chunk multiplies, tile by tile: queries with keys, weights with values. Meanwhile it
// prefetches the next tile.
template <class Dots>
class VectorProducts {
 public:
  using Element = typename Dots::Element;
  using Storage = typename Element::Storage;
  using Packed = typename Dots::Packed;

  static int64_t scratch_bytes(const AttentionCall& call) {
    return call.rows * padded(call.key_dim) * (int64_t)sizeof(Packed);
  }
  VectorProducts(const AttentionCall& call, int64_t batch, int64_t kv_head, void* scratch)
      : call_(call), query_((Packed*)scratch) {
    for (int64_t r = 0; r < call.rows; ++r) {
      Dots::pack(query_ + r * padded(call.key_dim),
                 query_row<Element>(call, batch, kv_head, r), call.key_dim);
    }
  }

  // Begins a tile; null where no other follows.
  void look_ahead(const Storage* keys, const Storage* values) {
    next_keys_ = keys;
    next_values_ = values;
    weighed_ = 0;
  }
  // After the weights of each row.
  void row_weighed() {
    const int64_t from = weighed_ * kSparedKeys / call_.rows;
    const int64_t upto = ++weighed_ * kSparedKeys / call_.rows;
    for (int64_t i = from; next_values_ && i < upto; ++i) {
      prefetch_key(next_values_, call_.value_stride[2], (i + 1) * kSpareEvery - 1,
                   call_.value_dim * (int64_t)sizeof(Storage));
    }
  }

  // Of every row with `count` keys, [rows, kTileKeys]; nothing is said of the columns after them.
  void logits(const Storage* keys, int64_t count, float* to) {
    for (int64_t r = 0; r < call_.rows;) {
      const int64_t left = call_.rows - r;
      const Storage* soon = r == 0 ? next_keys_ : nullptr;
      r += left >= 4   ? row_logits<4>(r, keys, count, soon, to)
           : left == 3 ? row_logits<3>(r, keys, count, soon, to)
           : left == 2 ? row_logits<2>(r, keys, count, soon, to)
                       : row_logits<1>(r, keys, count, soon, to);
    }
  }

  // to[r] = to[r] * correction[r] + sum over keys of weights[r][key] * values[key]; the keys of the
  // list, or the first `count`.
  void values(const float* weights, const Storage* values, const int32_t* list, int64_t count,
              const float* correction, float* to) {
    add_row_values<Element>(call_.rows, weights, values, call_.value_stride[2], list, count,
                            call_.value_dim, next_values_, correction, to,
                            padded(call_.value_dim));
    next_values_ = nullptr;
  }

 protected:
  const AttentionCall& call_;
  const Storage* next_values_ = nullptr;
  int64_t weighed_ = 0;

 private:
  template <int R>
  int64_t row_logits(int64_t r, const Storage* keys, int64_t count, const Storage* next,
                     float* to) const {
    const int64_t stride = padded(call_.key_dim);
    dot_rows<Dots, R>(query_ + r * stride, stride, keys, call_.key_stride[2], count,
                      call_.key_dim, next, to + r * kTileKeys, kTileKeys);
    return R;
  }

  Packed* query_;  // [rows, padded key_dim]
  const Storage* next_keys_ = nullptr;
};

// ---- a chunk ----------------------------------------------------------------------------------

// Adds the keys of a tile that `valid` allows to one part of the partial result.
template <class Products, class Storage>
static inline void accumulate(const AttentionCall& call, Products& products,
                              Workspace& workspace, int64_t batch, int64_t kv_head,
                              const Storage* values, int64_t count, int64_t part, Valid kind,
                              const uint8_t* valid, const float* factors, float* partial) {
  const int64_t group = call.heads / call.kv_heads;
  const bool track_unbiased = factors && call.parts == 2;
  for (int64_t r = 0; r < call.rows; ++r) {
    const float bias =
        factors ? call.bias[batch * call.bias_stride + kv_head * group + r / call.queries] : 0.0f;
    const uint8_t* row_valid = kind == Valid::kAll      ? nullptr
                               : kind == Valid::kShared ? valid
                                                        : valid + r * kTileKeys;
    workspace.correction[r] = row_weights(
        workspace.logits + r * kTileKeys, row_valid, factors, bias, track_unbiased,
        row_stats(call, partial, part, r), workspace.weights + r * kTileKeys);
    products.row_weighed();
  }
  if (kind == Valid::kPerRow) {
    for (int64_t r = 0; r < call.rows; ++r) {
      const int64_t listed = list_keys(valid + r * kTileKeys, workspace.list);
      add_values<typename Products::Element, 1>(
          workspace.weights + r * kTileKeys, values, call.value_stride[2], workspace.list, listed,
          call.value_dim, nullptr, workspace.correction + r, row_values(call, partial, part, r),
          padded(call.value_dim));
    }
    return;
  }
  const int32_t* list = nullptr;
  if (kind == Valid::kShared) {
    count = list_keys(valid, workspace.list);
    list = workspace.list;
  }
  products.values(workspace.weights, values, list, count, workspace.correction,
                  row_values(call, partial, part, 0));
}

// A tile with anchored keys in two-part accumulation: the rest, then the anchored keys.
template <class Products, class Storage>
static inline void accumulate_parts(const AttentionCall& call, Products& products,
                                    Workspace& workspace, int64_t batch, int64_t kv_head,
                                    const Storage* values, int64_t count, Valid kind,
                                    float* partial) {
  const int64_t rows = kind == Valid::kPerRow ? call.rows : 1;
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* valid = workspace.valid + r * kTileKeys;
      uint8_t* flags = workspace.part_valid + r * kTileKeys;
      for (int64_t i = 0; i < kTileKeys; ++i) {
        const bool open = kind == Valid::kAll ? i < count : valid[i] != 0;
        flags[i] = open && (workspace.factors[i] != 0.0f) == (part == 1);
      }
    }
    const Valid part_kind = classify_rows(workspace.part_valid, rows, count);
    if (part_kind == Valid::kNone) continue;
    // Flags leave the bias to the end; factors differ between keys, so it is added here.
    const float* factors = part == 1 && call.anchor_factors && call.bias ? workspace.factors : nullptr;
    accumulate(call, products, workspace, batch, kv_head, values, count, part, part_kind,
               workspace.part_valid, factors, partial);
  }
}

// A chunk's first key or value.
template <class T>
RADAR_INLINE const typename T::Storage* first_line(const void* memory, const int64_t* stride,
                                                   const KeyChunk& chunk) {
  return (const typename T::Storage*)memory + chunk.batch * stride[0] + chunk.kv_head * stride[1] +
         chunk.begin * stride[2];
}

template <class Products>
static void decode_chunk(const AttentionCall& call, const KeyChunk& chunk, const KeyChunk* next,
                         float* partial, void* scratch) {
  using T = typename Products::Element;
  using Storage = typename T::Storage;
  Workspace workspace;
  place_workspace<Products>(call, (char*)scratch, &workspace);
  const int64_t batch = chunk.batch, kv_head = chunk.kv_head;
  Products products(call, batch, kv_head, workspace.products);
  for (int64_t part = 0; part < call.parts; ++part) {
    for (int64_t r = 0; r < call.rows; ++r) {
      float* stats = row_stats(call, partial, part, r);
      stats[0] = stats[2] = -kInfinity;
      stats[1] = stats[3] = 0.0f;
      __builtin_memset(row_values(call, partial, part, r), 0,
                       (uint64_t)padded(call.value_dim) * sizeof(float));
    }
  }
  const Storage* keys = first_line<T>(call.key, call.key_stride, chunk);
  const Storage* values = first_line<T>(call.value, call.value_stride, chunk);
  for (int64_t start = chunk.begin; start < chunk.end; start += kTileKeys) {
    const int64_t count = chunk.end - start < kTileKeys ? chunk.end - start : kTileKeys;
    const Storage* tile_keys = keys;
    const Storage* tile_values = values;
    keys += kTileKeys * call.key_stride[2];
    values += kTileKeys * call.value_stride[2];
    if (start + kTileKeys >= chunk.end) {
      keys = next ? first_line<T>(call.key, call.key_stride, *next) : nullptr;
      values = next ? first_line<T>(call.value, call.value_stride, *next) : nullptr;
    }
    const Valid kind = tile_validity(call, batch, kv_head, start, count, workspace.valid);
    if (kind == Valid::kNone) continue;
    const bool anchored = tile_factors(call, batch, start, count, workspace.factors);
    products.look_ahead(keys, values);
    products.logits(tile_keys, count, workspace.logits);
    scale_logits(call, count, workspace.logits);
    if (call.parts == 2 && anchored) {
      accumulate_parts(call, products, workspace, batch, kv_head, tile_values, count, kind,
                       partial);
    } else {
      const float* factors = anchored && call.bias ? workspace.factors : nullptr;
      accumulate(call, products, workspace, batch, kv_head, tile_values, count, 0, kind,
                 workspace.valid, factors, partial);
    }
  }
}

// ---- merging ----------------------------------------------------------------------------------

RADAR_INLINE void merge_stats(float* into, const float* from, float* keep, float* take) {
  const float maximum = from[0] > into[0] ? from[0] : into[0];
  const float point = reference_point(maximum);
  *keep = exp_scalar(into[0] - point);
  *take = exp_scalar(from[0] - point);
  into[0] = maximum;
  into[1] = into[1] * *keep + from[1] * *take;
}

static void decode_fold(const AttentionCall& call, float* into, const float* partial) {
  for (int64_t part = 0; part < call.parts; ++part) {
    for (int64_t r = 0; r < call.rows; ++r) {
      float* to = row_stats(call, into, part, r);
      const float* from = row_stats(call, (float*)partial, part, r);
      float keep, take;
      merge_stats(to + 2, from + 2, &keep, &take);
      merge_stats(to, from, &keep, &take);
      float* to_values = row_values(call, into, part, r);
      const float* from_values = row_values(call, (float*)partial, part, r);
      for (int64_t d = 0; d < padded(call.value_dim); d += W) {
        store(to_values + d, load(to_values + d) * keep + load(from_values + d) * take);
      }
    }
  }
}

// ---- the epilogue -----------------------------------------------------------------------------

// A sink is one more key of the rest, without a value.
static inline float add_sink(float* stats, float sink) {
  const float sinks[4] = {sink, 1.0f, -kInfinity, 0.0f};
  float keep, take;
  merge_stats(stats, sinks, &keep, &take);
  return keep;
}

RADAR_INLINE double log_sum(const float* stats) {
  if (stats[1] == 0.0f) return -kInfinity;
  return (double)reference_point(stats[0]) + __builtin_log((double)stats[1]);
}

RADAR_INLINE float inverse(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

template <class T>
static void decode_finish(const AttentionCall& call, int64_t batch, int64_t kv_head,
                          const float* partial) {
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t r = 0; r < call.rows; ++r) {
    const OutputRow row = {batch, kv_head * group + r / call.queries, r % call.queries};
    float rest[kStats];
    __builtin_memcpy(rest, row_stats(call, (float*)partial, 0, r), sizeof rest);
    const float keep = call.sinks ? add_sink(rest, call.sinks[row.head]) : 1.0f;
    const float* rest_values = row_values(call, (float*)partial, 0, r);
    if (call.parts == 1) {
      finish_plain<T>(call, row, rest_values, keep * inverse(rest[1]));
      continue;
    }
    const float* anchored = row_stats(call, (float*)partial, 1, r);
    const bool factors = call.anchor_factors && call.bias;
    const PartSums sums = {log_sum(rest), log_sum(anchored),
                           factors ? log_sum(anchored + 2) : log_sum(anchored)};
    finish_parts<T>(call, row, sums, rest_values, keep * inverse(rest[1]),
                    row_values(call, (float*)partial, 1, r), inverse(anchored[1]));
  }
}

template <class T>
static constexpr DecodeKernels decode_kernels() {
  using Products = VectorProducts<SingleDots<T>>;
  return {scratch_bytes<Products>, partial_floats, decode_chunk<Products>, decode_fold,
          decode_finish<T>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
