// Every operator of this library, declared and registered in one place.
#include <torch/library.h>

#include <string>

#include "dispatch.h"
#include "operators.h"
#include "row_blocks.h"

TORCH_LIBRARY(radar_cpp, library) {
  library.def(
      "anchor_attention(Tensor query, Tensor key, Tensor value, Tensor? anchors, Tensor? bias, "
      "Tensor? target_mass, bool target_exact, Tensor? mask, Tensor? key_lengths, bool causal, "
      "float scale, int? window, float? softcap, Tensor? sinks, bool return_mass) "
      "-> (Tensor, Tensor)");
  library.def(
      "partition_attention(Tensor query, Tensor key, Tensor value, Tensor anchors, Tensor? mask, "
      "Tensor? key_lengths, bool causal, float scale, int? window, float? softcap, Tensor? sinks) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "segment_mass(Tensor query, Tensor key, Tensor segments, SymInt num_segments, Tensor? mask, "
      "Tensor? key_lengths, bool causal, float scale, int? window, float? softcap, Tensor? sinks) "
      "-> Tensor");
  library.def("linear_rows(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def(
      "merge_parts(Tensor first, Tensor first_lse, Tensor second, Tensor second_lse) "
      "-> (Tensor, Tensor)");
  library.def("blend_logits(Tensor full, Tensor masked, Tensor strength, bool modulated) -> Tensor");
  library.def(
      "sample_logits(Tensor full, Tensor? masked, Tensor strength, Tensor temperature, "
      "Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor offset) -> Tensor");
  library.def(
      "sample_floors(Tensor full, Tensor? masked, Tensor strength, Tensor temperature, "
      "Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor seed, Tensor offset) -> Tensor");
  library.def(
      "edit_keys(Tensor key, Tensor anchors, Tensor left, Tensor? right, Tensor gain) -> Tensor");
  library.def(
      "relevance_scores(Tensor sentences, Tensor? scales, Tensor queries, Tensor sender, "
      "Tensor round, Tensor hops, Tensor now, float spatial_decay, float temporal_decay, "
      "str self_policy) -> Tensor");
  library.def(
      "select_relevant(Tensor sentences, Tensor? scales, Tensor queries, Tensor sender, "
      "Tensor round, Tensor hops, Tensor now, float spatial_decay, float temporal_decay, "
      "str self_policy, float? threshold, int? top_k) -> (Tensor, Tensor, Tensor)");

  // Which kernels run; the tests go through all of them.
  library.def("has_instruction_set(str name) -> bool",
              [](const std::string& name) { return radar::has_instruction_set(name.c_str()); });
  library.def("use_instruction_set(str name) -> ()",
              [](const std::string& name) { radar::use_instruction_set(name.c_str()); });
  library.def("products_absent() -> str", []() {
    const char* reason = radar::products_absent();
    return std::string(reason ? reason : "");
  });
  library.def("instruction_set() -> str", []() { return std::string(radar::kernels().name); });
}

TORCH_LIBRARY_IMPL(radar_cpp, CPU, library) {
  library.impl("anchor_attention", radar::anchor_attention);
  library.impl("partition_attention", radar::partition_attention);
  library.impl("segment_mass", radar::segment_mass);
  library.impl("linear_rows", radar::linear_rows);
  library.impl("merge_parts", radar::merge_parts);
  library.impl("blend_logits", radar::blend_logits);
  library.impl("sample_logits", radar::sample_logits);
  library.impl("sample_floors", radar::sample_floors);
  library.impl("edit_keys", radar::edit_keys);
  library.impl("relevance_scores", radar::relevance_scores);
  library.impl("select_relevant", radar::select_relevant);
}
