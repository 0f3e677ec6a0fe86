// Checks and conversions that the operators share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include "kernels.h"

namespace radar {

inline bool has_kernel_type(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

inline Type kernel_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Type::kFloat32;
    case at::kBFloat16: return Type::kBFloat16;
    default: return Type::kFloat16;
  }
}

// The stride of a dimension that may be broadcast: 0 where it has one element.
inline int64_t broadcast_stride(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

inline void check_no_gradient(const char* name, at::ArrayRef<at::Tensor> tensors) {
  if (!c10::GradMode::is_enabled()) return;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(!tensor.requires_grad(), name,
                ": computes no gradients, and an input requires one; use torch.no_grad()");
  }
}

}  // namespace radar
