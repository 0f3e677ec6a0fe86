// merge_parts: attention over the union of two disjoint sets of keys, from the attention over each.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {
namespace {

using at::Tensor;

constexpr int64_t kRowsPerTask = 256;

}  // namespace

std::tuple<Tensor, Tensor> merge_parts(const Tensor& first, const Tensor& first_lse,
                                       const Tensor& second, const Tensor& second_lse) {
  TORCH_CHECK(first.device().is_cpu() && has_kernel_type(first) && first.dim() == 4,
              "merge_parts: first must be [batch, heads, queries, size] on the CPU in float32, "
              "bfloat16 or float16");
  TORCH_CHECK(second.sizes() == first.sizes() && second.scalar_type() == first.scalar_type(),
              "merge_parts: first ", first.sizes(), " and second ", second.sizes(),
              " must agree in shape and dtype");
  TORCH_CHECK(first_lse.sizes() == first.sizes().slice(0, 3) &&
                  second_lse.sizes() == first_lse.sizes() && first_lse.scalar_type() == at::kFloat &&
                  second_lse.scalar_type() == at::kFloat,
              "merge_parts: the log-sum-exps must be float32 [batch, heads, queries]");
  TORCH_CHECK(first.stride(3) == 1 && second.stride(3) == 1,
              "merge_parts: the last dimension must be contiguous");
  check_no_gradient("merge_parts", {first, first_lse, second, second_lse});
  const int64_t batch = first.size(0), heads = first.size(1), queries = first.size(2);
  const int64_t size = first.size(3), bytes = first.element_size();
  // Token-major, as the models read it on.
  Tensor out = at::empty({batch, queries, heads, size}, first.options()).transpose(1, 2);
  Tensor lse = at::empty_like(first_lse, first_lse.options(), at::MemoryFormat::Contiguous);
  const auto merge_row = kernels().merge_row[static_cast<int>(kernel_type(first))];
  const char* a = static_cast<const char*>(first.const_data_ptr());
  const char* b = static_cast<const char*>(second.const_data_ptr());
  char* c = static_cast<char*>(out.mutable_data_ptr());
  const float* lse_a = first_lse.const_data_ptr<float>();
  const float* lse_b = second_lse.const_data_ptr<float>();
  float* lse_c = lse.mutable_data_ptr<float>();
  const auto place = [](const Tensor& tensor, int64_t b, int64_t h, int64_t q) {
    return b * tensor.stride(0) + h * tensor.stride(1) + q * tensor.stride(2);
  };
  at::parallel_for(0, batch * queries * heads, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t h = row % heads, q = row / heads % queries, n = row / heads / queries;
      const float x = lse_a[place(first_lse, n, h, q)], y = lse_b[place(second_lse, n, h, q)];
      const char* first_row = a + bytes * place(first, n, h, q);
      const char* second_row = b + bytes * place(second, n, h, q);
      char* out_row = c + bytes * place(out, n, h, q);
      float& joined = lse_c[place(lse, n, h, q)];
      // An empty part counts nothing, whatever its output; two of them give 0.
      const float none = -std::numeric_limits<float>::infinity();
      if (x == none && y == none) {
        joined = none;
        std::memset(out_row, 0, size * bytes);
      } else if (x == none || y == none) {
        joined = std::max(x, y);
        std::memcpy(out_row, x == none ? second_row : first_row, size * bytes);
      } else {
        joined = std::max(x, y) + std::log1p(std::exp(-std::abs(x - y)));
        merge_row(first_row, second_row, 1.0f / (1.0f + std::exp(y - x)), size, out_row);
      }
    }
  });
  return {out, lse};
}

}  // namespace radar
