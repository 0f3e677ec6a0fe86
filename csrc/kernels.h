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

// One call of decode_attention. Strides count elements; broadcast dimensions have stride 0.
struct DecodeCall {
  const void* query;
  const void* key;
  const void* value;
  void* out;    // [batch, queries, heads, value_dim], contiguous
  float* mass;  // [batch, heads, queries] or null
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
};

// The rows of one (batch, kv head) over some keys, unnormalised: kStats floats a row and part
// (running maximum, sum, and the same two for anchored keys before their bias), then the values.
constexpr int64_t kStats = 4;

struct DecodeKernels {
  int64_t (*scratch_bytes)(const DecodeCall&);
  int64_t (*partial_floats)(const DecodeCall&);
  void (*chunk)(const DecodeCall&, int64_t batch, int64_t kv_head, int64_t begin, int64_t end,
                float* partial, void* scratch);
  void (*fold)(const DecodeCall&, float* into, const float* partial);
  void (*finish)(const DecodeCall&, int64_t batch, int64_t kv_head, const float* partial);
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
  void (*range)(const LinearCall&, const void* packed, int64_t begin, int64_t end);
};

// out = share * first + (1 - share) * second, over one row of `size` elements.
using MergeRow = void (*)(const void* first, const void* second, float share, int64_t size,
                          void* out);

struct Kernels {
  const char* name;
  DecodeKernels decode[kTypes];
  LinearKernels linear[kTypes];
  MergeRow merge_row[kTypes];
};

// Null where the compiler or the architecture does not know the instruction set.
const Kernels* kernels_baseline();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

}  // namespace radar
