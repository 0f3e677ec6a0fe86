// The operators' implementations, for schemas.cpp to register.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
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

at::Tensor blend_logits(const at::Tensor& full, const at::Tensor& masked,
                        const at::Tensor& strength, bool modulated);

at::Tensor sample_logits(const at::Tensor& full, const std::optional<at::Tensor>& masked,
                         const at::Tensor& strength, const at::Tensor& temperature,
                         const std::optional<at::Tensor>& top_k,
                         const std::optional<at::Tensor>& top_p,
                         const std::optional<at::Tensor>& min_p, const at::Tensor& seed,
                         const at::Tensor& offset);

// What sample_logits cuts each row at: the least logit over temperature that is kept. For tests.
at::Tensor sample_floors(const at::Tensor& full, const std::optional<at::Tensor>& masked,
                         const at::Tensor& strength, const at::Tensor& temperature,
                         const std::optional<at::Tensor>& top_k,
                         const std::optional<at::Tensor>& top_p,
                         const std::optional<at::Tensor>& min_p, const at::Tensor& seed,
                         const at::Tensor& offset);

at::Tensor edit_keys(const at::Tensor& key, const at::Tensor& anchors, const at::Tensor& left,
                     const std::optional<at::Tensor>& right, const at::Tensor& gain);

// `scales` belong to int8 sentences; sender, round, hops and now are int64.
at::Tensor relevance_scores(const at::Tensor& sentences, const std::optional<at::Tensor>& scales,
                            const at::Tensor& queries, const at::Tensor& sender,
                            const at::Tensor& round, const at::Tensor& hops,
                            const at::Tensor& now, double spatial_decay, double temporal_decay,
                            const std::string& self_policy);

// Offsets [queries + 1], then the indices and scores selected.
std::tuple<at::Tensor, at::Tensor, at::Tensor> select_relevant(
    const at::Tensor& sentences, const std::optional<at::Tensor>& scales,
    const at::Tensor& queries, const at::Tensor& sender, const at::Tensor& round,
    const at::Tensor& hops, const at::Tensor& now, double spatial_decay, double temporal_decay,
    const std::string& self_policy, std::optional<double> threshold, std::optional<int64_t> top_k);

}  // namespace radar
