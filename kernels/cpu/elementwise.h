// Norms, rotary embedding with the KV write, activation: everything that touches each element a few
// times. Each works on one row; beside the products they take little.
#pragma once

#include <cstdint>

#include "vec.h"

namespace isthmus {

// Mirrors `RopeParts` of binding.py, field by field.
struct RopeParts {
  const float* cos_sin;  // [P, D]: cosines, then sines
  const int64_t* positions;
  const int64_t* slot_mapping;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;        // elements from a block of the store to the next
  int64_t scale_block_stride;  // the same of the scales, where the store has some
  KvType kv_type;
};

// out = x · weight / rms(x); may be x.
void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out);

// total = x + residual, out = rms_norm(total); total may be x or residual.
void add_rms_norm(const float* x, const float* residual, const float* weight, float eps,
                  int64_t width, float* out, float* total);

// out [F] = silu(gate) · up of gate_up [2F]
void silu_mul(const float* gate_up, int64_t width, float* out);

// Rotates a token's q [H, D] and k [G, D] in place and writes k and v to its slot; kv as the keys
// of one layer of block 0, kv_scales as their scales.
void rope_and_cache(const RopeParts& parts, float* q, float* k, const float* v, int64_t token,
                    void* kv, float* kv_scales);

}  // namespace isthmus
