// Attention of at most kMostDecodeQueries query tokens, one pass over the keys.
#pragma once

#include "kernels.h"

namespace radar {

constexpr int64_t kMostDecodeQueries = 8;

void decode_attention(const AttentionCall& call, Type type);

}  // namespace radar
