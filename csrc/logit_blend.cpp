// blend_logits, and sample_logits: blend, temperature, top-k, top-p, min-p and the draw of a row.
//
// No sort of the vocabulary: maxima of small groups bound what can be kept, few candidates are
// collected, and the cut-offs are found among those. What is kept, and the token drawn from it, do
// not depend on the other rows or on the threads: every sum has one order, and the draw is a
// maximum.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {
namespace {

using at::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Tokens from which the threads share one row.
constexpr int64_t kSharedTokens = 32768;
// Up to here candidates are weighed in double precision, as PyTorch would; and sorted at once.
constexpr int64_t kExactCandidates = 4096;
constexpr int64_t kSorted = 64;
constexpr int kBuckets = 1024;

struct SampleRow {
  float temperature, top_p, log_min_p;  // top_p 1, log_min_p -inf: off
  int64_t top_k;                        // 0: off
  Noise noise;
};

// A thread's memory for one row, for `tokens` rounded up to whole chunks.
struct Scratch {
  float *maxima, *masses, *warm, *values, *weights;
  int32_t* ids;
  static int64_t bytes(int64_t chunks) {
    return 4 * chunks * (kChunkMaxima + 16 + 4 * kChunkTokens);
  }
  Scratch(int64_t chunks, void* memory) {
    maxima = static_cast<float*>(memory);
    masses = maxima + chunks * kChunkMaxima;
    warm = masses + chunks * 16;
    values = warm + chunks * kChunkTokens;
    weights = values + chunks * kChunkTokens;
    ids = reinterpret_cast<int32_t*>(weights + chunks * kChunkTokens);
  }
};

template <class F>
void over_chunks(int64_t chunks, bool shared, const F& pass) {
  if (!shared) return pass(0, chunks);
  const int64_t threads = at::get_num_threads();
  at::parallel_for(0, chunks, (chunks + threads - 1) / threads, pass);
}

// Runs `one(row, shared)` for every row: the rows side by side, or the threads within a row.
template <class F>
void over_rows(int64_t rows, int64_t tokens, const F& one) {
  const int64_t threads = at::get_num_threads();
  if (threads == 1 || at::in_parallel_region() || rows * tokens < kSharedTokens) {
    for (int64_t row = 0; row < rows; ++row) one(row, false);
  } else if (rows < threads) {
    for (int64_t row = 0; row < rows; ++row) one(row, true);
  } else {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t row = next++; row < rows; row = next++) one(row, false);
    });
  }
}

uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The least value that larger ones weigh less than `target` in front of; the least of all where
// they never do. Histograms over the bits of the values, one within a bucket of the other, until a
// few are left to sort. Reorders values and weights; a value is never -0.
float cut_by_mass(float* values, double* weights, int64_t count, double target) {
  double above = 0;
  for (;;) {
    float low = values[0], high = values[0];
    for (int64_t i = 1; i < count; ++i) {
      low = std::min(low, values[i]);
      high = std::max(high, values[i]);
    }
    if (low == high) return low;
    if (count <= kSorted) break;
    const uint32_t base = ordered(low);
    int shift = 0;
    while (((ordered(high) - base) >> shift) >= kBuckets) ++shift;
    double masses[kBuckets] = {};
    for (int64_t i = 0; i < count; ++i) masses[(ordered(values[i]) - base) >> shift] += weights[i];
    int bucket = kBuckets - 1;
    int last = 0;  // the lowest bucket is never empty
    while (bucket > last && above + masses[bucket] < target) above += masses[bucket--];
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      if ((int)((ordered(values[i]) - base) >> shift) != bucket) continue;
      values[left] = values[i];
      weights[left++] = weights[i];
    }
    count = left;
  }
  int order[kSorted];
  for (int i = 0; i < count; ++i) order[i] = i;
  std::sort(order, order + count, [&](int a, int b) { return values[a] > values[b]; });
  float least = values[order[0]];
  for (int i = 0; i < count && above < target; ++i) {
    least = values[order[i]];
    above += weights[order[i]];
  }
  return least;
}

struct Kept {
  float floor;    // over temperature
  int64_t count;  // candidates in the scratch, or -1: all tokens
};

// What a logit must reach for its quotient by the temperature to reach `warm`, to be on the safe
// side of every rounding.
float logit_reaching(float warm, float temperature) {
  const float logit = warm * temperature;
  const float slack = std::abs(logit) * 0x1p-20f + temperature * 0x1p-99f;
  return std::max(logit - slack, -FLT_MAX);
}

// The candidates of a row (no other token can be kept) and the floor among them.
Kept truncate(const LogitKernels& kernel, const LogitRow& logits, const SampleRow& row,
              int64_t chunks, bool shared, float top, Scratch& scratch) {
  const bool by_count = row.top_k > 0 && row.top_k < logits.tokens;
  const bool by_mass = row.top_p < 1;
  const bool by_least = row.log_min_p > -kInfinity;
  if (!by_count && !by_mass && !by_least) return {-FLT_MAX, -1};

  const float least_floor = by_least ? top + row.log_min_p : -FLT_MAX;
  float least = by_least ? logit_reaching(least_floor, row.temperature) : -FLT_MAX;
  double mass = -1;
  if (by_count) {
    const float reached = kernel.reached_by(scratch.maxima, chunks * kChunkMaxima, row.top_k);
    const float slack = std::abs(reached) * 0x1p-20f + row.temperature * 0x1p-99f;
    // A smaller bound would lose tokens that count for top-k, and with it for top-p.
    if (reached - slack > least || by_mass) least = std::max(reached - slack, -FLT_MAX);
  } else if (by_mass && row.top_p > 0) {
    over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
      kernel.masses(logits, begin, end, row.temperature, top, false, scratch.masses);
    });
    mass = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) mass += scratch.masses[chunk];
    // Tokens below this weight hold less than 1 - top_p together.
    const double share = (1.0 - row.top_p) * mass / logits.tokens;
    const float lightest = top + (float)std::log(share * 0.999) - std::abs(top) * 0x1p-22f;
    least = std::max(least, logit_reaching(lightest, row.temperature));
  } else if (by_mass) {
    least = logit_reaching(top, row.temperature);
  }
  int64_t count = kernel.collect(logits, chunks, scratch.maxima, least, scratch.warm, scratch.ids);
  kernel.divide(scratch.warm, count, row.temperature);

  float floor = -FLT_MAX;
  if (by_count && count >= row.top_k) {
    std::memcpy(scratch.values, scratch.warm, count * sizeof(float));
    const auto last = scratch.values + row.top_k - 1;
    std::nth_element(scratch.values, last, scratch.values + count, std::greater<float>());
    floor = *last;
  }
  if (by_mass && row.top_p == 0) {
    floor = top;
  } else if (by_mass) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      scratch.values[kept] = scratch.warm[i];
      kept += scratch.warm[i] >= floor;
    }
    double* weights = static_cast<double*>(thread_memory(1, kept * sizeof(double)));
    if (kept <= kExactCandidates) {
      for (int64_t i = 0; i < kept; ++i) weights[i] = std::exp((double)scratch.values[i] - top);
    } else {
      kernel.weights(scratch.values, kept, top, scratch.weights);
      std::copy(scratch.weights, scratch.weights + kept, weights);
    }
    if (by_count) {
      mass = 0;
      for (int64_t i = 0; i < kept; ++i) mass += weights[i];
    }
    if (kept > 0) floor = cut_by_mass(scratch.values, weights, kept, row.top_p * mass);
  }
  return {std::max(floor, least_floor), count};
}

// Returns the token, or -1; and the floor where it is asked for.
int64_t sample_row(const LogitKernels& kernel, const LogitRow& logits, const SampleRow& row,
                   bool shared, float* floor) {
  const int64_t chunks = (logits.tokens + kChunkTokens - 1) / kChunkTokens;
  Scratch scratch(chunks, thread_memory(0, Scratch::bytes(chunks)));
  over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
    kernel.maxima(logits, begin, end, scratch.maxima);
  });
  const float largest = kernel.largest(scratch.maxima, chunks * kChunkMaxima);
  const bool greedy = row.temperature == 0;
  const float temperature = greedy ? 1 : row.temperature;
  const float top = largest / temperature + 0.0f;
  if (floor) *floor = -kInfinity;
  if (top == -kInfinity) return -1;
  // Noise moves nothing that is infinite.
  if (greedy || top == kInfinity) {
    if (floor) *floor = top;
    return kernel.first(logits, chunks, scratch.maxima, temperature, top);
  }
  const Kept kept = truncate(kernel, logits, row, chunks, shared, top, scratch);
  if (floor) *floor = kept.floor;
  Draw best = {-kInfinity, -1};
  if (kept.count >= 0) {
    kernel.draw_listed(scratch.warm, scratch.ids, kept.count, kept.floor, row.noise, &best);
    return best.token;
  }
  const int64_t likely = kernel.first(logits, chunks, scratch.maxima, temperature, top);
  best = {top + kernel.gumbel(kernel.word(likely, row.noise)), likely};
  const Draw start = best;
  std::mutex merging;
  over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
    Draw found = start;
    kernel.draw_all(logits, begin, end, scratch.maxima, temperature, row.noise, &found);
    const std::lock_guard<std::mutex> lock(merging);
    if (found.score > best.score ||
        (found.score == best.score && found.token < best.token)) {
      best = found;
    }
  });
  return best.token;
}

void check_logits(const char* name, const Tensor& full, const std::optional<Tensor>& masked,
                  const Tensor& strength) {
  TORCH_CHECK(full.device().is_cpu() && has_kernel_type(full) && full.dim() == 2 &&
                  full.size(1) > 0 && full.size(1) < (int64_t{1} << 31),
              name, ": full must be [rows, tokens] on the CPU in float32, bfloat16 or float16");
  TORCH_CHECK(!masked || (masked->device().is_cpu() && masked->sizes() == full.sizes() &&
                          masked->scalar_type() == full.scalar_type()),
              name, ": masked must have the shape and dtype of full");
  TORCH_CHECK(strength.device().is_cpu() && strength.scalar_type() == at::kFloat &&
                  strength.dim() == 1 && strength.size(0) == full.size(0) &&
                  strength.is_contiguous(),
              name, ": strength must be contiguous float32 [rows]");
}

Tensor readable(const Tensor& logits) {
  return logits.stride(1) == 1 || logits.size(1) == 1 ? logits : logits.contiguous();
}

LogitRow row_of(const Tensor& full, const Tensor* masked, int64_t row, float strength) {
  const auto start = [row](const Tensor& tensor) {
    return static_cast<const char*>(tensor.const_data_ptr()) +
           row * tensor.stride(0) * tensor.element_size();
  };
  LogitRow logits = {};
  logits.full = start(full);
  logits.tokens = full.size(1);
  // A strength of 1 reads nothing of the masked row.
  if (masked && strength != 1) {
    logits.masked = start(*masked);
    logits.move = strength - 1;
  }
  return logits;
}

template <class T>
const T* per_row(const char* name, const Tensor& given, int64_t rows) {
  TORCH_CHECK(given.device().is_cpu() && given.dim() == 1 && given.size(0) == rows &&
                  given.is_contiguous() && given.scalar_type() == c10::CppTypeToScalarType<T>(),
              "sample_logits: ", name, " must be contiguous [rows] on the CPU");
  return given.const_data_ptr<T>();
}

void sample(const Tensor& full, const std::optional<Tensor>& masked, const Tensor& strength,
            const Tensor& temperature, const std::optional<Tensor>& top_k,
            const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
            const Tensor& seed, const Tensor& offset, int64_t* tokens, float* floors) {
  check_logits("sample_logits", full, masked, strength);
  const int64_t rows = full.size(0);
  const Tensor given = readable(full);
  const Tensor hidden = masked ? readable(*masked) : Tensor();
  // PyTorch's own logarithm, so that the cut-off is PyTorch's to the last bit.
  const Tensor log_min_p = min_p ? at::log(*min_p) : Tensor();
  const float* strengths = strength.const_data_ptr<float>();
  const float* temperatures = per_row<float>("temperature", temperature, rows);
  const int64_t* counts = top_k ? per_row<int64_t>("top_k", *top_k, rows) : nullptr;
  const float* shares = top_p ? per_row<float>("top_p", *top_p, rows) : nullptr;
  const float* leasts = min_p ? per_row<float>("min_p", log_min_p, rows) : nullptr;
  const int64_t* seeds = per_row<int64_t>("seed", seed, rows);
  const int64_t* offsets = per_row<int64_t>("offset", offset, rows);
  const LogitKernels& kernel = kernels().logits[static_cast<int>(kernel_type(full))];
  over_rows(rows, full.size(1), [&](int64_t row, bool shared) {
    const SampleRow settings = {temperatures[row],
                                shares ? shares[row] : 1.0f,
                                leasts ? leasts[row] : -kInfinity,
                                counts ? counts[row] : 0,
                                {(uint64_t)seeds[row], (uint64_t)offsets[row]}};
    const LogitRow logits = row_of(given, masked ? &hidden : nullptr, row, strengths[row]);
    const int64_t token =
        sample_row(kernel, logits, settings, shared, floors ? floors + row : nullptr);
    if (tokens) tokens[row] = token;
  });
}

}  // namespace

Tensor sample_logits(const Tensor& full, const std::optional<Tensor>& masked,
                     const Tensor& strength, const Tensor& temperature,
                     const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                     const std::optional<Tensor>& min_p, const Tensor& seed,
                     const Tensor& offset) {
  Tensor tokens = at::empty({full.size(0)}, full.options().dtype(at::kLong));
  sample(full, masked, strength, temperature, top_k, top_p, min_p, seed, offset,
         tokens.mutable_data_ptr<int64_t>(), nullptr);
  return tokens;
}

Tensor sample_floors(const Tensor& full, const std::optional<Tensor>& masked,
                     const Tensor& strength, const Tensor& temperature,
                     const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                     const std::optional<Tensor>& min_p, const Tensor& seed,
                     const Tensor& offset) {
  Tensor floors = at::empty({full.size(0)}, full.options().dtype(at::kFloat));
  sample(full, masked, strength, temperature, top_k, top_p, min_p, seed, offset, nullptr,
         floors.mutable_data_ptr<float>());
  return floors;
}

Tensor blend_logits(const Tensor& full, const Tensor& masked, const Tensor& strength,
                    bool modulated) {
  check_logits("blend_logits", full, masked, strength);
  check_no_gradient("blend_logits", {full, masked, strength});
  const Tensor given = readable(full), hidden = readable(masked);
  Tensor out = at::empty(full.sizes(), full.options().dtype(at::kFloat));
  const int64_t tokens = full.size(1), chunks = (tokens + kChunkTokens - 1) / kChunkTokens;
  const float* strengths = strength.const_data_ptr<float>();
  float* blended = out.mutable_data_ptr<float>();
  const LogitKernels& kernel = kernels().logits[static_cast<int>(kernel_type(full))];
  over_rows(full.size(0), tokens, [&](int64_t row, bool shared) {
    LogitRow logits = row_of(given, &hidden, row, strengths[row]);
    logits.modulated = modulated;
    logits.weighted = modulated && logits.masked && std::abs(strengths[row]) > 1;
    if (logits.weighted) {
      Scratch scratch(chunks, thread_memory(0, Scratch::bytes(chunks)));
      LogitRow plain = logits;
      plain.masked = nullptr;
      over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
        kernel.maxima(plain, begin, end, scratch.maxima);
      });
      logits.top = kernel.largest(scratch.maxima, chunks * kChunkMaxima);
      over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
        kernel.masses(plain, begin, end, 1, logits.top, true, scratch.masses);
      });
      double mass = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) mass += scratch.masses[chunk];
      logits.mass = (float)mass;
    }
    over_chunks(chunks, shared, [&](int64_t begin, int64_t end) {
      kernel.blend(logits, begin, end, blended + row * tokens);
    });
  });
  return out;
}

}  // namespace radar
