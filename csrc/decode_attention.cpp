// Attention of a few query tokens: cuts a call into chunks of keys and runs them on the threads.
#include "decode_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>

#include "dispatch.h"

namespace radar {
namespace {

// How a row's keys are cut depends on their number alone, so that a row's result does not depend
// on its batch or on the number of threads.
constexpr int64_t kSmallestChunk = 256;
constexpr int64_t kMostChunks = 32;
// Bytes of keys and values under which waking the other threads costs more than it saves.
constexpr int64_t kSingleThreadBytes = 128 << 10;

struct KeyRange {
  int64_t begin, end;
  int64_t chunk() const {
    const int64_t even = (end - begin + kMostChunks - 1) / kMostChunks;
    return std::max(kSmallestChunk, (even + kTileKeys - 1) / kTileKeys * kTileKeys);
  }
  int64_t chunks() const { return end > begin ? (end - begin + chunk() - 1) / chunk() : 0; }
  KeyChunk part(int64_t batch, int64_t kv_head, int64_t index) const {
    const int64_t from = begin + index * chunk();
    return {batch, kv_head, from, std::min(from + chunk(), end)};
  }
};

KeyRange key_range(const AttentionCall& call, int64_t batch) {
  return {call.first_key(batch, 0), call.length(batch)};
}

// One thread takes a kv head after the other and folds its chunks in order.
void run_heads(const AttentionCall& call, const DecodeKernels& kernel, std::atomic<int64_t>& next) {
  const int64_t partial = kernel.partial_floats(call);
  char* memory = static_cast<char*>(
      thread_memory(1, 2 * partial * sizeof(float) + kernel.scratch_bytes(call)));
  float* first = reinterpret_cast<float*>(memory);
  float* other = first + partial;
  void* scratch = other + partial;
  const int64_t units = call.batch * call.kv_heads;
  for (int64_t unit = next++; unit < units; unit = next++) {
    const int64_t batch = unit / call.kv_heads, head = unit % call.kv_heads;
    const KeyRange range = key_range(call, batch);
    const int64_t chunks = std::max<int64_t>(range.chunks(), 1);
    for (int64_t i = 0; i < chunks; ++i) {
      const KeyChunk chunk = range.part(batch, head, i), after = range.part(batch, head, i + 1);
      kernel.chunk(call, chunk, i + 1 < chunks ? &after : nullptr, i ? other : first, scratch);
      if (i) kernel.fold(call, first, other);
    }
    kernel.finish(call, batch, head, first);
  }
}

// Chunks of one kv head on several threads: whoever finishes a head's last chunk folds them, in
// the same order as run_heads.
struct SharedChunks {
  std::atomic<int64_t> next{0};
  int64_t most = 0;  // chunks of the longest row
  float* partials = nullptr;
  std::atomic<int64_t>* missing = nullptr;
};

// A chunk that a thread has taken: the index-th of a unit.
struct Claim {
  int64_t unit, index, chunks;
  KeyChunk keys;
};

std::optional<Claim> claim(const AttentionCall& call, SharedChunks& shared) {
  const int64_t items = call.batch * call.kv_heads * shared.most;
  for (int64_t item = shared.next++; item < items; item = shared.next++) {
    const int64_t unit = item / shared.most, index = item % shared.most;
    const int64_t batch = unit / call.kv_heads, head = unit % call.kv_heads;
    const KeyRange range = key_range(call, batch);
    const int64_t chunks = std::max<int64_t>(range.chunks(), 1);
    if (index < chunks) return Claim{unit, index, chunks, range.part(batch, head, index)};
  }
  return std::nullopt;
}

void run_chunks(const AttentionCall& call, const DecodeKernels& kernel, SharedChunks& shared) {
  const int64_t partial = kernel.partial_floats(call);
  void* scratch = thread_memory(1, kernel.scratch_bytes(call));
  // One chunk is claimed ahead, to prefetch it.
  std::optional<Claim> current = claim(call, shared);
  while (current) {
    const std::optional<Claim> next = claim(call, shared);
    float* partials = shared.partials + current->unit * shared.most * partial;
    kernel.chunk(call, current->keys, next ? &next->keys : nullptr,
                 partials + current->index * partial, scratch);
    if (shared.missing[current->unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      for (int64_t i = 1; i < current->chunks; ++i) {
        kernel.fold(call, partials, partials + i * partial);
      }
      kernel.finish(call, current->keys.batch, current->keys.kv_head, partials);
    }
    current = next;
  }
}

}  // namespace

void decode_attention(const AttentionCall& call, Type type) {
  const DecodeKernels& kernel = kernels().decode[static_cast<int>(type)];
  const int64_t element_bytes = type == Type::kFloat32 ? 4 : 2;
  int64_t keys = 0, most = 1;
  for (int64_t batch = 0; batch < call.batch; ++batch) {
    const KeyRange range = key_range(call, batch);
    keys += range.end - range.begin;
    most = std::max(most, range.chunks());
  }
  const int64_t units = call.batch * call.kv_heads;
  const int64_t bytes = keys * call.kv_heads * (call.key_dim + call.value_dim) * element_bytes;
  const int64_t threads = bytes < kSingleThreadBytes ? 1 : at::get_num_threads();
  if (threads == 1 || units >= 8 * threads || at::in_parallel_region()) {
    std::atomic<int64_t> next{0};
    if (threads == 1 || at::in_parallel_region()) {
      run_heads(call, kernel, next);
    } else {
      at::parallel_for(0, threads, 1,
                       [&](int64_t, int64_t) { run_heads(call, kernel, next); });
    }
    return;
  }
  SharedChunks shared;
  shared.most = most;
  const int64_t partial_bytes = units * most * kernel.partial_floats(call) * sizeof(float);
  char* memory = static_cast<char*>(
      thread_memory(0, partial_bytes + units * sizeof(std::atomic<int64_t>)));
  shared.partials = reinterpret_cast<float*>(memory);
  shared.missing = reinterpret_cast<std::atomic<int64_t>*>(memory + partial_bytes);
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t chunks = std::max<int64_t>(key_range(call, unit / call.kv_heads).chunks(), 1);
    new (&shared.missing[unit]) std::atomic<int64_t>(chunks);
  }
  at::parallel_for(0, std::min(threads, units * most), 1,
                   [&](int64_t, int64_t) { run_chunks(call, kernel, shared); });
}

}  // namespace radar
