// Turns an operator's tensors into the plain description that the attention kernels read.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels.h"

namespace radar {

// What the attention operators take besides query, key and value.
struct AttentionOptions {
  std::optional<at::Tensor> anchors, bias, target_mass, mask, key_lengths, sinks;
  bool target_exact = false, causal = false;
  double scale = 1.0;
  std::optional<int64_t> window;
  std::optional<double> softcap;
};

// Checks everything that the kernels rely on; `name` is the operator's, for messages. Outputs are
// left to the caller. The call borrows the tensors' memory.
AttentionCall bind_attention(const char* name, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const AttentionOptions& options);

// An output [batch, heads, queries, size] stored token-major, as models go on with it.
at::Tensor empty_token_major(const at::Tensor& query, int64_t size);

}  // namespace radar
