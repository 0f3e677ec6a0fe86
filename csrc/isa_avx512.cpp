#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define RADAR_ISA_NAME avx512
#define RADAR_ISA_AVX512 1
#define RADAR_VECTOR_BYTES 64
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"
const radar::Kernels* radar::kernels_avx512() { return nullptr; }
#endif
