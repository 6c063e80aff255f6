// Causal attention over a paged KV store, chunk and decode alike.
#pragma once

#include <cstdint>

#include "threads.h"
#include "vec.h"

namespace isthmus {

// Mirrors `AttentionParts` of binding.py, field by field.
struct AttentionParts {
  const int32_t* query_start;  // [S + 1]
  const int32_t* seq_lens;     // [S]
  const int32_t* block_table;  // [S, M]
  int64_t num_sequences, max_blocks;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;        // elements from a block of the store to the next
  int64_t scale_block_stride;  // the same of the scales, where the store has some
  float scale;
  KvType kv_type;
};

// q [T, H, D] with rows q_stride apart, kv the keys of one layer of block 0, kv_scales their scales
// where the store has some, out [T, H, D]. A query sees `window` keys, itself included.
void run_attention(Team& team, const AttentionParts& parts, const float* q, int64_t q_stride,
                   const void* kv, const float* kv_scales, int64_t window, float* out);

}  // namespace isthmus
