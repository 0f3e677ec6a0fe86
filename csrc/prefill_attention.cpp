// Attention of many query tokens: keys and values are packed once for all query heads of a group,
// then blocks of query rows go over them tile by tile: scores, online softmax, weighted values.
// The matrix products are oneDNN's, through torch.
#include "prefill_attention.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <string>

#include "dispatch.h"

namespace radar {
namespace {

// Rows of a block: enough for the products, few enough for their scores to stay in the caches.
constexpr int64_t kMostRows = 64;
// Packed keys and values of as many rows of the batch as fit are held at once (at least one row).
constexpr int64_t kPackedBytes = 64 << 20;
constexpr int64_t kLine = 64;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- matrix products ----------------------------------------------------------------------------

using Product = void (*)(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t lda,
                         const void* b, int64_t ldb, float* c, int64_t ldc, bool add);

template <class Element>
void product(int64_t rows, int64_t columns, int64_t inner, const void* a, int64_t lda,
             const void* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(rows, columns, inner, lda, ldb, ldc, add,
                              static_cast<const Element*>(a), static_cast<const Element*>(b), c,
                              sizeof(Element) == 2);
}

std::string why_no_product() {
  float a[16 * 16] = {}, b[16 * 16] = {}, c[16 * 16];
  try {
    product<float>(16, 16, 16, a, 16, b, 16, c, 16, false);
    at::native::cpublas::brgemm_release(false);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

struct Engine {
  const PrefillKernels* kernel;
  Product product;
  bool pairs;  // the products read pairs of rows, and hold the core's tiles until released
};

// Half-precision products where the CPU has them; else of the elements' float32 values.
Engine engine_for(Type type) {
  const int index = static_cast<int>(type);
  if (type == Type::kBFloat16 && at::native::cpublas::could_pack(at::kBFloat16)) {
    return {&kernels().prefill[index], product<at::BFloat16>, true};
  }
  if (type == Type::kFloat16 && at::native::cpublas::could_pack(at::kHalf)) {
    return {&kernels().prefill[index], product<at::Half>, true};
  }
  return {&kernels().prefill_single[index], product<float>, false};
}

// ---- the layout of a call -----------------------------------------------------------------------

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

Layout lay_out(const AttentionCall& call, const PrefillKernels& kernel) {
  Layout layout = {};
  layout.element_bytes = kernel.element_bytes;
  layout.width = round_up(call.key_dim, kernel.pair);
  layout.value_width = round_up(call.value_dim, kernel.pair);
  layout.blocks = (call.keys + kBlockKeys - 1) / kBlockKeys;
  layout.key_bytes = layout.width * kBlockKeys * layout.element_bytes;
  layout.value_bytes = layout.value_width * kBlockKeys * layout.element_bytes;
  const int64_t group = call.heads / call.kv_heads;
  layout.token_blocks = (call.queries + kMostRows - 1) / kMostRows;
  layout.tokens = (call.queries + layout.token_blocks - 1) / layout.token_blocks;
  layout.heads = std::clamp<int64_t>(kMostRows / layout.tokens, 1, group);
  layout.head_blocks = (group + layout.heads - 1) / layout.heads;
  return layout;
}

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

// Whether the mask hides some of these keys from some row of a block.
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

// ---- anchors of a tile --------------------------------------------------------------------------

// What is added to a tile's logits, one term a key, and the columns where keys are anchored.
struct TileAnchors {
  int64_t begin = 0, end = 0;  // empty: nothing is anchored here
  float first[kBlockKeys];     // the bias's factors; or -inf on the anchored keys
  float second[kBlockKeys];    // -inf on the others
};

void find_anchors(const AttentionCall& call, const RowBlock& block, const ScoreTile& tile,
                  TileAnchors& anchors) {
  anchors.begin = anchors.end = 0;
  if (!call.anchor_flags && !call.anchor_factors) return;
  const int64_t keys = std::min(tile.columns, call.keys - tile.start);
  const int64_t offset = block.batch * call.anchor_stride + tile.start;
  const auto factor = [&](int64_t i) {
    return call.anchor_flags ? (call.anchor_flags[offset + i] ? 1.0f : 0.0f)
                             : call.anchor_factors[offset + i];
  };
  int64_t first = 0, last = keys;
  if (call.anchor_flags) {
    const void* found = std::memchr(call.anchor_flags + offset, 1, keys);
    if (!found) return;
    first = static_cast<const uint8_t*>(found) - (call.anchor_flags + offset);
  }
  while (first < keys && factor(first) == 0.0f) ++first;
  if (first == keys) return;
  while (factor(last - 1) == 0.0f) --last;
  anchors.begin = first / kColumnStep * kColumnStep;
  anchors.end = round_up(last, kColumnStep);
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < tile.columns; ++i) {
    const float here = i < keys ? factor(i) : 0.0f;
    anchors.first[i] = call.parts == 1 ? here : here != 0.0f ? kHidden : 0.0f;
    anchors.second[i] = here != 0.0f ? 0.0f : kHidden;
  }
}

// ---- one block of rows --------------------------------------------------------------------------

// One thread's working memory.
struct Scratch {
  char* query;
  float* scores;
  char* weights;
  float* stats[2];
  float* values[2];
};

int64_t place_scratch(const AttentionCall& call, const Layout& layout, char* memory,
                      Scratch* scratch) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += round_up(bytes, kLine);
    return at;
  };
  const int64_t rows = layout.heads * layout.tokens;
  scratch->query = take(rows * layout.width * layout.element_bytes);
  scratch->scores = reinterpret_cast<float*>(take(rows * kBlockKeys * sizeof(float)));
  scratch->weights = take(rows * kBlockKeys * layout.element_bytes);
  for (int64_t part = 0; part < call.parts; ++part) {
    scratch->stats[part] = reinterpret_cast<float*>(take(rows * 2 * sizeof(float)));
    scratch->values[part] =
        reinterpret_cast<float*>(take(rows * layout.value_width * sizeof(float)));
  }
  return used;
}

void attend_block(const AttentionCall& call, const Layout& layout, const Engine& engine,
                  const Packed& packed, const RowBlock& block, const Scratch& scratch,
                  TileAnchors& anchors) {
  const PrefillKernels& kernel = *engine.kernel;
  const int64_t rows = block.rows();
  kernel.pack_queries(call, block, scratch.query);
  for (int64_t part = 0; part < call.parts; ++part) {
    for (int64_t r = 0; r < rows; ++r) {
      scratch.stats[part][2 * r] = -std::numeric_limits<float>::infinity();
      scratch.stats[part][2 * r + 1] = 0.0f;
    }
    std::memset(scratch.values[part], 0, rows * layout.value_width * sizeof(float));
  }
  const int64_t end = call.last_key(block.batch, block.token + block.tokens - 1);
  const int64_t pairs = engine.pairs ? 2 : 1;  // rows of a packed block that lie side by side
  for (int64_t at = call.first_key(block.batch, block.token) / kColumnStep * kColumnStep;
       at < end;) {
    const int64_t index = at / kBlockKeys, offset = at % kBlockKeys;
    const ScoreTile tile = {scratch.scores, at,
                            std::min(kBlockKeys - offset, round_up(end - at, kColumnStep))};
    at += tile.columns;
    const char* keys = packed.keys(block.batch, block.kv_head, index);
    const char* values = packed.values(block.batch, block.kv_head, index);
    engine.product(rows, tile.columns, layout.width, scratch.query, layout.width,
                   keys + offset * pairs * layout.element_bytes, kBlockKeys, scratch.scores,
                   kBlockKeys, false);
    const bool adjusted =
        call.softcap != 0.0f ||
        mask_cuts(call, block, tile.start, std::min(tile.columns, call.keys - tile.start));
    if (adjusted) kernel.adjust(call, block, tile);
    find_anchors(call, block, tile, anchors);
    const bool anchored = anchors.begin < anchors.end;
    for (int64_t part = 0; part < (anchored ? call.parts : 1); ++part) {
      const int64_t from = part == 0 ? 0 : anchors.begin;
      const int64_t until = part == 0 ? tile.columns : anchors.end;
      const float* added = !anchored || (call.parts == 1 && !call.bias) ? nullptr
                           : part == 0                                  ? anchors.first
                                                                        : anchors.second;
      kernel.weights(call, block, tile, adjusted, from, until, added, call.parts == 1,
                     scratch.stats[part], scratch.weights, scratch.values[part]);
      engine.product(rows, layout.value_width, until - from,
                     scratch.weights + from * layout.element_bytes, kBlockKeys,
                     values + (offset + from) * layout.value_width * layout.element_bytes,
                     layout.value_width, scratch.values[part], layout.value_width, true);
    }
  }
  kernel.finish(call, block, scratch.stats, scratch.values);
}

// ---- threads ------------------------------------------------------------------------------------

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

void pack(const AttentionCall& call, const PrefillKernels& kernel, const Packed& packed,
          int64_t rows) {
  const int64_t blocks = packed.layout->blocks;
  const int64_t items = rows * call.kv_heads * blocks;
  on_threads(items, [&](std::atomic<int64_t>& next) {
    uint8_t flags[kBlockKeys];
    for (int64_t item = next++; item < items; item = next++) {
      const int64_t index = item % blocks, kv_head = item / blocks % call.kv_heads;
      const int64_t row = packed.first_row + item / blocks / call.kv_heads;
      const int64_t start = index * kBlockKeys, end = call.last_key(row, call.queries - 1);
      if (start >= end) continue;
      const uint8_t* readable = find_readable(call, row, kv_head, start, flags) ? flags : nullptr;
      // Keys before the first window are never seen either.
      const int64_t hidden = std::min(call.first_key(row, 0) - start, kBlockKeys);
      if (hidden > 0) {
        if (!readable) std::memset(flags, 1, kBlockKeys);
        std::memset(flags, 0, hidden);
        readable = flags;
      }
      kernel.pack_keys(call, row, kv_head, start, end, readable,
                       packed.keys(row, kv_head, index));
      kernel.pack_values(call, row, kv_head, start, end, readable,
                         packed.values(row, kv_head, index));
    }
  });
}

void attend(const AttentionCall& call, const Layout& layout, const Engine& engine,
            const Packed& packed, int64_t rows) {
  const int64_t heads = call.kv_heads * layout.head_blocks;
  const int64_t items = layout.token_blocks * rows * heads;
  on_threads(items, [&](std::atomic<int64_t>& next) {
    Scratch scratch;
    char* memory = static_cast<char*>(thread_memory(1, place_scratch(call, layout, nullptr, &scratch)));
    place_scratch(call, layout, memory, &scratch);
    TileAnchors anchors;
    for (int64_t item = next++; item < items; item = next++) {
      // The last tokens see the most keys: they come first, so that the threads end together.
      const int64_t token = (layout.token_blocks - 1 - item / (rows * heads)) * layout.tokens;
      const int64_t row = packed.first_row + item / heads % rows;
      const int64_t kv_head = item % heads / layout.head_blocks;
      const int64_t offset = item % layout.head_blocks * layout.heads;
      const int64_t group = call.heads / call.kv_heads;
      const RowBlock block = {row,
                              kv_head,
                              kv_head * group + offset,
                              std::min(layout.heads, group - offset),
                              token,
                              std::min(layout.tokens, call.queries - token)};
      attend_block(call, layout, engine, packed, block, scratch, anchors);
    }
    at::native::cpublas::brgemm_release(engine.pairs);
  });
}

}  // namespace

const char* prefill_absent() {
  static const std::string reason = why_no_product();
  return reason.empty() ? nullptr : reason.c_str();
}

void prefill_attention(const AttentionCall& call, Type type) {
  const Engine engine = engine_for(type);
  const Layout layout = lay_out(call, *engine.kernel);
  const int64_t bytes = layout.packed_bytes(call);
  const int64_t together =
      std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(bytes, 1), 1, call.batch);
  Packed packed = {static_cast<char*>(thread_memory(0, together * bytes)), 0, &layout,
                   call.kv_heads};
  for (int64_t row = 0; row < call.batch; row += together) {
    packed.first_row = row;
    const int64_t rows = std::min(together, call.batch - row);
    pack(call, *engine.kernel, packed, rows);
    attend(call, layout, engine, packed, rows);
  }
}

}  // namespace radar
