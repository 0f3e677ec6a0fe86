// What the operators hand to the kernels, and the table of kernels of one instruction set.
// Plain data only: this header is also included by the instruction-set translation units, which
// must not see torch (its inline functions would be compiled for a newer CPU and then shared).
#pragma once

#include <cstdint>

namespace radar {

enum class Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
constexpr int kTypes = 3;

// Keys whose logits are held at once. K and V of one tile stay in the first-level caches while
// every query row of the group reads them.
constexpr int64_t kTileKeys = 64;

// One call of an attention operator. Strides count elements; broadcast dimensions have stride 0.
struct AttentionCall {
  const void* query;
  const void* key;
  const void* value;
  // The outputs: [batch, queries, heads, value_dim] and [batch, heads, queries], contiguous. Either
  // `out` is everything, and `mass` may be null; or, in a partition, `out` is the rest.
  void* out;
  float* mass;
  void* anchored_out;
  float* anchored_lse;
  float* rest_lse;
  int64_t batch, heads, kv_heads, queries, keys, key_dim, value_dim;
  int64_t query_stride[3];  // batch, head, query
  int64_t key_stride[3];    // batch, head, key
  int64_t value_stride[3];

  const uint8_t* anchor_flags;  // one of the two is set where there are anchors
  const float* anchor_factors;
  int64_t anchor_stride;
  const float* bias;  // [batch or 1, heads]
  int64_t bias_stride;
  const float* target_mass;
  int64_t target_stride;
  bool target_exact;

  const uint8_t* mask;
  int64_t mask_stride[4];
  const int32_t* key_lengths;
  int64_t key_lengths_stride;
  bool causal;
  int64_t window;  // 0: none
  float scale;
  float softcap;  // 0: none
  const float* sinks;

  // 1, or 2 for two-part accumulation: part 0 is the rest, part 1 the anchored keys.
  int64_t parts;
  int64_t rows;  // query rows that share a kv head: heads / kv_heads * queries

  int64_t length(int64_t row) const {
    return key_lengths ? key_lengths[row * key_lengths_stride] : keys;
  }
  // The first and one past the last key that query token i of a row may see, before any mask.
  int64_t first_key(int64_t row, int64_t i) const {
    const int64_t first = window ? length(row) - queries + i - window + 1 : 0;
    return first > 0 ? first : 0;
  }
  int64_t last_key(int64_t row, int64_t i) const {
    const int64_t last = causal ? length(row) - queries + i + 1 : length(row);
    return last > 0 ? last : 0;
  }
};

// The rows of one (batch, kv head) over some keys, unnormalised: kStats floats a row and part
// (running maximum, sum, and the same two for anchored keys before their bias), then the values.
constexpr int64_t kStats = 4;

// Keys of one row and kv head.
struct KeyChunk {
  int64_t batch, kv_head, begin, end;
};

struct DecodeKernels {
  int64_t (*scratch_bytes)(const AttentionCall&);
  int64_t (*partial_floats)(const AttentionCall&);
  // `next` is what the thread will read after this chunk, or null: it is prefetched.
  void (*chunk)(const AttentionCall&, const KeyChunk& chunk, const KeyChunk* next, float* partial,
                void* scratch);
  void (*fold)(const AttentionCall&, float* into, const float* partial);
  void (*finish)(const AttentionCall&, int64_t batch, int64_t kv_head, const float* partial);
};

// Query rows whose tiles of scores are computed together: some tokens of some heads of one group,
// head by head.
struct RowBlock {
  int64_t batch, kv_head, head, heads, token, tokens;
  int64_t rows() const { return heads * tokens; }
};

// The scores of a row block against some keys, `columns` a multiple of kColumnStep; a row starts
// every kBlockKeys floats.
struct ScoreTile {
  float* scores;
  int64_t start;  // its first key
  int64_t columns;
};

// Keys of one packed block, and the steps in which tiles of it begin and end.
constexpr int64_t kBlockKeys = 256;
constexpr int64_t kColumnStep = 64;

struct PrefillKernels {
  int64_t element_bytes;  // of what the matrix products read
  int64_t pair;           // key_dim and value_dim are filled up to a multiple of it when packed
  // Of one block of keys from `start` on: [key_dim, kBlockKeys] and [kBlockKeys, value_dim] as the
  // matrix products read them; 0 for keys from `end` on and where `readable` (or null) is 0.
  void (*pack_keys)(const AttentionCall&, int64_t batch, int64_t kv_head, int64_t start,
                    int64_t end, const uint8_t* readable, void* to);
  void (*pack_values)(const AttentionCall&, int64_t batch, int64_t kv_head, int64_t start,
                      int64_t end, const uint8_t* readable, void* to);
  void (*pack_queries)(const AttentionCall&, const RowBlock&, void* to);
  // Scale, softcap and mask, in place.
  void (*adjust)(const AttentionCall&, const RowBlock&, const ScoreTile&);
  // Softmax weights of the tile's columns begin..end, [rows, kBlockKeys]; stats and values, what
  // the rows have gathered so far, shrink to the new maximum. `factors` (or null) are each key's of
  // the bias, `hidden` (or null) is -inf for keys left out, else 0.
  void (*weights)(const AttentionCall&, const RowBlock&, const ScoreTile&, bool adjusted,
                  int64_t begin, int64_t end, const float* factors, const float* hidden,
                  float* stats, void* weights, float* values);
  // to[i] = sum over rows r of rows[r, i] * factors[r]; a row starts every kBlockKeys floats.
  void (*sum_rows)(const float* rows, const float* factors, int64_t count, int64_t columns,
                   float* to);
  // Stats and values [rows, value_dim] of the parts to the outputs.
  void (*finish)(const AttentionCall&, const RowBlock&, const float* const* stats,
                 const float* const* values);
};

// One call of linear_rows: out[r, o] = sum_i input[r, i] * weight[o, i] + bias[o].
struct LinearCall {
  const void* input;  // [rows, in], contiguous
  const void* weight;
  const void* bias;  // may be null
  void* out;         // [rows, out_features], contiguous
  int64_t rows, in_features, out_features;
};

struct LinearKernels {
  int64_t (*packed_bytes)(const LinearCall&);
  void (*pack)(const LinearCall&, void* packed);
  // The weights of the outputs from `next` on are prefetched (-1: none).
  void (*range)(const LinearCall&, const void* packed, int64_t begin, int64_t end, int64_t next);
};

// One row of logits, blended with those of the masked prompt where `masked` is set:
// full + move * (full - masked), or the modulated variant.
struct LogitRow {
  const void* full;
  const void* masked;
  int64_t tokens;
  float move;  // strength - 1
  // Of `blend` alone: the modulated variant; whether the move is weighted by the probability,
  // e^(full - top) / mass.
  bool modulated, weighted;
  float top, mass;
};

// Tokens of a chunk, and the maxima that are kept of it (each of some of its tokens).
constexpr int64_t kChunkTokens = 256;
constexpr int64_t kChunkMaxima = 16;

// Which random numbers a row draws: token t takes word t % 4 of Philox block t / 4.
struct Noise {
  uint64_t seed, offset;
};
struct Draw {
  float score;
  int64_t token;
};

// Ranges count chunks. NaN counts as -inf, except in `blend` and where it is kept.
struct LogitKernels {
  void (*maxima)(const LogitRow&, int64_t begin, int64_t end, float* maxima);
  // The sum of e^(logit / temperature - top) of each chunk.
  void (*masses)(const LogitRow&, int64_t begin, int64_t end, float temperature, float top,
                 bool keep_nan, float* masses);
  int64_t (*collect)(const LogitRow&, int64_t chunks, const float* maxima, float least,
                     float* values, int32_t* ids);
  int64_t (*first)(const LogitRow&, int64_t chunks, const float* maxima, float temperature,
                   float least);
  // Of `count` numbers, a multiple of kChunkMaxima: the largest; and one that k of them reach.
  float (*largest)(const float* values, int64_t count);
  float (*reached_by)(const float* values, int64_t count, int64_t k);
  void (*divide)(float* values, int64_t count, float temperature);
  void (*weights)(const float* values, int64_t count, float top, float* weights);
  uint32_t (*word)(int64_t token, const Noise&);
  float (*gumbel)(uint32_t word);
  void (*draw_listed)(const float* warm, const int32_t* ids, int64_t count, float floor,
                      const Noise&, Draw* best);
  void (*draw_all)(const LogitRow&, int64_t begin, int64_t end, const float* maxima,
                   float temperature, const Noise&, Draw* best);
  void (*blend)(const LogitRow&, int64_t begin, int64_t end, float* out);
};

// One call of edit_keys: key + gain[head] * key @ left[head] (@ right[head]).
struct EditCall {
  const float* left;   // [heads, size, rank]; [heads, size, size] without `right`
  const float* right;  // [heads, rank, size], or null
  const float* gain;   // [heads]
  int64_t size, rank;
};

struct EditKernels {
  int64_t (*scratch_bytes)(const EditCall&);
  // Any number of rows of keys of one head.
  void (*rows)(const EditCall&, int64_t head, const void* const* from, void* const* to,
               int64_t rows, void* scratch);
};

// One call of the relevance operators: cosines of every sentence with every query, times decays.
struct RelevanceCall {
  const void* sentences;  // [count, size], rows `row_stride` elements apart
  const float* scales;    // of each row of int8 sentences, otherwise null
  const float* query_values;  // [queries, size], contiguous
  int64_t count, size, queries, row_stride;
  int64_t width;  // of a row of scores or decays: the queries, filled up to kRelevanceStep
};

constexpr int64_t kRelevanceStep = 16;
// Sentences of one call of `tile`.
constexpr int64_t kRelevanceTile = 128;

struct RelevanceKernels {
  int64_t (*packed_bytes)(const RelevanceCall&);
  // The queries as `tile` reads them; products with them are cosines once multiplied by `factors`
  // [queries] (and divided by the norm of the sentence).
  void (*pack)(const RelevanceCall&, void* packed, float* factors);
  int64_t (*scratch_bytes)(const RelevanceCall&);
  // The scores of at most kRelevanceTile sentences from `begin` on, [count, width]. `spatial` and
  // `temporal` give each sentence its row of decays [width], negative where a pair is not scored.
  void (*tile)(const RelevanceCall&, const void* packed, int64_t begin, int64_t count,
               const float* const* spatial, const float* const* temporal, void* scratch,
               float* scores);
};

struct ScoreKernels {
  // Where in scores [count, width] something above -inf reaches the limit [width] of its column,
  // row by row; returns how many.
  int64_t (*passing)(const float* scores, int64_t count, int64_t width, const float* limits,
                     int32_t* places);
  // The first `columns` columns of scores [count, width], to rows `stride` apart.
  void (*transpose)(const float* scores, int64_t count, int64_t width, int64_t columns,
                    float* out, int64_t stride);
};

// out = share * first + (1 - share) * second, over one row of `size` elements.
using MergeRow = void (*)(const void* first, const void* second, float share, int64_t size,
                          void* out);

// c[rows, columns] (+)= a[rows, inner] b[inner, columns]
using Product = void (*)(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t lda,
                         const void* b, int64_t ldb, float* c, int64_t ldc, bool add);

struct Kernels {
  const char* name;
  DecodeKernels decode[kTypes];
  PrefillKernels prefill[kTypes];          // products of the elements themselves
  PrefillKernels prefill_single[kTypes];   // products of their float32 values
  LinearKernels linear[kTypes];
  MergeRow merge_row[kTypes];
  LogitKernels logits[kTypes];
  RelevanceKernels relevance[kTypes + 1];  // the last one is of int8 sentences
  ScoreKernels scores;
  EditKernels edit[kTypes];
  Product word_product;  // of bfloat16, pairs of b's rows side by side; null: torch's serve as well
};

// Null where the compiler or the architecture does not know the instruction set.
const Kernels* kernels_baseline();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_bf16();
const Kernels* kernels_amx();

}  // namespace radar
