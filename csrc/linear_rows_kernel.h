// A linear layer on a few rows: every weight is read once for all of them.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

static int64_t linear_packed_bytes(const LinearCall& call) {
  return call.rows * padded(call.in_features) * (int64_t)sizeof(float);
}

template <class T>
static void linear_pack(const LinearCall& call, void* packed) {
  for (int64_t r = 0; r < call.rows; ++r) {
    SingleDots<T>::pack((float*)packed + r * padded(call.in_features),
                        (const typename T::Storage*)call.input + r * call.in_features,
                        call.in_features);
  }
}

template <class T>
RADAR_INLINE void store_one(typename T::Storage* p, float x) {
  T::store_part(p, 1, Pair{broadcast(x), broadcast(x)});
}

// R rows from `row` on times the weights of one block of outputs, while those from `next` on are
// prefetched (-1: none).
template <class T, int R>
static inline void linear_block(const LinearCall& call, const float* packed, int64_t row,
                                int64_t output, int64_t outputs, int64_t next) {
  using Storage = typename T::Storage;
  constexpr int kBlock = DotShape<1>::kBlock;
  float sums[R][kBlock];
  const int64_t stride = padded(call.in_features);
  const Storage* weight = (const Storage*)call.weight;
  dot_rows<SingleDots<T>, R>(packed + row * stride, stride, weight + output * call.in_features,
                             call.in_features, outputs, call.in_features,
                             next < 0 ? nullptr : weight + next * call.in_features, &sums[0][0],
                             kBlock);
  for (int r = 0; r < R; ++r) {
    Storage* out = (Storage*)call.out + (row + r) * call.out_features + output;
    for (int64_t i = 0; i < outputs; ++i) {
      float sum = sums[r][i];
      if (call.bias) sum += T::to_float(((const Storage*)call.bias)[output + i]);
      store_one<T>(out + i, sum);
    }
  }
}

template <class T>
static void linear_range(const LinearCall& call, const void* packed_rows, int64_t begin,
                         int64_t end, int64_t next) {
  const float* packed = (const float*)packed_rows;
  constexpr int64_t kBlock = DotShape<1>::kBlock;
  for (int64_t output = begin; output < end; output += kBlock) {
    const int64_t outputs = end - output < kBlock ? end - output : kBlock;
    int64_t soon = output + kBlock < end ? output + kBlock : next;
    int64_t row = 0;
    for (; row + 4 <= call.rows; row += 4) {
      linear_block<T, 4>(call, packed, row, output, outputs, soon);
      soon = -1;
    }
    switch (call.rows - row) {
      case 3: linear_block<T, 3>(call, packed, row, output, outputs, soon); break;
      case 2: linear_block<T, 2>(call, packed, row, output, outputs, soon); break;
      case 1: linear_block<T, 1>(call, packed, row, output, outputs, soon); break;
      default: break;
    }
  }
}

template <class T>
static constexpr LinearKernels linear_kernels() {
  return {linear_packed_bytes, linear_pack<T>, linear_range<T>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
