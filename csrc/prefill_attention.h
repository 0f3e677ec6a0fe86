// Attention of many query tokens, tile by tile over matrix products.
#pragma once

#include "kernels.h"

namespace radar {

// Why this build or CPU cannot run it; null if it can.
const char* prefill_absent();

void prefill_attention(const AttentionCall& call, Type type);

}  // namespace radar
