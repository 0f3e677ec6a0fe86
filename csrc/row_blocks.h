// What prefill attention and segment_mass share: matrix products, the cutting of a call into blocks
// of query rows, and keys and values packed for the products.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "dispatch.h"
#include "kernels.h"

namespace radar {

constexpr int64_t kLine = 64;  // bytes

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

struct Engine {
  const PrefillKernels* kernel;
  Product product;
  bool pairs;         // the products read pairs of rows
  void (*release)();  // what they hold of the core, such as its tiles; when a thread has done all
};

// Half-precision products where the CPU has them; else of the elements' float32 values.
Engine engine_for(Type type);

// Why there are no matrix products here; null if there are.
const char* products_absent();

struct Layout {
  int64_t width, value_width;      // of a packed query or key, and of a value
  int64_t blocks;                  // of keys
  int64_t key_bytes, value_bytes;  // of one packed block
  int64_t tokens, token_blocks;    // of a row block
  int64_t heads, head_blocks;
  int64_t element_bytes;
  int64_t packed_bytes(const AttentionCall& call) const {  // of one row of the batch
    return call.kv_heads * blocks * (key_bytes + value_bytes);
  }
};

// `most_rows` of one block, unless one token of one head is more.
Layout lay_out(const AttentionCall& call, const PrefillKernels& kernel, int64_t most_rows);

// The packed keys and values of some rows of the batch, block by block.
struct Packed {
  char* memory;
  int64_t first_row;
  const Layout* layout;
  int64_t kv_heads;

  char* keys(int64_t row, int64_t kv_head, int64_t block) const {
    const int64_t index = ((row - first_row) * kv_heads + kv_head) * layout->blocks + block;
    return memory + index * (layout->key_bytes + layout->value_bytes);
  }
  char* values(int64_t row, int64_t kv_head, int64_t block) const {
    return keys(row, kv_head, block) + layout->key_bytes;
  }
};

// Whether the mask hides some of these keys from some row of a block.
bool mask_cuts(const AttentionCall& call, const RowBlock& block, int64_t start, int64_t keys);

// Calls work(next) on the threads; it takes items from `next` until there are none.
template <class Work>
void on_threads(int64_t items, const Work& work) {
  const int64_t threads =
      at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), items);
  std::atomic<int64_t> next{0};
  if (threads <= 1) {
    work(next);
  } else {
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(next); });
  }
}

// Packs one block of keys, and of values if value_dim is not 0.
void pack_block(const AttentionCall& call, const PrefillKernels& kernel, int64_t row,
                int64_t kv_head, int64_t block, char* keys, char* values);

// Packs all keys, and all values if value_dim is not 0, of `rows` rows of the batch.
void pack(const AttentionCall& call, const PrefillKernels& kernel, const Packed& packed,
          int64_t rows);

// Calls work(packed, rows) for the batch, as many rows at once as fit into kPackedBytes.
constexpr int64_t kPackedBytes = 64 << 20;

template <class Work>
void for_packed_rows(const AttentionCall& call, const Layout& layout, const PrefillKernels& kernel,
                     const Work& work) {
  const int64_t bytes = layout.packed_bytes(call);
  const int64_t together =
      std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(bytes, 1), 1, call.batch);
  char* memory = static_cast<char*>(thread_memory(0, together * bytes));
  for (int64_t row = 0; row < call.batch; row += together) {
    const Packed packed = {memory, row, &layout, call.kv_heads};
    const int64_t rows = std::min(together, call.batch - row);
    pack(call, kernel, packed, rows);
    work(packed, rows);
  }
}

}  // namespace radar
