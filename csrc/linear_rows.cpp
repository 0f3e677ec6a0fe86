// linear_rows: a linear layer on at most eight rows, its outputs shared among the threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {
namespace {

using at::Tensor;

constexpr int64_t kMostRows = 8;
constexpr int64_t kSingleThreadBytes = 64 << 10;
// Weights that a thread takes at a time: long enough for prefetching to pay, short enough for the
// threads to end together.
constexpr int64_t kPieceBytes = 128 << 10;
constexpr int64_t kPieceRows = 16;

void run(const LinearCall& call, const LinearKernels& kernel, int64_t element_bytes) {
  void* packed = thread_memory(0, kernel.packed_bytes(call));
  kernel.pack(call, packed);
  const int64_t bytes = call.in_features * call.out_features * element_bytes;
  const int64_t threads = at::get_num_threads();
  if (bytes < kSingleThreadBytes || threads == 1 || at::in_parallel_region()) {
    kernel.range(call, packed, 0, call.out_features, -1);
    return;
  }
  const int64_t rounds = (bytes / threads + kPieceBytes - 1) / kPieceBytes;
  const int64_t even = (call.out_features + rounds * threads - 1) / (rounds * threads);
  const int64_t piece = (even + kPieceRows - 1) / kPieceRows * kPieceRows;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    // Each thread claims one piece ahead, to prefetch it.
    int64_t at = next.fetch_add(piece);
    while (at < call.out_features) {
      const int64_t soon = next.fetch_add(piece);
      kernel.range(call, packed, at, std::min(at + piece, call.out_features),
                   soon < call.out_features ? soon : -1);
      at = soon;
    }
  });
}

}  // namespace

Tensor linear_rows(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(input.device().is_cpu() && weight.device().is_cpu(),
              "linear_rows: input and weight must be on the CPU");
  TORCH_CHECK(has_kernel_type(input) && input.scalar_type() == weight.scalar_type(),
              "linear_rows: input and weight must share one dtype of float32, bfloat16, float16");
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(),
              "linear_rows: weight must be contiguous [out, in]");
  TORCH_CHECK(input.dim() >= 1 && input.size(-1) == weight.size(1), "linear_rows: input of shape ",
              input.sizes(), " does not fit weight of shape ", weight.sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                        bias->scalar_type() == weight.scalar_type() && bias->is_contiguous() &&
                        bias->device().is_cpu()),
              "linear_rows: bias must be contiguous [out] in the dtype of weight");
  check_no_gradient("linear_rows", {input, weight});
  LinearCall call = {};
  call.in_features = weight.size(1);
  call.out_features = weight.size(0);
  call.rows = 1;
  c10::SmallVector<int64_t, 5> shape(input.sizes().begin(), input.sizes().end());
  for (size_t dim = 0; dim + 1 < shape.size(); ++dim) call.rows *= shape[dim];
  TORCH_CHECK(call.rows >= 1 && call.rows <= kMostRows, "linear_rows: rows must be 1..", kMostRows,
              ", got ", call.rows);
  shape.back() = call.out_features;
  const Tensor rows = input.contiguous();
  Tensor out = at::empty(shape, input.options());
  call.input = rows.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  run(call, kernels().linear[static_cast<int>(kernel_type(input))], input.element_size());
  return out;
}

}  // namespace radar
