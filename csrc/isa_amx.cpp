// The kernels of AVX-512, but for the products that AMX's tiles are better at.
#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>

#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define RADAR_ISA_NAME amx
#define RADAR_ISA_AVX512 1
#define RADAR_VECTOR_BYTES 64
#include "isa_products.h"

#include "amx_tiles.h"

#include "decode_attention_amx_kernel.h"
#include "relevance_amx_kernel.h"

const radar::Kernels* radar::kernels_amx() {
  static const Kernels kernels = [] {
    Kernels all = *kernels_avx512();
    all.name = "amx";
    all.decode[(int)Type::kBFloat16] = amx::decode_amx_kernels();
    all.relevance[(int)Type::kBFloat16] = amx::relevance_amx_kernels();
    return all;
  }();
  return &kernels;
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"
const radar::Kernels* radar::kernels_amx() { return nullptr; }
#endif
