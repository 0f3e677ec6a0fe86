// relevance_scores and select_relevant: one pass over the sentences for all queries.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "operators.h"

namespace radar {
namespace {

using at::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kHidden = -1.0f;
// Rounds whose decays a range of sentences remembers.
constexpr int64_t kRounds = 256;
// Ranges of sentences for each thread, so that the threads end together; and the least of one.
constexpr int64_t kRangesPerThread = 4;
constexpr int64_t kLeastRange = 4 * kRelevanceTile;

enum class Policy { kClamp, kLiteral, kExclude };

Policy policy_of(const std::string& name) {
  if (name == "clamp") return Policy::kClamp;
  if (name == "literal") return Policy::kLiteral;
  TORCH_CHECK(name == "exclude", "relevance: self_policy is ", name,
              "; expected clamp, literal or exclude");
  return Policy::kExclude;
}

// factor^exponent as the policy has it; kHidden where it excludes the pair.
float decay(double factor, int64_t exponent, Policy policy) {
  if (exponent < 0) {
    if (policy == Policy::kExclude) return kHidden;
    if (policy == Policy::kClamp) exponent = 0;
  }
  return static_cast<float>(std::pow(factor, static_cast<double>(exponent)));
}

// A call and everything that its ranges share.
struct Work {
  RelevanceCall call = {};
  RelevanceKernels kernels = {};
  ScoreKernels scores = {};
  const int64_t* sender = nullptr;
  const int64_t* round = nullptr;
  const int64_t* now = nullptr;
  int64_t agents = 0;
  double temporal_decay = 1;
  Policy policy = Policy::kClamp;
  void* packed = nullptr;
  std::vector<float> spatial;  // [agents, width]
  std::vector<Tensor> kept;    // what the pointers point into
};

// The decays over rounds of the sentences of one tile, remembered by round: a conversation has few.
class TemporalDecays {
 public:
  explicit TemporalDecays(const Work& work)
      : work_(work),
        width_(work.call.width),
        slots_(kRounds),
        rows_((kRounds + kRelevanceTile) * work.call.width, kHidden) {}

  void begin_tile() {
    ++tile_;
    spare_ = kRounds;
  }

  const float* of(int64_t round) {
    Slot& slot = slots_[static_cast<uint64_t>(round) % kRounds];
    float* row = rows_.data() + (&slot - slots_.data()) * width_;
    if (slot.tile == 0 || slot.round != round) {
      // A row that this tile already points to stays as it is.
      if (slot.tile == tile_) {
        row = rows_.data() + spare_++ * width_;
        fill(row, round);
        return row;
      }
      fill(row, round);
      slot.round = round;
    }
    slot.tile = tile_;
    return row;
  }

 private:
  struct Slot {
    int64_t round = 0;
    int64_t tile = 0;
  };

  void fill(float* row, int64_t round) const {
    for (int64_t q = 0; q < work_.call.queries; ++q) {
      const uint64_t age = static_cast<uint64_t>(work_.now[q]) - static_cast<uint64_t>(round) - 1;
      row[q] = decay(work_.temporal_decay, static_cast<int64_t>(age), work_.policy);
    }
  }

  const Work& work_;
  const int64_t width_;
  std::vector<Slot> slots_;
  std::vector<float> rows_;
  int64_t tile_ = 0;
  int64_t spare_ = kRounds;
};

// Calls take(begin, count, scores [count, width]) for every tile of begin..end, in order.
template <class Take>
void for_tiles(const Work& work, int64_t begin, int64_t end, const Take& take) {
  const int64_t width = work.call.width;
  TemporalDecays decays(work);
  std::vector<float> scores(kRelevanceTile * width);
  void* scratch = thread_memory(1, work.kernels.scratch_bytes(work.call));
  const float *spatial[kRelevanceTile], *temporal[kRelevanceTile];
  for (int64_t first = begin; first < end; first += kRelevanceTile) {
    const int64_t count = std::min(kRelevanceTile, end - first);
    decays.begin_tile();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t sender = work.sender[first + i];
      TORCH_CHECK_VALUE(sender >= 0 && sender < work.agents, "sender holds ", sender,
                        "; expected 0 to ", work.agents - 1, ", the columns of hops");
      spatial[i] = work.spatial.data() + sender * width;
      temporal[i] = decays.of(work.round[first + i]);
    }
    work.kernels.tile(work.call, work.packed, first, count, spatial, temporal, scratch,
                      scores.data());
    take(first, count, scores.data());
  }
}

struct Ranges {
  int64_t count, sentences, total;
  int64_t begin(int64_t range) const { return range * sentences; }
  int64_t end(int64_t range) const { return std::min(begin(range) + sentences, total); }
};

Ranges ranges_of(int64_t total) {
  const int64_t wanted = std::max<int64_t>(1, at::get_num_threads()) * kRangesPerThread;
  const int64_t even = std::max(kLeastRange, (total + wanted - 1) / wanted);
  const int64_t sentences = (even + kRelevanceTile - 1) / kRelevanceTile * kRelevanceTile;
  return {(total + sentences - 1) / sentences, sentences, total};
}

// Runs run(range) for each, by whichever thread is free. What one throws, this throws.
template <class Run>
void for_ranges(const Ranges& ranges, const Run& run) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), ranges.count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      for (int64_t range = next++; range < ranges.count; range = next++) run(range);
    }
  });
}

Tensor integers(const char* name, const Tensor& tensor, at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kLong &&
                  tensor.sizes() == sizes,
              "relevance: ", name, " must be int64 ", sizes, " on the CPU");
  return tensor.contiguous();
}

Work prepare(const Tensor& sentences, const std::optional<Tensor>& scales, const Tensor& queries,
             const Tensor& sender, const Tensor& round, const Tensor& hops, const Tensor& now,
             double spatial_decay, double temporal_decay, const std::string& self_policy) {
  const bool bytes = sentences.scalar_type() == at::kChar;
  TORCH_CHECK(sentences.device().is_cpu() && (bytes || has_kernel_type(sentences)) &&
                  sentences.dim() == 2 && (sentences.size(1) < 2 || sentences.stride(1) == 1),
              "relevance: sentences must be [sentences, size] on the CPU in float32, bfloat16, "
              "float16 or int8, each row contiguous");
  TORCH_CHECK(queries.device().is_cpu() && queries.dim() == 2 &&
                  queries.size(1) == sentences.size(1) &&
                  queries.scalar_type() == (bytes ? at::kFloat : sentences.scalar_type()),
              "relevance: queries must be [queries, ", sentences.size(1),
              "] on the CPU in the dtype of the sentences (float32 for int8)");
  TORCH_CHECK(scales.has_value() == bytes, "relevance: scales belong to int8 sentences");
  check_no_gradient("relevance", {sentences, queries});
  Work work;
  RelevanceCall& call = work.call;
  call.count = sentences.size(0);
  call.size = sentences.size(1);
  call.queries = queries.size(0);
  call.width = (call.queries + kRelevanceStep - 1) / kRelevanceStep * kRelevanceStep;
  call.sentences = sentences.const_data_ptr();
  call.row_stride = sentences.stride(0);
  if (bytes) {
    TORCH_CHECK(scales->device().is_cpu() && scales->scalar_type() == at::kFloat &&
                    scales->sizes() == at::IntArrayRef{call.count},
                "relevance: scales must be float32 [", call.count, "] on the CPU");
    work.kept.push_back(scales->contiguous());
    call.scales = work.kept.back().const_data_ptr<float>();
  }
  const auto keep = [&](Tensor tensor) -> const Tensor& {
    work.kept.push_back(std::move(tensor));
    return work.kept.back();
  };
  call.query_values = keep(queries.to(at::kFloat).contiguous()).const_data_ptr<float>();
  work.sender = keep(integers("sender", sender, {call.count})).const_data_ptr<int64_t>();
  work.round = keep(integers("round", round, {call.count})).const_data_ptr<int64_t>();
  work.now = keep(integers("now", now, {call.queries})).const_data_ptr<int64_t>();
  TORCH_CHECK(hops.dim() == 2, "relevance: hops must be [queries, agents]");
  work.agents = hops.size(1);
  const Tensor distances = integers("hops", hops, {call.queries, work.agents});
  work.temporal_decay = temporal_decay;
  work.policy = policy_of(self_policy);
  const Kernels& all = kernels();
  work.kernels = all.relevance[bytes ? kTypes : static_cast<int>(kernel_type(sentences))];
  work.scores = all.scores;

  work.packed = thread_memory(0, work.kernels.packed_bytes(call));
  std::vector<float> factors(call.width);
  work.kernels.pack(call, work.packed, factors.data());
  work.spatial.assign(work.agents * call.width, kHidden);
  const int64_t* hop = distances.const_data_ptr<int64_t>();
  for (int64_t q = 0; q < call.queries; ++q) {
    for (int64_t agent = 0; agent < work.agents; ++agent) {
      const int64_t steps = hop[q * work.agents + agent];
      if (steps < 0) continue;
      const float share = decay(spatial_decay, steps - 1, work.policy);
      work.spatial[agent * call.width + q] = share < 0 ? kHidden : share * factors[q];
    }
  }
  return work;
}

struct Hit {
  float score;
  int64_t index;
};

// Of equal scores the earlier sentence is the better one.
bool better(const Hit& a, const Hit& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}
bool earlier(const Hit& a, const Hit& b) { return a.index < b.index; }

// What one range of sentences holds for each query.
class Found {
 public:
  Found(const Work& work, float threshold, int64_t most)
      : work_(work), threshold_(threshold), most_(most), hits_(work.call.queries) {}

  void range(int64_t begin, int64_t end) {
    const int64_t width = work_.call.width;
    std::vector<float> limits(width, kInfinity);
    std::fill_n(limits.begin(), work_.call.queries, threshold_);
    std::vector<int32_t> places(kRelevanceTile * width);
    for_tiles(work_, begin, end, [&](int64_t first, int64_t count, const float* scores) {
      const int64_t passing =
          work_.scores.passing(scores, count, width, limits.data(), places.data());
      for (int64_t i = 0; i < passing; ++i) {
        const int64_t query = places[i] % width;
        const float score = scores[places[i]];
        // The limit rises inside a tile.
        if (score >= limits[query]) {
          add(hits_[query], {score, first + places[i] / width}, limits[query]);
        }
      }
    });
  }

  std::vector<Hit>& of(int64_t query) { return hits_[query]; }

 private:
  void add(std::vector<Hit>& hits, Hit hit, float& limit) const {
    hits.push_back(hit);
    if (static_cast<int64_t>(hits.size()) < most_) return;
    // A heap with the worst on top, from when it is full.
    if (static_cast<int64_t>(hits.size()) == most_) {
      std::make_heap(hits.begin(), hits.end(), better);
    } else {
      std::push_heap(hits.begin(), hits.end(), better);
      std::pop_heap(hits.begin(), hits.end(), better);
      hits.pop_back();
    }
    // Later sentences must be better, not equal.
    limit = std::nextafter(hits.front().score, kInfinity);
  }

  const Work& work_;
  const float threshold_;
  const int64_t most_;
  std::vector<std::vector<Hit>> hits_;
};

// The best `most` of what the ranges found for a query, in the order of the sentences.
std::vector<Hit> best(std::vector<Found>& found, int64_t query, int64_t most) {
  std::vector<Hit> hits;
  for (Found& one : found) {
    hits.insert(hits.end(), one.of(query).begin(), one.of(query).end());
    std::vector<Hit>().swap(one.of(query));
  }
  if (static_cast<int64_t>(hits.size()) > most) {
    std::nth_element(hits.begin(), hits.begin() + most, hits.end(), better);
    hits.resize(most);
  }
  if (!std::is_sorted(hits.begin(), hits.end(), earlier)) {
    std::sort(hits.begin(), hits.end(), earlier);
  }
  return hits;
}

}  // namespace

Tensor relevance_scores(const Tensor& sentences, const std::optional<Tensor>& scales,
                        const Tensor& queries, const Tensor& sender, const Tensor& round,
                        const Tensor& hops, const Tensor& now, double spatial_decay,
                        double temporal_decay, const std::string& self_policy) {
  const Work work = prepare(sentences, scales, queries, sender, round, hops, now, spatial_decay,
                            temporal_decay, self_policy);
  const RelevanceCall& call = work.call;
  Tensor out = at::empty({call.queries, call.count}, sentences.options().dtype(at::kFloat));
  if (out.numel() == 0) return out;
  float* to = out.mutable_data_ptr<float>();
  const Ranges ranges = ranges_of(call.count);
  for_ranges(ranges, [&](int64_t range) {
    for_tiles(work, ranges.begin(range), ranges.end(range),
              [&](int64_t first, int64_t count, const float* scores) {
                work.scores.transpose(scores, count, call.width, call.queries, to + first,
                                      call.count);
              });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> select_relevant(
    const Tensor& sentences, const std::optional<Tensor>& scales, const Tensor& queries,
    const Tensor& sender, const Tensor& round, const Tensor& hops, const Tensor& now,
    double spatial_decay, double temporal_decay, const std::string& self_policy,
    std::optional<double> threshold, std::optional<int64_t> top_k) {
  TORCH_CHECK(!top_k || *top_k >= 1, "select_relevant: top_k must be at least 1");
  const Work work = prepare(sentences, scales, queries, sender, round, hops, now, spatial_decay,
                            temporal_decay, self_policy);
  const RelevanceCall& call = work.call;
  const int64_t most = top_k.value_or(std::numeric_limits<int64_t>::max());
  const float least = threshold ? static_cast<float>(*threshold) : -kInfinity;
  const Ranges ranges = ranges_of(call.count);
  std::vector<Found> found(ranges.count, Found(work, least, most));
  if (call.queries > 0 && call.count > 0) {
    for_ranges(ranges, [&](int64_t range) {
      found[range].range(ranges.begin(range), ranges.end(range));
    });
  }
  const auto options = sentences.options().dtype(at::kLong);
  Tensor offsets = at::empty({call.queries + 1}, options);
  int64_t* offset = offsets.mutable_data_ptr<int64_t>();
  std::vector<std::vector<Hit>> chosen;
  offset[0] = 0;
  for (int64_t q = 0; q < call.queries; ++q) {
    chosen.push_back(best(found, q, most));
    offset[q + 1] = offset[q] + static_cast<int64_t>(chosen.back().size());
  }
  Tensor indices = at::empty({offset[call.queries]}, options);
  Tensor scores = at::empty({offset[call.queries]}, options.dtype(at::kFloat));
  int64_t* index = indices.mutable_data_ptr<int64_t>();
  float* score = scores.mutable_data_ptr<float>();
  for (const std::vector<Hit>& hits : chosen) {
    for (const Hit& hit : hits) {
      *index++ = hit.index;
      *score++ = hit.score;
    }
  }
  return {offsets, indices, scores};
}

}  // namespace radar
