// anchor_attention and partition_attention: binds a call and lets decode or prefill run it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "attention_call.h"
#include "checks.h"
#include "decode_attention.h"
#include "operators.h"
#include "prefill_attention.h"
#include "row_blocks.h"

namespace radar {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void run(const AttentionCall& call, const Tensor& query) {
  if (call.batch * call.heads == 0) return;
  if (call.queries <= kMostDecodeQueries) {
    decode_attention(call, kernel_type(query));
    return;
  }
  const char* reason = products_absent();
  TORCH_CHECK(!reason, "attention of more than ", kMostDecodeQueries,
              " query tokens cannot run here: ", reason);
  prefill_attention(call, kernel_type(query));
}

Tensor empty_rows(const Tensor& query) {
  return at::empty({query.size(0), query.size(1), query.size(2)},
                   query.options().dtype(at::kFloat));
}

}  // namespace

std::tuple<Tensor, Tensor> anchor_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& anchors,
    const OptionalTensor& bias, const OptionalTensor& target_mass, bool target_exact,
    const OptionalTensor& mask, const OptionalTensor& key_lengths, bool causal, double scale,
    std::optional<int64_t> window, std::optional<double> softcap, const OptionalTensor& sinks,
    bool return_mass) {
  AttentionCall call = bind_attention(
      "anchor_attention", query, key, value,
      {anchors, bias, target_mass, mask, key_lengths, sinks, target_exact, causal, scale, window,
       softcap});
  if (!(bias || target_mass || return_mass)) {
    call.anchor_flags = nullptr;
    call.anchor_factors = nullptr;
  }
  call.parts = anchors && (target_mass || return_mass) ? 2 : 1;
  Tensor out = empty_token_major(query, value.size(3));
  Tensor mass = return_mass ? empty_rows(query)
                            : at::empty({0}, query.options().dtype(at::kFloat));
  call.out = out.mutable_data_ptr();
  call.mass = return_mass ? mass.mutable_data_ptr<float>() : nullptr;
  if (call.mass && call.bias && call.anchor_factors && call.queries > kMostDecodeQueries) {
    // Factors bias each key by itself, so prefill cannot undo them to see the mass before.
    AttentionCall unbiased = call;
    unbiased.bias = nullptr;
    run(unbiased, query);
    call.mass = nullptr;
    call.parts = 1;
  }
  run(call, query);
  return {std::move(out), std::move(mass)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> partition_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& anchors,
    const OptionalTensor& mask, const OptionalTensor& key_lengths, bool causal, double scale,
    std::optional<int64_t> window, std::optional<double> softcap, const OptionalTensor& sinks) {
  AttentionCall call = bind_attention(
      "partition_attention", query, key, value,
      {anchors, {}, {}, mask, key_lengths, sinks, false, causal, scale, window, softcap});
  TORCH_CHECK(anchors.scalar_type() == at::kBool, "partition_attention: anchors must be bool");
  call.parts = 2;
  Tensor anchored = empty_token_major(query, value.size(3));
  Tensor rest = empty_token_major(query, value.size(3));
  Tensor anchored_lse = empty_rows(query), rest_lse = empty_rows(query);
  call.anchored_out = anchored.mutable_data_ptr();
  call.out = rest.mutable_data_ptr();
  call.anchored_lse = anchored_lse.mutable_data_ptr<float>();
  call.rest_lse = rest_lse.mutable_data_ptr<float>();
  run(call, query);
  return {std::move(anchored), std::move(anchored_lse), std::move(rest), std::move(rest_lse)};
}

}  // namespace radar
