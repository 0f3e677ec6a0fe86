// The operators' implementations, for schemas.cpp to register.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace radar {

std::tuple<at::Tensor, at::Tensor> anchor_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& anchors, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& target_mass, bool target_exact,
    const std::optional<at::Tensor>& mask, const std::optional<at::Tensor>& key_lengths,
    bool causal, double scale, std::optional<int64_t> window, std::optional<double> softcap,
    const std::optional<at::Tensor>& sinks, bool return_mass);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> partition_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& anchors, const std::optional<at::Tensor>& mask,
    const std::optional<at::Tensor>& key_lengths, bool causal, double scale,
    std::optional<int64_t> window, std::optional<double> softcap,
    const std::optional<at::Tensor>& sinks);

at::Tensor segment_mass(const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& segments, int64_t num_segments,
                        const std::optional<at::Tensor>& mask,
                        const std::optional<at::Tensor>& key_lengths, bool causal, double scale,
                        std::optional<int64_t> window, std::optional<double> softcap,
                        const std::optional<at::Tensor>& sinks);

at::Tensor linear_rows(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias);

std::tuple<at::Tensor, at::Tensor> merge_parts(const at::Tensor& first,
                                               const at::Tensor& first_lse,
                                               const at::Tensor& second,
                                               const at::Tensor& second_lse);

}  // namespace radar
