// What an instruction set that only multiplies better than AVX-512 builds upon.
#include "simd.h"

#include "attention_epilogue.h"
#include "dot_rows.h"

#include "decode_attention_kernel.h"
#include "relevance_kernel.h"
