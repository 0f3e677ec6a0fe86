// segment_mass: the attention mass of every segment of the keys, mean over the query tokens. The
// softmax weights of one row block are kept as they are found, each with the maximum of its time;
// when the rows' sums are known they are scaled, summed over the tokens and added to the segments.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>

#include "attention_call.h"
#include "checks.h"
#include "dispatch.h"
#include "operators.h"
#include "row_blocks.h"

namespace radar {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMostRows = 128;
constexpr int64_t kFewestRows = 8;
// A row block's weights over all keys: they should stay in the caches.
constexpr int64_t kWeightBytes = 4 << 20;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Segments {
  const int64_t* of_key;
  int64_t stride;
  int64_t count;
  float* out;  // [batch, heads, count]
};

struct Scratch {
  char* query;
  char* keys;  // one packed block, where a row block packs its own keys
  float* scores;
  float* stats;
  float* weights;  // [tile, row, kBlockKeys]
  float* factors;  // [tile, row]: first the maxima that the weights were taken from
};

int64_t place_scratch(const Layout& layout, char* memory, Scratch* scratch) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = memory + used;
    used += round_up(bytes, kLine);
    return at;
  };
  const auto floats = [&](int64_t count) {
    return reinterpret_cast<float*>(take(count * sizeof(float)));
  };
  const int64_t rows = layout.heads * layout.tokens;
  scratch->query = take(rows * layout.width * layout.element_bytes);
  scratch->keys = take(layout.key_bytes);
  scratch->scores = floats(rows * kBlockKeys);
  scratch->stats = floats(rows * 2);
  scratch->weights = floats(layout.blocks * rows * kBlockKeys);
  scratch->factors = floats(layout.blocks * rows);
  return used;
}

// A running maximum of -inf has seen nothing: exponents were then taken from 0.
double reference_point(float maximum) { return maximum == -kInfinity ? 0.0 : maximum; }

void scale_factors(const AttentionCall& call, const RowBlock& block, const Scratch& scratch,
                   int64_t tiles) {
  constexpr double kLog2E = 1.4426950408889634;
  for (int64_t r = 0; r < block.rows(); ++r) {
    double point = reference_point(scratch.stats[2 * r]), sum = scratch.stats[2 * r + 1];
    if (call.sinks) {
      const double sink = call.sinks[block.head + r / block.tokens] * kLog2E;
      const double top = std::max(point, sink);
      sum = sum * std::exp2(point - top) + std::exp2(sink - top);
      point = top;
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float& factor = scratch.factors[tile * block.rows() + r];
      factor = sum == 0.0 ? 0.0f
                          : static_cast<float>(std::exp2(reference_point(factor) - point) /
                                               (sum * call.queries));
    }
  }
}

void add_to_segments(const AttentionCall& call, const RowBlock& block, const Segments& segments,
                     int64_t head, const ScoreTile& tile, const float* per_key) {
  const int64_t* of_key = segments.of_key + block.batch * segments.stride + tile.start;
  float* out = segments.out + (block.batch * call.heads + block.head + head) * segments.count;
  const int64_t keys = std::min(tile.columns, call.keys - tile.start);
  for (int64_t i = 0; i < keys;) {
    const int64_t segment = of_key[i];
    float sum = 0.0f;
    for (; i < keys && of_key[i] == segment; ++i) sum += per_key[i];
    if (segment >= 0) out[segment] += sum;
  }
}

void measure_block(const AttentionCall& call, const Layout& layout, const Engine& engine,
                   const PrefillKernels& single, const Packed* packed, const RowBlock& block,
                   const Segments& segments, const Scratch& scratch) {
  const int64_t rows = block.rows();
  engine.kernel->pack_queries(call, block, scratch.query);
  for (int64_t r = 0; r < rows; ++r) {
    scratch.stats[2 * r] = -kInfinity;
    scratch.stats[2 * r + 1] = 0.0f;
  }
  const int64_t begin = call.first_key(block.batch, block.token) / kColumnStep * kColumnStep;
  const int64_t end = call.last_key(block.batch, block.token + block.tokens - 1);
  const auto tile_at = [&](int64_t at) {
    return ScoreTile{scratch.scores, at,
                     std::min(kBlockKeys - at % kBlockKeys, round_up(end - at, kColumnStep))};
  };
  const int64_t pairs = engine.pairs ? 2 : 1;
  int64_t tiles = 0;
  for (int64_t at = begin; at < end; ++tiles) {
    const ScoreTile tile = tile_at(at);
    const int64_t index = at / kBlockKeys;
    const char* keys = scratch.keys;
    if (packed) {
      keys = packed->keys(block.batch, block.kv_head, index);
    } else {
      pack_block(call, *engine.kernel, block.batch, block.kv_head, index, scratch.keys, nullptr);
    }
    engine.product(rows, tile.columns, layout.width, scratch.query, layout.width,
                   keys + at % kBlockKeys * pairs * layout.element_bytes, kBlockKeys,
                   scratch.scores, kBlockKeys, false);
    const bool adjusted =
        call.softcap != 0.0f || call.scale <= 0.0f ||
        mask_cuts(call, block, at, std::min(tile.columns, call.keys - at));
    if (adjusted) single.adjust(call, block, tile);
    single.weights(call, block, tile, adjusted, 0, tile.columns, nullptr, nullptr, scratch.stats,
                   scratch.weights + tiles * rows * kBlockKeys, nullptr);
    for (int64_t r = 0; r < rows; ++r) scratch.factors[tiles * rows + r] = scratch.stats[2 * r];
    at += tile.columns;
  }
  scale_factors(call, block, scratch, tiles);
  float per_key[kBlockKeys];
  for (int64_t head = 0; head < block.heads; ++head) {
    int64_t at = begin;
    for (int64_t index = 0; index < tiles; ++index) {
      const ScoreTile tile = tile_at(at);
      const int64_t row = index * rows + head * block.tokens;
      single.sum_rows(scratch.weights + row * kBlockKeys, scratch.factors + row, block.tokens,
                      tile.columns, per_key);
      add_to_segments(call, block, segments, head, tile, per_key);
      at += tile.columns;
    }
  }
}

// `packed` null: every row block packs the keys that it reads.
void measure(const AttentionCall& call, const Layout& layout, const Engine& engine, Type type,
             const Packed* packed, int64_t first_row, int64_t rows, const Segments& segments) {
  const PrefillKernels& single = kernels().prefill_single[static_cast<int>(type)];
  const int64_t group = call.heads / call.kv_heads;
  const int64_t items = rows * call.kv_heads * layout.head_blocks;
  on_threads(items, [&](std::atomic<int64_t>& next) {
    Scratch scratch;
    char* memory = static_cast<char*>(thread_memory(1, place_scratch(layout, nullptr, &scratch)));
    place_scratch(layout, memory, &scratch);
    for (int64_t item = next++; item < items; item = next++) {
      const int64_t head = item % layout.head_blocks * layout.heads;
      const int64_t kv_head = item / layout.head_blocks % call.kv_heads;
      const int64_t row = first_row + item / layout.head_blocks / call.kv_heads;
      // One thread adds up all tokens of a head, in order.
      for (int64_t token = 0; token < call.queries; token += layout.tokens) {
        const RowBlock block = {row,
                                kv_head,
                                kv_head * group + head,
                                std::min(layout.heads, group - head),
                                token,
                                std::min(layout.tokens, call.queries - token)};
        measure_block(call, layout, engine, single, packed, block, segments, scratch);
      }
    }
    engine.release();
  });
}

}  // namespace

Tensor segment_mass(const Tensor& query, const Tensor& key, const Tensor& segments,
                    int64_t num_segments, const OptionalTensor& mask,
                    const OptionalTensor& key_lengths, bool causal, double scale,
                    std::optional<int64_t> window, std::optional<double> softcap,
                    const OptionalTensor& sinks) {
  const char* reason = products_absent();
  TORCH_CHECK(!reason, "segment_mass cannot run here: ", reason);
  AttentionCall call = bind_attention(
      "segment_mass", query, key, key,
      {{}, {}, {}, mask, key_lengths, sinks, false, causal, scale, window, softcap});
  call.value_dim = 0;
  call.parts = 1;
  TORCH_CHECK(segments.scalar_type() == at::kLong && segments.dim() == 2 &&
                  segments.size(0) == call.batch && segments.size(1) == call.keys &&
                  segments.device().is_cpu() && (call.keys <= 1 || segments.stride(1) == 1),
              "segment_mass: segments must be int64 [batch, keys] with stride 1 along the keys");
  Tensor out = at::zeros({call.batch, call.heads, num_segments},
                         query.options().dtype(at::kFloat));
  if (call.batch * call.heads * call.keys == 0) return out;
  const Segments bound = {segments.const_data_ptr<int64_t>(), segments.stride(0), num_segments,
                          out.mutable_data_ptr<float>()};
  for (int64_t row = 0; row < call.batch; ++row) {
    for (int64_t i = 0; i < call.keys; ++i) {
      const int64_t segment = bound.of_key[row * bound.stride + i];
      TORCH_CHECK(segment >= -1 && segment < num_segments, "segment_mass: segments[", row, ", ", i,
                  "] = ", segment, " is not between -1 and ", num_segments - 1);
    }
  }
  const Type type = kernel_type(query);
  const Engine engine = engine_for(type);
  const int64_t most = kWeightBytes / static_cast<int64_t>(sizeof(float)) / call.keys;
  const Layout layout =
      lay_out(call, *engine.kernel, std::clamp<int64_t>(most, kFewestRows, kMostRows));
  // One block of rows reads the keys of a head once: packing them ahead would only move them.
  const bool once = layout.head_blocks == 1 && layout.token_blocks == 1;
  if (once && (call.batch * call.kv_heads) % at::get_num_threads() == 0) {
    measure(call, layout, engine, type, nullptr, 0, call.batch, bound);
    return out;
  }
  for_packed_rows(call, layout, *engine.kernel, [&](const Packed& packed, int64_t rows) {
    measure(call, layout, engine, type, &packed, packed.first_row, rows, bound);
  });
  return out;
}

}  // namespace radar
