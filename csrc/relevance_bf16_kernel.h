// Cosines of bfloat16 sentences with bfloat16 queries by AVX512_BF16.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

static void relevance_bf16_pack(const RelevanceCall& call, void* packed, float* factors) {
  __builtin_memset(packed, 0, relevance_packed_bytes<WordDots>(call));
  for (int64_t q = 0; q < call.queries; ++q) {
    uint16_t* row = (uint16_t*)packed + q * padded(call.size);
    factors[q] = put_words(call.query_values + q * call.size, call.size,
                           [&](int64_t d, uint16_t word) { row[d] = word; });
  }
}

static RelevanceKernels relevance_bf16_kernels() {
  return {relevance_packed_bytes<WordDots>, relevance_bf16_pack, relevance_scratch_bytes,
          relevance_tile<WordDots>};
}

}  // namespace RADAR_ISA_NAME
}  // namespace radar
