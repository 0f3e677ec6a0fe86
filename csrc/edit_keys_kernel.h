// Key edits: rows of keys times a projection or its two factors, scaled and added.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Rows that share each load of a projection.
constexpr int kEditRows = W == 16 ? 8 : 4;

// Pairs hold even and odd elements of some types; rows hold them in their own order.
template <class T>
RADAR_INLINE void unpack_pair(Pair pair, float* to) {
  float parts[kPair];
  store(parts, pair.a);
  store(parts + W, pair.b);
  for (int i = 0; i < kPair; ++i) to[i] = parts[T::kSplitsPairs ? i / 2 + i % 2 * W : i];
}
template <class T>
RADAR_INLINE Pair packed_pair(const float* from) {
  float parts[kPair];
  for (int i = 0; i < kPair; ++i) parts[T::kSplitsPairs ? i / 2 + i % 2 * W : i] = from[i];
  return {load(parts), load(parts + W)};
}

// out [rows, columns] = in [rows, depth] times matrix [depth, columns]; rows are `stride` apart.
static inline void edit_product(const float* in, int64_t rows, int64_t depth, const float* matrix,
                                int64_t columns, int64_t stride, float* out) {
  for (int64_t j = 0; j < columns; j += kPair) {
    const int64_t held = columns - j < kPair ? columns - j : kPair;
    Pair sums[kEditRows] = {};
    for (int64_t d = 0; d < depth; ++d) {
      const float* at = matrix + d * columns + j;
      const Pair y = held == kPair ? Float32::load_pair(at) : Float32::load_part(at, held);
#pragma GCC unroll 8
      for (int r = 0; r < kEditRows; ++r) {
        const Vector x = broadcast(in[r * stride + d]);
        sums[r].a += x * y.a;
        sums[r].b += x * y.b;
      }
    }
    for (int64_t r = 0; r < rows; ++r) Float32::store_pair(out + r * stride + j, sums[r]);
  }
}

static int64_t edit_stride(const EditCall& call) {
  return padded(call.size > call.rank ? call.size : call.rank);
}

static int64_t edit_scratch_bytes(const EditCall& call) {
  return 3 * kEditRows * edit_stride(call) * (int64_t)sizeof(float);
}

// At most kEditRows rows of one head.
template <class T>
static void edit_some(const EditCall& call, int64_t head, const void* const* from, void* const* to,
                      int64_t rows, float* scratch) {
  using Storage = typename T::Storage;
  const int64_t stride = edit_stride(call);
  float *keys = scratch, *inner = keys + kEditRows * stride, *moved = inner + kEditRows * stride;
  for (int64_t r = 0; r < kEditRows; ++r) {
    const Storage* row = (const Storage*)from[r < rows ? r : rows - 1];
    for (int64_t d = 0; d < call.size; d += kPair) {
      const int64_t held = call.size - d;
      unpack_pair<T>(held >= kPair ? T::load_pair(row + d) : T::load_part(row + d, held),
                     keys + r * stride + d);
    }
  }
  const float* left = call.left + head * call.size * call.rank;
  if (call.right) {
    edit_product(keys, kEditRows, call.size, left, call.rank, stride, inner);
    edit_product(inner, rows, call.rank, call.right + head * call.rank * call.size, call.size,
                 stride, moved);
  } else {
    edit_product(keys, rows, call.size, left, call.size, stride, moved);
  }
  const float gain = call.gain[head];
  for (int64_t r = 0; r < rows; ++r) {
    float* key = keys + r * stride;
    for (int64_t d = 0; d < call.size; ++d) key[d] += gain * moved[r * stride + d];
    for (int64_t d = 0; d < call.size; d += kPair) {
      const int64_t held = call.size - d;
      const Pair pair = packed_pair<T>(key + d);
      Storage* out = (Storage*)to[r] + d;
      if (held >= kPair) {
        T::store_pair(out, pair);
      } else {
        T::store_part(out, held, pair);
      }
    }
  }
}

template <class T>
static void edit_rows(const EditCall& call, int64_t head, const void* const* from, void* const* to,
                      int64_t rows, void* scratch) {
  for (int64_t r = 0; r < rows; r += kEditRows) {
    const int64_t held = rows - r < kEditRows ? rows - r : kEditRows;
    edit_some<T>(call, head, from + r, to + r, held, (float*)scratch);
  }
}

template <class T>
static constexpr EditKernels edit_kernels() {
  return {edit_scratch_bytes, edit_rows<T>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
