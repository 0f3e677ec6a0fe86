// Dot products of a few packed rows (queries, or inputs of a linear layer) with many rows of
// memory (keys, or weights), each of which is read once.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

// Places that memory is prefetched from in turn. A thread is answered up to twice as fast from
// several pages at once as from one after the other.
constexpr int64_t kPlaces = 8;

RADAR_INLINE int64_t padded(int64_t count) { return (count + kPair - 1) / kPair * kPair; }

RADAR_INLINE Pair load_packed(const float* p) { return {load(p), load(p + W)}; }

// How a packed row meets lines of memory, one pair at a time: as float32.
template <class T>
struct SingleDots {
  using Element = T;
  using Packed = float;
  using Line = Pair;
  RADAR_INLINE Line packed(const float* p) { return load_packed(p); }
  RADAR_INLINE Line line(const typename T::Storage* p) { return T::load_pair(p); }
  RADAR_INLINE Line part(const typename T::Storage* p, int64_t count) {
    return T::load_part(p, count);
  }
  RADAR_INLINE void add(Vector& sum, const Line& x, const Line& y) {
    sum += x.a * y.a;
    sum += x.b * y.b;
  }
  // A row in the order of pairs, filled up with zeros.
  RADAR_INLINE void pack(float* to, const typename T::Storage* from, int64_t count) {
    for (int64_t d = 0; d < count; d += kPair) {
      const Pair pair =
          count - d >= kPair ? T::load_pair(from + d) : T::load_part(from + d, count - d);
      store(to + d, pair.a);
      store(to + d + W, pair.b);
    }
  }
};

// The shape of one block: R rows times K lines of memory in G groups of W sums.
template <int R>
struct DotShape {
  static constexpr int kSlots = R == 3 ? 4 : R;
  static constexpr int kLines = W / kSlots;
  static constexpr int kGroups = W == 4 ? 2 : 1;
  static constexpr int kBlock = kLines * kGroups;
};

// Sums of R packed rows with kBlock lines: result lane r * kLines + i of group g belongs to row r
// and line g * kLines + i. Meanwhile as many lines are prefetched from `next` on, which lie
// `next_stride` bytes from each other.
template <class Dots, int R>
RADAR_INLINE void dot_block(const typename Dots::Packed* rows, int64_t row_stride,
                            const typename Dots::Element::Storage* const* lines, int64_t count,
                            const char* next, int64_t next_stride, Vector* result) {
  using Shape = DotShape<R>;
  constexpr int64_t kBytes = sizeof(**lines);
  Vector sums[Shape::kGroups][W] = {};
  const int64_t whole = count / kPair * kPair;
  for (int64_t d = 0; d < whole; d += kPair) {
#pragma GCC unroll 16
    for (int k = 0; k < Shape::kBlock; ++k) {
      const typename Dots::Line y = Dots::line(lines[k] + d);
      const char* soon = next + k * next_stride + d * kBytes;
      __builtin_prefetch(soon, 0, 2);
      if (kBytes * kPair > 64) __builtin_prefetch(soon + 64, 0, 2);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vector& sum = sums[k / Shape::kLines][r * Shape::kLines + k % Shape::kLines];
        Dots::add(sum, Dots::packed(rows + r * row_stride + d), y);
      }
    }
  }
  if (whole < count) {
#pragma GCC unroll 16
    for (int k = 0; k < Shape::kBlock; ++k) {
      const typename Dots::Line y = Dots::part(lines[k] + whole, count - whole);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vector& sum = sums[k / Shape::kLines][r * Shape::kLines + k % Shape::kLines];
        Dots::add(sum, Dots::packed(rows + r * row_stride + whole), y);
      }
    }
  }
  for (int g = 0; g < Shape::kGroups; ++g) result[g] = sum_lanes(sums[g]);
}

// result[r * result_stride + i] = row r . line i for i < lines; up to a block's width is written
// past the last line. Meanwhile as many lines are prefetched from `next` on, if it is not null.
template <class Dots, int R>
static inline void dot_rows(const typename Dots::Packed* rows, int64_t row_stride,
                            const typename Dots::Element::Storage* memory, int64_t line_stride,
                            int64_t lines, int64_t count,
                            const typename Dots::Element::Storage* next, float* result,
                            int64_t result_stride) {
  using Shape = DotShape<R>;
  using Storage = typename Dots::Element::Storage;
  for (int64_t i = 0; i < lines; i += Shape::kBlock) {
    const Storage* pointers[Shape::kBlock];
    for (int k = 0; k < Shape::kBlock; ++k) {
      const int64_t line = i + k < lines ? i + k : lines - 1;
      pointers[k] = memory + line * line_stride;
    }
    Vector sums[Shape::kGroups];
    // Each line of a block from another part of what comes next.
    const int64_t apart = (lines + Shape::kBlock - 1) / Shape::kBlock * line_stride;
    const Storage* soon = next ? next + i / Shape::kBlock * line_stride : pointers[0];
    dot_block<Dots, R>(rows, row_stride, pointers, count, (const char*)soon,
                    apart * (int64_t)sizeof(*soon), sums);
    for (int g = 0; g < Shape::kGroups; ++g) {
      float lanes[W];
      store(lanes, sums[g]);
      for (int r = 0; r < R; ++r) {
        __builtin_memcpy(result + r * result_stride + i + g * Shape::kLines,
                         lanes + r * Shape::kLines, Shape::kLines * sizeof(float));
      }
    }
  }
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
