// Matrix products, through torch (oneDNN's) or our own, and keys and values packed for them.
#include "row_blocks.h"

#include <ATen/native/CPUBlas.h>

#include <cstring>
#include <exception>
#include <string>

#include "dispatch.h"

namespace radar {
namespace {

// ---- matrix products ----------------------------------------------------------------------------

template <class Element>
void product(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t lda,
             const void* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(rows, columns, inner, lda, ldb, ldc, add,
                              static_cast<const Element*>(a), static_cast<const Element*>(b), c,
                              sizeof(Element) == 2);
}

template <bool kPairs>
void release() {
  at::native::cpublas::brgemm_release(kPairs);
}

std::string why_no_product() {
  float a[16 * 16] = {}, b[16 * 16] = {}, c[16 * 16];
  try {
    product<float>(16, 16, 16, a, 16, b, 16, c, 16, false);
    release<false>();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// ---- what may be read ---------------------------------------------------------------------------

// Which keys of a block some query of the group may see; false if the mask hides none of them.
bool find_readable(const AttentionCall& call, int64_t row, int64_t kv_head, int64_t start,
                   uint8_t* readable) {
  if (!call.mask) return false;
  const int64_t keys = std::min(kBlockKeys, call.keys - start);
  const int64_t group = call.heads / call.kv_heads;
  const int64_t heads = call.mask_stride[1] ? group : 1;
  const int64_t queries = call.mask_stride[2] ? call.queries : 1;
  std::memset(readable, 0, kBlockKeys);
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t query = 0; query < queries; ++query) {
      // One row for all queries: the last sees the most, whatever causality hides.
      const int64_t first = queries == 1 ? 0 : call.first_key(row, query) - start;
      const int64_t last = queries == 1 ? keys : call.last_key(row, query) - start;
      const uint8_t* mask = call.mask + row * call.mask_stride[0] +
                            (kv_head * group + head) * call.mask_stride[1] +
                            query * call.mask_stride[2] + start * call.mask_stride[3];
      const int64_t end = std::min(last, keys);
      for (int64_t i = std::max<int64_t>(first, 0); i < end; ++i) {
        readable[i] |= mask[i * call.mask_stride[3]];
      }
    }
  }
  return std::memchr(readable, 0, keys) != nullptr;
}

}  // namespace

Engine engine_for(Type type) {
  const int index = static_cast<int>(type);
  const PrefillKernels& words = kernels().prefill[index];
  if (type == Type::kBFloat16 && kernels().word_product) {
    return {&words, kernels().word_product, true, [] {}};
  }
  if (type == Type::kBFloat16 && at::native::cpublas::could_pack(at::kBFloat16)) {
    return {&words, product<at::BFloat16>, true, release<true>};
  }
  if (type == Type::kFloat16 && at::native::cpublas::could_pack(at::kHalf)) {
    return {&words, product<at::Half>, true, release<true>};
  }
  return {&kernels().prefill_single[index], product<float>, false, release<false>};
}

const char* products_absent() {
  static const std::string reason = why_no_product();
  return reason.empty() ? nullptr : reason.c_str();
}

Layout lay_out(const AttentionCall& call, const PrefillKernels& kernel, int64_t most_rows) {
  Layout layout = {};
  layout.element_bytes = kernel.element_bytes;
  layout.width = round_up(call.key_dim, kernel.pair);
  layout.value_width = round_up(call.value_dim, kernel.pair);
  layout.blocks = (call.keys + kBlockKeys - 1) / kBlockKeys;
  layout.key_bytes = layout.width * kBlockKeys * layout.element_bytes;
  layout.value_bytes = layout.value_width * kBlockKeys * layout.element_bytes;
  const int64_t group = call.heads / call.kv_heads;
  layout.token_blocks = (call.queries + most_rows - 1) / most_rows;
  layout.tokens = (call.queries + layout.token_blocks - 1) / layout.token_blocks;
  layout.heads = std::clamp<int64_t>(most_rows / layout.tokens, 1, group);
  layout.head_blocks = (group + layout.heads - 1) / layout.heads;
  return layout;
}

bool mask_cuts(const AttentionCall& call, const RowBlock& block, int64_t start, int64_t keys) {
  if (!call.mask) return false;
  const int64_t heads = call.mask_stride[1] ? block.heads : 1;
  const int64_t tokens = call.mask_stride[2] ? block.tokens : 1;
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t token = 0; token < tokens; ++token) {
      const uint8_t* mask = call.mask + block.batch * call.mask_stride[0] +
                            (block.head + head) * call.mask_stride[1] +
                            (block.token + token) * call.mask_stride[2] +
                            start * call.mask_stride[3];
      if (call.mask_stride[3] == 1) {
        if (std::memchr(mask, 0, keys)) return true;
      } else {
        for (int64_t i = 0; i < keys; ++i) {
          if (!mask[i * call.mask_stride[3]]) return true;
        }
      }
    }
  }
  return false;
}

void pack_block(const AttentionCall& call, const PrefillKernels& kernel, int64_t row,
                int64_t kv_head, int64_t block, char* keys, char* values) {
  const int64_t start = block * kBlockKeys, end = call.last_key(row, call.queries - 1);
  if (start >= end) return;
  uint8_t flags[kBlockKeys];
  const uint8_t* readable = find_readable(call, row, kv_head, start, flags) ? flags : nullptr;
  // Keys before the first window are never seen either.
  const int64_t hidden = std::min(call.first_key(row, 0) - start, kBlockKeys);
  if (hidden > 0) {
    if (!readable) std::memset(flags, 1, kBlockKeys);
    std::memset(flags, 0, hidden);
    readable = flags;
  }
  kernel.pack_keys(call, row, kv_head, start, end, readable, keys);
  if (call.value_dim != 0) kernel.pack_values(call, row, kv_head, start, end, readable, values);
}

void pack(const AttentionCall& call, const PrefillKernels& kernel, const Packed& packed,
          int64_t rows) {
  const int64_t blocks = packed.layout->blocks;
  const int64_t items = rows * call.kv_heads * blocks;
  on_threads(items, [&](std::atomic<int64_t>& next) {
    for (int64_t item = next++; item < items; item = next++) {
      const int64_t block = item % blocks, kv_head = item / blocks % call.kv_heads;
      const int64_t row = packed.first_row + item / blocks / call.kv_heads;
      pack_block(call, kernel, row, kv_head, block, packed.keys(row, kv_head, block),
                 packed.values(row, kv_head, block));
    }
  });
}

}  // namespace radar
