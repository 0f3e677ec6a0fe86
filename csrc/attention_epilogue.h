// From what a query row has gathered to its outputs: one softmax, two steered parts, or a partition.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

struct OutputRow {
  int64_t batch, head, query;
};

// Log-sum-exps of a row's two parts, -inf where a part is empty; sinks belong to the rest.
// `unbiased` is the anchored keys' before a bias that was added key by key.
struct PartSums {
  double rest, anchored, unbiased;
};

// The shares of the two parts after steering, and that of the anchored keys before.
struct PartShares {
  float rest, anchored, mass;
};

// 1 / (1 + e^-x)
RADAR_INLINE double sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }

static inline PartShares part_shares(const AttentionCall& call, const OutputRow& row,
                                     const PartSums& sums) {
  if (sums.anchored == -kInfinity && sums.unbiased == -kInfinity) return {1.0f, 0.0f, 0.0f};
  if (sums.rest == -kInfinity) return {0.0f, 1.0f, 1.0f};
  const double before = sums.unbiased - sums.rest;
  double after = sums.anchored - sums.rest;
  if (call.target_mass) {
    const double target = call.target_mass[row.batch * call.target_stride + row.head];
    const double wanted = __builtin_log(target) - __builtin_log1p(-target);
    if (call.target_exact || before < wanted) after = wanted;
  } else if (call.bias && !call.anchor_factors) {
    after += (double)call.bias[row.batch * call.bias_stride + row.head];
  }
  return {(float)sigmoid(-after), (float)sigmoid(after), (float)sigmoid(before)};
}

// out = first * first_factor + second * second_factor; `second` may be null.
template <class T>
RADAR_INLINE void write_row(const AttentionCall& call, const OutputRow& row, void* to,
                            const float* first, float first_factor, const float* second,
                            float second_factor) {
  using Storage = typename T::Storage;
  Storage* out = (Storage*)to + ((row.batch * call.queries + row.query) * call.heads + row.head) *
                                    call.value_dim;
  for (int64_t d = 0; d < call.value_dim; d += kPair) {
    Pair pair = {load(first + d) * first_factor, load(first + d + W) * first_factor};
    if (second) {
      pair.a += load(second + d) * second_factor;
      pair.b += load(second + d + W) * second_factor;
    }
    if (d + kPair <= call.value_dim) {
      T::store_pair(out + d, pair);
    } else {
      T::store_part(out + d, call.value_dim - d, pair);
    }
  }
}

RADAR_INLINE int64_t scalar_index(const AttentionCall& call, const OutputRow& row) {
  return (row.batch * call.heads + row.head) * call.queries + row.query;
}

// A row without two parts. The values hold whole pairs in the order of the element type.
template <class T>
static inline void finish_plain(const AttentionCall& call, const OutputRow& row,
                                const float* values, float factor) {
  if (call.mass) call.mass[scalar_index(call, row)] = 0.0f;
  write_row<T>(call, row, call.out, values, factor, nullptr, 0.0f);
}

// A row of two parts; the factors make each part's values its softmax average.
template <class T>
static inline void finish_parts(const AttentionCall& call, const OutputRow& row,
                                const PartSums& sums, const float* rest, float rest_factor,
                                const float* anchored, float anchored_factor) {
  if (call.anchored_out) {
    write_row<T>(call, row, call.out, rest, rest_factor, nullptr, 0.0f);
    write_row<T>(call, row, call.anchored_out, anchored, anchored_factor, nullptr, 0.0f);
    call.rest_lse[scalar_index(call, row)] = (float)sums.rest;
    call.anchored_lse[scalar_index(call, row)] = (float)sums.anchored;
    return;
  }
  const PartShares shares = part_shares(call, row, sums);
  if (call.mass) call.mass[scalar_index(call, row)] = shares.mass;
  write_row<T>(call, row, call.out, rest, rest_factor * shares.rest, anchored,
               anchored_factor * shares.anchored);
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
