// The one inner product loop of linears and attention.
//
// A panel is 16 columns of a matrix, stored [depth][16]. `tile` multiplies a few rows by one panel
// or two and keeps every result in registers. Each result is one chain of fused multiply-adds over
// ascending k, whatever the rows and panels beside it and wherever k is cut into pieces: a row's
// result is the same bits in any batch and any chunk.
#pragma once

#include "vec.h"

namespace isthmus {

template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  T* row(int64_t index) const { return data + index * stride; }
  Rows from(int64_t first, int64_t column) const { return {row(first) + column, stride}; }
};

template <typename W>
struct Panels {
  const W* data;
  int64_t stride;  // elements from a panel to the next

  const W* panel(int64_t index) const { return data + index * stride; }
};

// As many rows as leave their accumulators in registers. With few rows a multiply-add would wait
// for the one before it, so those take two panels at a time.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;
constexpr int kPairRows = kTileRows / 2;

// out[r][·] = init[r][·] + Σ_k a[r][k] · b[k][·], reading the panels kPrefetch elements ahead.
template <int kRows, int kPanels, int kPrefetch, typename W>
inline void tile(Rows<const float> a, Panels<W> b, int64_t depth, Rows<const float> init,
                 Rows<float> out) {
  Floats acc[kRows][kPanels][kParts];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) load_parts(init.row(r) + p * kPanel, acc[r][p]);
  for (int64_t k = 0; k < depth; k++) {
    Floats w[kPanels][kParts];
    for (int p = 0; p < kPanels; p++) {
      const W* from = b.panel(p) + k * kPanel;
      if constexpr (kPrefetch > 0) __builtin_prefetch(from + kPrefetch);
      load_panel_row(from, w[p]);
    }
    for (int r = 0; r < kRows; r++)
      for (int p = 0; p < kPanels; p++)
        for (int part = 0; part < kParts; part++) acc[r][p][part] += a.row(r)[k] * w[p][part];
  }
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++)
      for (int part = 0; part < kParts; part++)
        store(out.row(r) + p * kPanel + part * kLanes, acc[r][p][part]);
}

// The tile of `rows` rows, chosen among those compiled for 1 … kRows.
template <int kRows, int kPanels, int kPrefetch, typename W>
inline void tile_of(int rows, Rows<const float> a, Panels<W> b, int64_t depth,
                    Rows<const float> init, Rows<float> out) {
  if (rows == kRows) {
    tile<kRows, kPanels, kPrefetch>(a, b, depth, init, out);
  } else if constexpr (kRows > 1) {
    tile_of<kRows - 1, kPanels, kPrefetch>(rows, a, b, depth, init, out);
  }
}

// All rows by one panel, in tiles of nearly equal height: 7 rows go as 4 + 3, not 6 + 1.
template <int kPrefetch, typename W>
inline void multiply_panel(int64_t rows, Rows<const float> a, Panels<W> b, int64_t depth,
                           Rows<const float> init, Rows<float> out) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; i++) {
    int64_t first = rows * i / tiles;
    int height = int(rows * (i + 1) / tiles - first);
    tile_of<kTileRows, 1, kPrefetch>(height, a.from(first, 0), b, depth, init.from(first, 0),
                                     out.from(first, 0));
  }
}

// out [rows][16 · num_panels] = init + a [rows][depth] · b
template <int kPrefetch, typename W>
void multiply(int64_t rows, Rows<const float> a, Panels<W> b, int64_t num_panels, int64_t depth,
              Rows<const float> init, Rows<float> out) {
  for (int64_t p = 0; p < num_panels; p++) {
    Panels<W> here = {b.panel(p), b.stride};
    Rows<const float> init_here = init.from(0, p * kPanel);
    Rows<float> out_here = out.from(0, p * kPanel);
    if (rows <= kPairRows && p + 1 < num_panels) {
      tile_of<kPairRows, 2, kPrefetch>(int(rows), a, here, depth, init_here, out_here);
      p++;
    } else {
      multiply_panel<kPrefetch>(rows, a, here, depth, init_here, out_here);
    }
  }
}

}  // namespace isthmus
