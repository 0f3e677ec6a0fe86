// Checks and binds the arguments that all attention operators share.
#include "attention_call.h"

#include <ATen/ops/empty_strided.h>

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
                  query.size(1) % key.size(1) == 0,
              name, ": shapes of query ", query.sizes(), ", key ", key.sizes(),
              " and value ", value.sizes(), " do not fit");
  TORCH_CHECK((query.size(3) <= 1 || query.stride(3) == 1) &&
                  (key.size(3) <= 1 || key.stride(3) == 1) &&
                  (value.size(3) <= 1 || value.stride(3) == 1),
              name, ": the last dimension of query, key and value must have stride 1");
}

void check_per_head(const char* name, const OptionalTensor& tensor, const char* what,
                    const AttentionCall& call) {
  TORCH_CHECK(!tensor || (tensor->scalar_type() == at::kFloat && tensor->dim() == 2 &&
                          (tensor->size(0) == 1 || tensor->size(0) == call.batch) &&
                          tensor->size(1) == call.heads && tensor->is_contiguous() &&
                          tensor->device().is_cpu()),
              name, ": ", what, " must be contiguous float32 [batch or 1, heads]");
}

void set_strides(int64_t* strides, const Tensor& tensor) {
  for (int64_t dim = 0; dim < 3; ++dim) strides[dim] = tensor.stride(dim);
}

void set_anchors(const char* name, AttentionCall& call, const OptionalTensor& anchors) {
  if (!anchors) return;
  const bool flags = anchors->scalar_type() == at::kBool;
  TORCH_CHECK(anchors->dim() == 2 && anchors->size(0) == call.batch &&
                  anchors->size(1) == call.keys && anchors->device().is_cpu() &&
                  (flags || anchors->scalar_type() == at::kFloat) &&
                  (call.keys <= 1 || anchors->stride(1) == 1),
              name, ": anchors must be bool or float32 [batch, keys] with stride 1 along "
              "the keys");
  call.anchor_stride = anchors->stride(0);
  if (flags) {
    call.anchor_flags = static_cast<const uint8_t*>(anchors->const_data_ptr());
  } else {
    call.anchor_factors = anchors->const_data_ptr<float>();
  }
}

void set_mask(const char* name, AttentionCall& call, const OptionalTensor& mask) {
  if (!mask) return;
  TORCH_CHECK(mask->scalar_type() == at::kBool && mask->dim() == 4 && mask->device().is_cpu(),
              name, ": mask must be bool with 4 dimensions");
  const int64_t full[4] = {call.batch, call.heads, call.queries, call.keys};
  for (int64_t dim = 0; dim < 4; ++dim) {
    TORCH_CHECK(mask->size(dim) == 1 || mask->size(dim) == full[dim],
                name, ": mask of shape ", mask->sizes(),
                " does not broadcast to [batch, heads, queries, keys]");
    call.mask_stride[dim] = broadcast_stride(*mask, dim);
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
  call.target_exact = options.target_exact;
  if (options.window) {
    TORCH_CHECK(options.causal && *options.window > 0, name,
                ": window needs causal and at least 1 key");
    call.window = *options.window;
  }
  set_anchors(name, call, options.anchors);
  check_per_head(name, options.bias, "bias", call);
  check_per_head(name, options.target_mass, "target_mass", call);
  TORCH_CHECK(!(options.bias && options.target_mass), name,
              ": give bias or target_mass, not both");
  TORCH_CHECK(!(options.target_mass && call.anchor_factors), name,
              ": target_mass needs bool anchors");
  if (options.bias && options.anchors) {
    call.bias = options.bias->const_data_ptr<float>();
    call.bias_stride = options.bias->size(0) == 1 ? 0 : call.heads;
  }
  if (options.target_mass && options.anchors) {
    call.target_mass = options.target_mass->const_data_ptr<float>();
    call.target_stride = options.target_mass->size(0) == 1 ? 0 : call.heads;
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
