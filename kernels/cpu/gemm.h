// The one inner product loop of linears and attention.
//
// A panel is 16 columns of a matrix, stored [depth][16]. `tile` multiplies a few rows by a panel
// and keeps every result in registers. Each result is one chain of fused multiply-adds over
// ascending k, whatever the number of rows beside it and wherever k is cut into pieces: a row's
// result is the same bits in any batch and any chunk.
#pragma once

#include "vec.h"

namespace isthmus {

template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  T* row(int64_t index) const { return data + index * stride; }
  Rows from(int64_t first) const { return {row(first), stride}; }
};

constexpr int kMaxTileRows = kLanes == 16 ? 12 : 6;  // as many accumulators as the registers hold

// out[r][·] = init[r][·] + Σ_k a[r][k] · panel[k][·], reading panel kPrefetch elements ahead.
template <int kRows, int kPrefetch, typename W>
inline void tile(Rows<const float> a, const W* panel, int64_t depth, Rows<const float> init,
                 Rows<float> out) {
  Floats acc[kRows][kParts];
  for (int r = 0; r < kRows; r++)
    for (int part = 0; part < kParts; part++) acc[r][part] = load(init.row(r) + part * kLanes);
  for (int64_t k = 0; k < depth; k++) {
    if constexpr (kPrefetch > 0) __builtin_prefetch(panel + k * kPanel + kPrefetch);
    Floats w[kParts];
    load_panel_row(panel + k * kPanel, w);
    for (int r = 0; r < kRows; r++)
      for (int part = 0; part < kParts; part++) acc[r][part] += a.row(r)[k] * w[part];
  }
  for (int r = 0; r < kRows; r++)
    for (int part = 0; part < kParts; part++) store(out.row(r) + part * kLanes, acc[r][part]);
}

// The tile of `rows` rows, chosen among those compiled for 1 … kRows.
template <int kRows, int kPrefetch, typename W>
inline void tile_of(int rows, Rows<const float> a, const W* panel, int64_t depth,
                    Rows<const float> init, Rows<float> out) {
  if (rows == kRows) {
    tile<kRows, kPrefetch>(a, panel, depth, init, out);
  } else if constexpr (kRows > 1) {
    tile_of<kRows - 1, kPrefetch>(rows, a, panel, depth, init, out);
  }
}

// Any number of rows, in tiles of nearly equal height: 7 rows go as 4 + 3, not 6 + 1.
template <int kPrefetch, typename W>
void multiply_panel(int64_t rows, Rows<const float> a, const W* panel, int64_t depth,
                    Rows<const float> init, Rows<float> out) {
  int64_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (int64_t i = 0; i < tiles; i++) {
    int64_t first = rows * i / tiles;
    int height = int(rows * (i + 1) / tiles - first);
    tile_of<kMaxTileRows, kPrefetch>(height, a.from(first), panel, depth, init.from(first),
                                     out.from(first));
  }
}

}  // namespace isthmus
