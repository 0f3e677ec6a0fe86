// decode_attention: checks a call, cuts it into chunks of keys and runs them on the threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <tuple>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// How a row's keys are cut depends on their number alone, so that a row's result does not depend
// on its batch or on the number of threads.
constexpr int64_t kSmallestChunk = 256;
constexpr int64_t kMostChunks = 32;
// Bytes of keys and values under which waking the other threads costs more than it saves.
constexpr int64_t kSingleThreadBytes = 128 << 10;
constexpr int64_t kMostQueries = 8;

struct KeyRange {
  int64_t begin, end;
  int64_t chunk() const {
    const int64_t even = (end - begin + kMostChunks - 1) / kMostChunks;
    return std::max(kSmallestChunk, (even + kTileKeys - 1) / kTileKeys * kTileKeys);
  }
  int64_t chunks() const { return end > begin ? (end - begin + chunk() - 1) / chunk() : 0; }
};

KeyRange key_range(const DecodeCall& call, int64_t batch) {
  const int64_t length =
      call.key_lengths ? call.key_lengths[batch * call.key_lengths_stride] : call.keys;
  const int64_t first =
      call.causal && call.window ? length - call.queries - call.window + 1 : 0;
  return {std::clamp<int64_t>(first, 0, length), length};
}

void check_shapes(const Tensor& query, const Tensor& key, const Tensor& value) {
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
              "decode_attention: query, key and value must have 4 dimensions");
  TORCH_CHECK(query.device().is_cpu() && key.device().is_cpu() && value.device().is_cpu(),
              "decode_attention: query, key and value must be on the CPU");
  TORCH_CHECK(has_kernel_type(query) && query.scalar_type() == key.scalar_type() &&
                  query.scalar_type() == value.scalar_type(),
              "decode_attention: query, key and value must share one dtype of float32, bfloat16, "
              "float16");
  TORCH_CHECK(query.size(2) >= 1 && query.size(2) <= kMostQueries,
              "decode_attention: query length must be 1..", kMostQueries, ", got ", query.size(2));
  TORCH_CHECK(key.size(0) == query.size(0) && value.size(0) == query.size(0) &&
                  key.size(1) == value.size(1) && key.size(2) == value.size(2) &&
                  key.size(3) == query.size(3) && key.size(1) > 0 &&
                  query.size(1) % key.size(1) == 0,
              "decode_attention: shapes of query ", query.sizes(), ", key ", key.sizes(),
              " and value ", value.sizes(), " do not fit");
  TORCH_CHECK((query.size(3) <= 1 || query.stride(3) == 1) &&
                  (key.size(3) <= 1 || key.stride(3) == 1) &&
                  (value.size(3) <= 1 || value.stride(3) == 1),
              "decode_attention: the last dimension of query, key and value must have stride 1");
}

void check_per_head(const OptionalTensor& tensor, const char* name, const DecodeCall& call) {
  TORCH_CHECK(!tensor || (tensor->scalar_type() == at::kFloat && tensor->dim() == 2 &&
                          (tensor->size(0) == 1 || tensor->size(0) == call.batch) &&
                          tensor->size(1) == call.heads && tensor->is_contiguous() &&
                          tensor->device().is_cpu()),
              "decode_attention: ", name, " must be contiguous float32 [batch or 1, heads]");
}

void set_strides(int64_t* strides, const Tensor& tensor) {
  for (int64_t dim = 0; dim < 3; ++dim) strides[dim] = tensor.stride(dim);
}

void set_anchors(DecodeCall& call, const OptionalTensor& anchors) {
  if (!anchors) return;
  const bool flags = anchors->scalar_type() == at::kBool;
  TORCH_CHECK(anchors->dim() == 2 && anchors->size(0) == call.batch &&
                  anchors->size(1) == call.keys && anchors->device().is_cpu() &&
                  (flags || anchors->scalar_type() == at::kFloat) &&
                  (call.keys <= 1 || anchors->stride(1) == 1),
              "decode_attention: anchors must be bool or float32 [batch, keys] with stride 1 along "
              "the keys");
  call.anchor_stride = anchors->stride(0);
  if (flags) {
    call.anchor_flags = static_cast<const uint8_t*>(anchors->const_data_ptr());
  } else {
    call.anchor_factors = anchors->const_data_ptr<float>();
  }
}

void set_mask(DecodeCall& call, const OptionalTensor& mask) {
  if (!mask) return;
  TORCH_CHECK(mask->scalar_type() == at::kBool && mask->dim() == 4 && mask->device().is_cpu(),
              "decode_attention: mask must be bool with 4 dimensions");
  const int64_t full[4] = {call.batch, call.heads, call.queries, call.keys};
  for (int64_t dim = 0; dim < 4; ++dim) {
    TORCH_CHECK(mask->size(dim) == 1 || mask->size(dim) == full[dim],
                "decode_attention: mask of shape ", mask->sizes(),
                " does not broadcast to [batch, heads, queries, keys]");
    call.mask_stride[dim] = broadcast_stride(*mask, dim);
  }
  call.mask = static_cast<const uint8_t*>(mask->const_data_ptr());
}

void set_key_lengths(DecodeCall& call, const OptionalTensor& key_lengths) {
  if (!key_lengths) return;
  TORCH_CHECK(key_lengths->scalar_type() == at::kInt && key_lengths->dim() == 1 &&
                  key_lengths->size(0) == call.batch && key_lengths->device().is_cpu(),
              "decode_attention: key_lengths must be int32 [batch]");
  call.key_lengths = key_lengths->const_data_ptr<int32_t>();
  call.key_lengths_stride = key_lengths->stride(0);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int32_t length = call.key_lengths[b * call.key_lengths_stride];
    TORCH_CHECK(length >= 0 && length <= call.keys, "decode_attention: key_lengths[", b, "] = ",
                length, " is not between 0 and ", call.keys, " keys");
  }
}

// One thread takes a kv head after the other and folds its chunks in order.
void run_heads(const DecodeCall& call, const DecodeKernels& kernel, std::atomic<int64_t>& next) {
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
    const int64_t step = range.chunk();
    kernel.chunk(call, batch, head, range.begin, std::min(range.begin + step, range.end), first,
                 scratch);
    for (int64_t at = range.begin + step; at < range.end; at += step) {
      kernel.chunk(call, batch, head, at, std::min(at + step, range.end), other, scratch);
      kernel.fold(call, first, other);
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

void run_chunks(const DecodeCall& call, const DecodeKernels& kernel, SharedChunks& shared) {
  const int64_t partial = kernel.partial_floats(call);
  void* scratch = thread_memory(1, kernel.scratch_bytes(call));
  const int64_t items = call.batch * call.kv_heads * shared.most;
  for (int64_t item = shared.next++; item < items; item = shared.next++) {
    const int64_t unit = item / shared.most, index = item % shared.most;
    const int64_t batch = unit / call.kv_heads, head = unit % call.kv_heads;
    const KeyRange range = key_range(call, batch);
    const int64_t chunks = std::max<int64_t>(range.chunks(), 1);
    if (index >= chunks) continue;
    const int64_t begin = range.begin + index * range.chunk();
    float* partials = shared.partials + unit * shared.most * partial;
    kernel.chunk(call, batch, head, begin, std::min(begin + range.chunk(), range.end),
                 partials + index * partial, scratch);
    if (shared.missing[unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      for (int64_t i = 1; i < chunks; ++i) kernel.fold(call, partials, partials + i * partial);
      kernel.finish(call, batch, head, partials);
    }
  }
}

void run(const DecodeCall& call, const DecodeKernels& kernel, int64_t element_bytes) {
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

}  // namespace

std::tuple<Tensor, Tensor> decode_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& anchors,
    const OptionalTensor& bias, const OptionalTensor& target_mass, bool target_exact,
    const OptionalTensor& mask, const OptionalTensor& key_lengths, bool causal, double scale,
    std::optional<int64_t> window, std::optional<double> softcap, const OptionalTensor& sinks,
    bool return_mass) {
  check_shapes(query, key, value);
  check_no_gradient("decode_attention", {query, key, value});
  DecodeCall call = {};
  call.batch = query.size(0);
  call.heads = query.size(1);
  call.kv_heads = key.size(1);
  call.queries = query.size(2);
  call.keys = key.size(2);
  call.key_dim = query.size(3);
  call.value_dim = value.size(3);
  call.rows = call.heads / call.kv_heads * call.queries;
  call.query = query.const_data_ptr();
  call.key = key.const_data_ptr();
  call.value = value.const_data_ptr();
  set_strides(call.query_stride, query);
  set_strides(call.key_stride, key);
  set_strides(call.value_stride, value);
  call.causal = causal;
  call.scale = static_cast<float>(scale);
  call.softcap = static_cast<float>(softcap.value_or(0.0));
  call.target_exact = target_exact;
  if (window) {
    TORCH_CHECK(causal && *window > 0, "decode_attention: window needs causal and at least 1 key");
    call.window = *window;
  }
  set_anchors(call, anchors);
  check_per_head(bias, "bias", call);
  check_per_head(target_mass, "target_mass", call);
  TORCH_CHECK(!(bias && target_mass), "decode_attention: give bias or target_mass, not both");
  TORCH_CHECK(!(target_mass && call.anchor_factors),
              "decode_attention: target_mass needs bool anchors");
  if (bias && anchors) {
    call.bias = bias->const_data_ptr<float>();
    call.bias_stride = bias->size(0) == 1 ? 0 : call.heads;
  }
  if (target_mass && anchors) {
    call.target_mass = target_mass->const_data_ptr<float>();
    call.target_stride = target_mass->size(0) == 1 ? 0 : call.heads;
  }
  call.parts = anchors && (target_mass || return_mass) ? 2 : 1;
  set_mask(call, mask);
  set_key_lengths(call, key_lengths);
  if (sinks) {
    TORCH_CHECK(sinks->scalar_type() == at::kFloat && sinks->dim() == 1 &&
                    sinks->size(0) == call.heads && sinks->is_contiguous() &&
                    sinks->device().is_cpu(),
                "decode_attention: sinks must be contiguous float32 [heads]");
    call.sinks = sinks->const_data_ptr<float>();
  }
  // Token-major, as models go on with it.
  const int64_t token = call.heads * call.value_dim;
  Tensor out = at::empty_strided({call.batch, call.heads, call.queries, call.value_dim},
                                 {call.queries * token, call.value_dim, token, 1},
                                 query.options());
  Tensor mass = return_mass ? at::empty({call.batch, call.heads, call.queries},
                                        query.options().dtype(at::kFloat))
                            : at::empty({0}, query.options().dtype(at::kFloat));
  call.out = out.mutable_data_ptr();
  call.mass = return_mass ? mass.mutable_data_ptr<float>() : nullptr;
  if (call.batch * call.heads > 0) {
    run(call, kernels().decode[static_cast<int>(kernel_type(query))], query.element_size());
  }
  return {std::move(out), std::move(mass)};
}

}  // namespace radar
