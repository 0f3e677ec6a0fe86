// Attention of many query tokens: keys and values are packed once for all query heads of a group,
// then blocks of query rows go over them tile by tile: scores, online softmax, weighted values.
#include "prefill_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "dispatch.h"
#include "row_blocks.h"

namespace radar {
namespace {

// Rows of a block: enough for the products, few enough for their scores to stay in the caches.
constexpr int64_t kMostRows = 64;

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
    // What is added to the products themselves is divided by the scale, and -inf hides: the scale
    // must be positive, and more than next to 0.
    const bool adjusted =
        call.softcap != 0.0f || call.scale < 1e-20f ||
        mask_cuts(call, block, tile.start, std::min(tile.columns, call.keys - tile.start));
    if (adjusted) kernel.adjust(call, block, tile);
    find_anchors(call, block, tile, anchors);
    const bool anchored = anchors.begin < anchors.end;
    for (int64_t part = 0; part < (anchored ? call.parts : 1); ++part) {
      const int64_t from = part == 0 ? 0 : anchors.begin;
      const int64_t until = part == 0 ? tile.columns : anchors.end;
      const float* factors = anchored && call.parts == 1 && call.bias ? anchors.first : nullptr;
      const float* hidden = !anchored || call.parts == 1 ? nullptr
                            : part == 0                  ? anchors.first
                                                         : anchors.second;
      kernel.weights(call, block, tile, adjusted, from, until, factors, hidden,
                     scratch.stats[part], scratch.weights, scratch.values[part]);
      if (layout.value_width == 0) continue;
      engine.product(rows, layout.value_width, until - from,
                     scratch.weights + from * layout.element_bytes, kBlockKeys,
                     values + (offset + from) * layout.value_width * layout.element_bytes,
                     layout.value_width, scratch.values[part], layout.value_width, true);
    }
  }
  kernel.finish(call, block, scratch.stats, scratch.values);
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
    engine.release();
  });
}

}  // namespace

void prefill_attention(const AttentionCall& call, Type type) {
  const Engine engine = engine_for(type);
  const Layout layout = lay_out(call, *engine.kernel, kMostRows);
  for_packed_rows(call, layout, *engine.kernel, [&](const Packed& packed, int64_t rows) {
    attend(call, layout, engine, packed, rows);
  });
}

}  // namespace radar
