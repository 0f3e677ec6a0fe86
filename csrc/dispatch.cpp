#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace radar {
namespace {

struct Level {
  const char* name;
  const Kernels* (*kernels)();
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_bf16() { return false; }
#endif
#if defined(__x86_64__) && defined(__linux__)
// The CPU has tiles of bfloat16, and the kernel lets this process use them. (The compiler's own
// test of the CPU does not know AMX everywhere.)
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (kBFloat16 | kTile)) != (kBFloat16 | kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool has_amx() { return false; }
#endif
bool always() { return true; }

constexpr Level kLevels[] = {{"amx", kernels_amx, has_amx},
                             {"avx512_bf16", kernels_avx512_bf16, has_avx512_bf16},
                             {"avx512", kernels_avx512, has_avx512},
                             {"avx2", kernels_avx2, has_avx2},
                             {"baseline", kernels_baseline, always}};

const Level* find_level(const char* name) {
  for (const Level& level : kLevels) {
    if (std::strcmp(level.name, name) == 0) return &level;
  }
  return nullptr;
}

const Kernels* choose() {
  const char* wanted = std::getenv("RADAR_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    for (const Level& level : kLevels) {
      if (level.supported()) return level.kernels();
    }
  }
  const Level* level = find_level(wanted);
  if (level == nullptr || !level->supported()) {
    throw std::runtime_error(std::string("RADAR_CPU_ISA=") + wanted +
                             " is not an instruction set of this CPU; use one of amx, avx512_bf16, "
                             "avx512, avx2, baseline that it has, or unset it");
  }
  return level->kernels();
}

std::atomic<const Kernels*> chosen{nullptr};

constexpr std::align_val_t kAlignment{64};

struct Buffer {
  void* memory = nullptr;
  std::size_t bytes = 0;
  ~Buffer() { ::operator delete(memory, kAlignment); }
};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_acquire);
  if (current == nullptr) {
    current = choose();
    chosen.store(current, std::memory_order_release);
  }
  return *current;
}

bool has_instruction_set(const char* name) {
  const Level* level = find_level(name);
  return level != nullptr && level->supported();
}

void use_instruction_set(const char* name) {
  const Level* level = find_level(name);
  if (level == nullptr || !level->supported()) {
    throw std::runtime_error(std::string(name) + " is not an instruction set of this CPU");
  }
  chosen.store(level->kernels(), std::memory_order_release);
}

void* thread_memory(int slot, std::size_t bytes) {
  thread_local Buffer buffers[2];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    ::operator delete(buffer.memory, kAlignment);
    buffer.memory = nullptr;
    buffer.bytes = 0;
    buffer.memory = ::operator new(bytes, kAlignment);
    buffer.bytes = bytes;
  }
  return buffer.memory;
}

}  // namespace radar
