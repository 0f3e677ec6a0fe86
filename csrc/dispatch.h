// Which instruction set this process uses, and per-thread memory that calls reuse.
#pragma once

#include <cstddef>

#include "kernels.h"

namespace radar {

// The best kernels of this CPU, or those of RADAR_CPU_ISA (amx, avx512_bf16, avx512, avx2, baseline)
// where the CPU has them. Chosen once; raises on a name it does not know.
const Kernels& kernels();

// Whether the CPU and this build have the instruction set.
bool has_instruction_set(const char* name);

// Forces an instruction set for the whole process; for tests.
void use_instruction_set(const char* name);

// Memory of the calling thread, aligned to 64 bytes, kept until the thread ends. `slot` separates
// the buffers that one thread uses at the same time.
void* thread_memory(int slot, std::size_t bytes);

}  // namespace radar
