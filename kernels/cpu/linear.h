// x [T, K] · weightᵀ [K, N], the weight packed as panels [⌈N/16⌉][K][16] of float32 or bf16.
//
// Rows are interleaved tile by tile first. Few rows: every panel is read once, straight through,
// and meets all tiles, while the next one is fetched; memory's speed decides. Many rows: a piece of
// a panel stays in a near cache while the tiles of a block, which stay in the second, pass by; the
// multipliers' speed decides. bf16 is widened in registers either way.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "threads.h"

namespace isthmus {

// Mirrors `LinearParts` of library.py, field by field.
struct LinearParts {
  const void* panels;
  const float* bias;  // [⌈N/16⌉ · 16]
  int64_t depth, width;
  int32_t is_bf16;
};

// `packed` has room for the rows of x.
void run_linear(Team& team, const LinearParts& parts, const float* x, int64_t num_rows,
                float* packed, float* out);

}  // namespace isthmus
