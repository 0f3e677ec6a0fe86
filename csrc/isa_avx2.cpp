#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define RADAR_ISA_NAME avx2
#define RADAR_ISA_AVX2 1
#define RADAR_VECTOR_BYTES 32
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
#include "kernels.h"
const radar::Kernels* radar::kernels_avx2() { return nullptr; }
#endif
