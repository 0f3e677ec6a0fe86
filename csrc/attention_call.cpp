// Checks and binds the arguments that all attention operators share.
#include "attention_call.h"

#include <ATen/ops/empty_strided.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "checks.h"

namespace radar {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_shapes(const char* name, const Tensor& query, const Tensor& key, const Tensor& value) {
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
              name, ": query, key and value must have 4 dimensions");
  TORCH_CHECK(query.device().is_cpu() && key.device().is_cpu() && value.device().is_cpu(),
              name, ": query, key and value must be on the CPU");
  TORCH_CHECK(has_kernel_type(query) && query.scalar_type() == key.scalar_type() &&
                  query.scalar_type() == value.scalar_type(),
              name, ": query, key and value must share one dtype of float32, bfloat16, "
              "float16");
  TORCH_CHECK(query.size(2) >= 1, name, ": query must have at least one token");
  TORCH_CHECK(key.size(0) == query.size(0) && value.size(0) == query.size(0) &&
                  key.size(1) == value.size(1) && key.size(2) == value.size(2) &&
                  key.size(3) == query.size(3) && key.size(1) > 0 &&
                  query.size(1) % key.size(1) == 0 && query.size(3) > 0,
              name, ": shapes of query ", query.sizes(), ", key ", key.sizes(),
              " and value ", value.sizes(), " do not fit");
  TORCH_CHECK((query.size(3) <= 1 || query.stride(3) == 1) &&
                  (key.size(3) <= 1 || key.stride(3) == 1) &&
                  (value.size(3) <= 1 || value.stride(3) == 1),
              name, ": the last dimension of query, key and value must have stride 1");
}

// A value for each head: [heads], or [batch or 1, heads]; returns the stride from row to row.
int64_t check_per_head(const char* name, const Tensor& tensor, const char* what,
                       const AttentionCall& call) {
  const bool fits = tensor.dim() == 1 ? tensor.size(0) == call.heads
                                      : tensor.dim() == 2 && tensor.size(1) == call.heads &&
                                            (tensor.size(0) == 1 || tensor.size(0) == call.batch);
  TORCH_CHECK(fits && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
                  tensor.device().is_cpu(),
              name, ": ", what, " must be contiguous float32 [heads] or [batch or 1, heads]");
  return tensor.dim() == 1 || tensor.size(0) == 1 ? 0 : call.heads;
}

void check_finite(const char* name, const char* what, const float* values, int64_t count) {
  uint32_t found = 0;  // the exponents of infinities and NaN are all ones
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    found |= (bits & 0x7f800000u) == 0x7f800000u;
  }
  TORCH_CHECK(!found, name, ": ", what, " must be finite");
}

void set_strides(int64_t* strides, const Tensor& tensor) {
  for (int64_t dim = 0; dim < 3; ++dim) strides[dim] = tensor.stride(dim);
}

void set_anchors(const char* name, AttentionCall& call, const OptionalTensor& anchors) {
  if (!anchors) return;
  const bool flags = anchors->scalar_type() == at::kBool;
  TORCH_CHECK(anchors->dim() == 2 &&
                  (anchors->size(0) == 1 || anchors->size(0) == call.batch) &&
                  anchors->size(1) == call.keys && anchors->device().is_cpu() &&
                  (flags || anchors->scalar_type() == at::kFloat) &&
                  (call.keys <= 1 || anchors->stride(1) == 1),
              name, ": anchors must be bool or float32 [batch or 1, keys] with stride 1 "
              "along the keys");
  call.anchor_stride = broadcast_stride(*anchors, 0);
  if (flags) {
    call.anchor_flags = static_cast<const uint8_t*>(anchors->const_data_ptr());
  } else {
    call.anchor_factors = anchors->const_data_ptr<float>();
    for (int64_t row = 0; row < anchors->size(0); ++row) {
      check_finite(name, "anchors", call.anchor_factors + row * call.anchor_stride, call.keys);
    }
  }
}

void set_mask(const char* name, AttentionCall& call, const OptionalTensor& mask) {
  if (!mask) return;
  TORCH_CHECK(mask->scalar_type() == at::kBool && mask->device().is_cpu() &&
                  (mask->dim() == 2 || mask->dim() == 4),
              name, ": mask must be bool, [batch, keys] or with 4 dimensions");
  const int64_t full[4] = {call.batch, call.heads, call.queries, call.keys};
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (mask->dim() == 2 && (dim == 1 || dim == 2)) continue;
    const int64_t own = mask->dim() == 2 ? dim / 2 : dim;
    // All keys are told: one flag for all of them is more likely a mistake.
    TORCH_CHECK(mask->size(own) == full[dim] || (mask->size(own) == 1 && dim < 3), name,
                ": mask of shape ", mask->sizes(),
                " does not broadcast to [batch, heads, queries, keys]");
    call.mask_stride[dim] = broadcast_stride(*mask, own);
  }
  call.mask = static_cast<const uint8_t*>(mask->const_data_ptr());
}

void set_key_lengths(const char* name, AttentionCall& call, const OptionalTensor& key_lengths) {
  if (!key_lengths) return;
  TORCH_CHECK(key_lengths->scalar_type() == at::kInt && key_lengths->dim() == 1 &&
                  key_lengths->size(0) == call.batch && key_lengths->device().is_cpu(),
              name, ": key_lengths must be int32 [batch]");
  call.key_lengths = key_lengths->const_data_ptr<int32_t>();
  call.key_lengths_stride = key_lengths->stride(0);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int32_t length = call.key_lengths[b * call.key_lengths_stride];
    TORCH_CHECK(length >= 0 && length <= call.keys, name, ": key_lengths[", b, "] = ",
                length, " is not between 0 and ", call.keys, " keys");
  }
}

}  // namespace

AttentionCall bind_attention(const char* name, const Tensor& query, const Tensor& key,
                             const Tensor& value, const AttentionOptions& options) {
  check_shapes(name, query, key, value);
  check_no_gradient(name, {query, key, value});
  for (const auto* option : {&options.bias, &options.target_mass, &options.sinks}) {
    if (*option) check_no_gradient(name, {**option});
  }
  AttentionCall call = {};
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
  call.causal = options.causal;
  call.scale = static_cast<float>(options.scale);
  call.softcap = static_cast<float>(options.softcap.value_or(0.0));
  TORCH_CHECK(std::isfinite(call.scale), name, ": scale must be finite in float32");
  TORCH_CHECK(!options.softcap || (call.softcap > 0.0f && std::isfinite(call.softcap)), name,
              ": softcap must be positive and finite in float32");
  call.target_exact = options.target_exact;
  if (options.window) {
    TORCH_CHECK(options.causal && *options.window > 0, name,
                ": window needs causal and at least 1 key");
    call.window = *options.window;
  }
  set_anchors(name, call, options.anchors);
  TORCH_CHECK(!(options.bias && options.target_mass), name,
              ": give bias or target_mass, not both");
  TORCH_CHECK(!(options.target_mass && call.anchor_factors), name,
              ": target_mass needs bool anchors");
  if (options.bias) {
    call.bias_stride = check_per_head(name, *options.bias, "bias", call);
    const float* bias = options.bias->const_data_ptr<float>();
    check_finite(name, "bias", bias, options.bias->numel());
    if (options.anchors) call.bias = bias;
  }
  if (options.target_mass) {
    call.target_stride = check_per_head(name, *options.target_mass, "target_mass", call);
    const float* target = options.target_mass->const_data_ptr<float>();
    for (int64_t i = 0; i < options.target_mass->numel(); ++i) {
      TORCH_CHECK(target[i] > 0.0f && target[i] < 1.0f, name,
                  ": target_mass must lie between 0 and 1, both excluded");
    }
    if (options.anchors) call.target_mass = target;
  }
  set_mask(name, call, options.mask);
  set_key_lengths(name, call, options.key_lengths);
  if (options.sinks) {
    const Tensor& sinks = *options.sinks;
    TORCH_CHECK(sinks.scalar_type() == at::kFloat && sinks.dim() == 1 &&
                    sinks.size(0) == call.heads && sinks.is_contiguous() &&
                    sinks.device().is_cpu(),
                name, ": sinks must be contiguous float32 [heads]");
    call.sinks = sinks.const_data_ptr<float>();
    for (int64_t head = 0; head < call.heads; ++head) {
      TORCH_CHECK(call.sinks[head] < std::numeric_limits<float>::infinity(), name,
                  ": sinks must be numbers, or -inf");
    }
  }
  return call;
}

Tensor empty_token_major(const Tensor& query, int64_t size) {
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const int64_t token = heads * size;
  return at::empty_strided({batch, heads, queries, size}, {queries * token, size, token, 1},
                           query.options());
}

}  // namespace radar
