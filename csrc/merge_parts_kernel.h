// Joining two softmax parts of one query by their log-sum-exps.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

template <class T>
static void merge_row(const void* first_row, const void* second_row, float share, int64_t size,
                      void* out_row) {
  using Storage = typename T::Storage;
  const Storage* first = (const Storage*)first_row;
  const Storage* second = (const Storage*)second_row;
  Storage* out = (Storage*)out_row;
  const Vector weight = broadcast(share), rest = broadcast(1.0f - share);
  constexpr int64_t kStep = 2 * W;
  int64_t at = 0;
  for (; at + kStep <= size; at += kStep) {
    const Pair a = T::load_pair(first + at), b = T::load_pair(second + at);
    T::store_pair(out + at, Pair{weight * a.a + rest * b.a, weight * a.b + rest * b.b});
  }
  if (at < size) {
    const Pair a = T::load_part(first + at, size - at), b = T::load_part(second + at, size - at);
    T::store_part(out + at, size - at,
                  Pair{weight * a.a + rest * b.a, weight * a.b + rest * b.b});
  }
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
