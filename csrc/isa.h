// The kernels compiled for one instruction set: the including file chooses it.
#include "kernels.h"

#include "simd.h"

#include "attention_epilogue.h"
#include "dot_rows.h"

#include "decode_attention_kernel.h"
#include "edit_keys_kernel.h"
#include "linear_rows_kernel.h"
#include "logit_blend_kernel.h"
#include "merge_parts_kernel.h"
#include "prefill_attention_kernel.h"
#include "relevance_kernel.h"

#define RADAR_STRING_(x) #x
#define RADAR_STRING(x) RADAR_STRING_(x)
#define RADAR_JOIN_(a, b) a##b
#define RADAR_JOIN(a, b) RADAR_JOIN_(a, b)

namespace radar {

const Kernels* RADAR_JOIN(kernels_, RADAR_ISA_NAME)() {
  namespace isa = RADAR_ISA_NAME;
  static const Kernels kernels = {
      RADAR_STRING(RADAR_ISA_NAME),
      {isa::decode_kernels<isa::Float32>(), isa::decode_kernels<isa::BFloat16>(),
       isa::decode_kernels<isa::Float16>()},
      {isa::prefill_kernels<isa::Float32, isa::Float32>(),
       isa::prefill_kernels<isa::BFloat16, isa::BFloat16>(),
       isa::prefill_kernels<isa::Float16, isa::Float16>()},
      {isa::prefill_kernels<isa::Float32, isa::Float32>(),
       isa::prefill_kernels<isa::BFloat16, isa::Float32>(),
       isa::prefill_kernels<isa::Float16, isa::Float32>()},
      {isa::linear_kernels<isa::Float32>(), isa::linear_kernels<isa::BFloat16>(),
       isa::linear_kernels<isa::Float16>()},
      {isa::merge_row<isa::Float32>, isa::merge_row<isa::BFloat16>,
       isa::merge_row<isa::Float16>},
      {isa::logit_kernels<isa::Float32>(), isa::logit_kernels<isa::BFloat16>(),
       isa::logit_kernels<isa::Float16>()},
      {isa::relevance_kernels<isa::Float32>(), isa::relevance_kernels<isa::BFloat16>(),
       isa::relevance_kernels<isa::Float16>(), isa::relevance_kernels<isa::Int8>()},
      isa::score_kernels(),
      {isa::edit_kernels<isa::Float32>(), isa::edit_kernels<isa::BFloat16>(),
       isa::edit_kernels<isa::Float16>()},
      nullptr};
  return &kernels;
}

}  // namespace radar
