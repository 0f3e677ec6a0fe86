// edit_keys: copies the keys and edits the anchored ones; no other row is multiplied.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {

using at::Tensor;

namespace {

// Rows of one task.
constexpr int64_t kTaskRows = 32;

struct Task {
  int64_t batch, first, count;  // of the anchored places
};

}  // namespace

Tensor edit_keys(const Tensor& key, const Tensor& anchors, const Tensor& left,
                 const std::optional<Tensor>& right, const Tensor& gain) {
  TORCH_CHECK(key.device().is_cpu() && has_kernel_type(key) && key.dim() == 4 &&
                  (key.size(3) < 2 || key.stride(3) == 1),
              "edit_keys: key must be [batch, heads, keys, size] on the CPU in float32, bfloat16 or "
              "float16, its last dimension contiguous");
  const int64_t batch = key.size(0), heads = key.size(1), keys = key.size(2), size = key.size(3);
  TORCH_CHECK(anchors.device().is_cpu() && anchors.scalar_type() == at::kBool &&
                  anchors.sizes() == at::IntArrayRef({batch, keys}),
              "edit_keys: anchors must be bool [", batch, ", ", keys, "] on the CPU");
  TORCH_CHECK(left.device().is_cpu() && left.scalar_type() == at::kFloat && left.dim() == 3 &&
                  left.size(0) == heads && left.size(1) == size,
              "edit_keys: left must be float32 [", heads, ", ", size, ", rank] on the CPU");
  const int64_t rank = left.size(2);
  TORCH_CHECK(right ? right->device().is_cpu() && right->scalar_type() == at::kFloat &&
                          right->sizes() == at::IntArrayRef({heads, rank, size})
                    : rank == size,
              "edit_keys: right must be float32 [", heads, ", ", rank, ", ", size,
              "] on the CPU, or left a square matrix a head");
  TORCH_CHECK(gain.device().is_cpu() && gain.scalar_type() == at::kFloat &&
                  gain.sizes() == at::IntArrayRef({heads}),
              "edit_keys: gain must be float32 [", heads, "] on the CPU");
  check_no_gradient("edit_keys", {key, left, gain});
  if (right) check_no_gradient("edit_keys", {*right});
  Tensor out = key.clone(at::MemoryFormat::Contiguous);
  const Tensor left_rows = left.contiguous(), gains = gain.contiguous();
  const Tensor right_rows = right ? right->contiguous() : Tensor();
  EditCall call = {};
  call.left = left_rows.const_data_ptr<float>();
  call.right = right ? right_rows.const_data_ptr<float>() : nullptr;
  call.gain = gains.const_data_ptr<float>();
  call.size = size;
  call.rank = rank;

  std::vector<int64_t> places;
  std::vector<Task> tasks;
  const bool* anchored = anchors.const_data_ptr<bool>();
  for (int64_t b = 0; b < batch; ++b) {
    int64_t first = static_cast<int64_t>(places.size());
    for (int64_t k = 0; k < keys; ++k) {
      if (anchored[b * anchors.stride(0) + k * anchors.stride(1)]) places.push_back(k);
    }
    for (const int64_t end = static_cast<int64_t>(places.size()); first < end; first += kTaskRows) {
      tasks.push_back({b, first, std::min(kTaskRows, end - first)});
    }
  }
  const int64_t bytes = key.element_size();
  const char* from = static_cast<const char*>(key.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const EditKernels kernel = kernels().edit[static_cast<int>(kernel_type(key))];
  const int64_t count = static_cast<int64_t>(tasks.size()) * heads;
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_memory(1, kernel.scratch_bytes(call));
    for (int64_t i = begin; i < end; ++i) {
      // Head by head, so that a projection stays in the caches.
      const int64_t head = i / static_cast<int64_t>(tasks.size());
      const Task& task = tasks[i % tasks.size()];
      const void* rows[kTaskRows];
      void* edited[kTaskRows];
      for (int64_t r = 0; r < task.count; ++r) {
        const int64_t place = places[task.first + r];
        rows[r] = from + bytes * (task.batch * key.stride(0) + head * key.stride(1) +
                                  place * key.stride(2));
        edited[r] = to + bytes * (((task.batch * heads + head) * keys + place) * size);
      }
      kernel.rows(call, head, rows, edited, task.count, scratch);
    }
  });
  return out;
}

}  // namespace radar
