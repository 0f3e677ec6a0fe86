// The kernels of AVX-512, but for the products that AVX512_BF16 is better at.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define RADAR_ISA_NAME avx512_bf16
#define RADAR_ISA_AVX512 1
#define RADAR_VECTOR_BYTES 64
#include "isa_products.h"

#include "bf16_dots.h"

#include "decode_attention_bf16_kernel.h"
#include "relevance_bf16_kernel.h"
#include "word_products_kernel.h"

const radar::Kernels* radar::kernels_avx512_bf16() {
  static const Kernels kernels = [] {
    Kernels all = *kernels_avx512();
    all.name = "avx512_bf16";
    all.decode[(int)Type::kBFloat16] = avx512_bf16::decode_bf16_kernels();
    all.word_product = avx512_bf16::word_product;
    all.relevance[(int)Type::kBFloat16] = avx512_bf16::relevance_bf16_kernels();
    return all;
  }();
  return &kernels;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"
const radar::Kernels* radar::kernels_avx512_bf16() { return nullptr; }
#endif
