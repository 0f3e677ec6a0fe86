// Attention of many query tokens, tile by tile over matrix products.
#pragma once

#include "kernels.h"

namespace radar {

void prefill_attention(const AttentionCall& call, Type type);

}  // namespace radar
