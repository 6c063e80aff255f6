// The one inner product loop of linears and attention.
//
// A panel is 16 columns of a matrix, stored [depth][16]. `tile` multiplies a few rows by one panel
// and keeps every result in registers. Each result is one chain of fused multiply-adds over
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

// As many rows as leave their accumulators in registers.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// Rows are cut into tiles of nearly equal height: 7 rows go as 4 + 3, not 6 + 1.
struct Tiles {
  int64_t rows;

  int64_t count() const { return (rows + kTileRows - 1) / kTileRows; }
  int64_t first(int64_t tile) const { return rows * tile / count(); }
  int height(int64_t tile) const { return int(first(tile + 1) - first(tile)); }
};

// Calls work(std::integral_constant<int, h>) for the height h of a tile, 1 … kRows.
template <int kRows = kTileRows, typename Work>
inline void with_height(int height, const Work& work) {
  if (height == kRows) {
    work(std::integral_constant<int, kRows>{});
  } else if constexpr (kRows > 1) {
    with_height<kRows - 1>(height, work);
  }
}

// The left side of a product: rows side by side, or those of a tile interleaved as [depth][kRows],
// which is one stream to read instead of kRows.
struct Apart {
  const float* data;
  int64_t stride;

  float at(int row, int64_t k) const { return data[row * stride + k]; }
};

template <int kRows>
struct Interleaved {
  const float* data;

  float at(int row, int64_t k) const { return data[k * kRows + row]; }
};

// Asks for what will be read later, a little at every step: a burst would fill the queue of
// outstanding reads and stall.
struct Prefetch {
  const char* next;
  int64_t stride;

  void step() {
    __builtin_prefetch(next);
    next += stride;
  }
};

struct NoPrefetch {
  void step() {}
};

// out[r][·] = init[r][·] + Σ_k a[r][k] · panel[k][·]
//
// A function by itself: within another's loops GCC may leave the sums in memory, which has made
// attention three times slower.
template <int kRows, typename Left, typename W, typename Ahead>
ISTHMUS_APART void tile(Left a, const W* panel, int64_t depth, Rows<const float> init, Rows<float> out,
                 Ahead ahead) {
  constexpr int64_t kStep = kPanel * sizeof(W) < 64 ? 64 / (kPanel * sizeof(W)) : 1;
  Floats acc[kRows][kParts];
  repeat<kRows>([&](auto r) ISTHMUS_INLINE { load_parts(init.row(r), acc[r]); });
  auto multiply = [&](int64_t k) ISTHMUS_INLINE {
    Floats w[kParts];
    load_panel_row(panel + k * kPanel, w);
    repeat<kRows>([&](auto r) ISTHMUS_INLINE {
      repeat<kParts>([&](auto part) ISTHMUS_INLINE {
        acc[r][part] += a.at(r, k) * w[part];
        keep_in_register(acc[r][part]);
      });
    });
  };
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep) {
    ahead.step();
    for (int64_t i = 0; i < kStep; i++) multiply(k + i);
  }
  for (; k < depth; k++) multiply(k);
  repeat<kRows>([&](auto r) ISTHMUS_INLINE {
    repeat<kParts>([&](auto part) ISTHMUS_INLINE {
      store(out.row(r) + part * kLanes, acc[r][part]);
    });
  });
}

}  // namespace isthmus
