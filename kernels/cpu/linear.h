// x [T, K] · weightᵀ [K, N], the weight packed as panels of 16 columns: [⌈N/16⌉][K][16] of float32
// or bf16, or int8 as [⌈N/16⌉][⌈K/2⌉][16][2] with a scale for each column.
//
// Rows are interleaved tile by tile first. Few rows: every panel is read once, straight through,
// and meets all tiles, while the next one is fetched; memory's speed decides. Many rows: a piece of
// a panel stays in a near cache while the tiles of a block, which stay in the second, pass by; the
// multipliers' speed decides.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "threads.h"

namespace isthmus {

enum WeightType : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Mirrors the structure of binding.py, field by field.
struct LinearParts {
  const void* panels;
  const float* bias;    // [⌈N/16⌉ · 16]
  const float* scales;  // [⌈N/16⌉ · 16], of int8
  int64_t depth, width;
  int32_t weight_type;
};

inline int64_t num_panels(const LinearParts& parts) { return (parts.width + kPanel - 1) / kPanel; }

// Floats that the rows of one product take when they are interleaved.
inline int64_t packed_size(int64_t num_rows, int64_t depth) { return num_rows * (depth + 2); }

// Rows of x as a product reads them, which is done before by pack_rows(): tile by tile, by whoever
// has made those rows. `packed` has room for packed_size() floats.
struct PackedRows {
  const LinearParts& parts;
  Tiles tiles;
  float* packed;
};

void pack_rows(const PackedRows& rows, int64_t tile, const float* x);
void pack_rows_int8(const PackedRows& rows, int64_t tile, const float* x);

// out [T, N]
void run_linear(Team& team, const PackedRows& rows, float* out);
void run_linear_int8(Team& team, const PackedRows& rows, float* out);

constexpr int64_t kFewRows = 24;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kAheadBytes = 4096;  // of a single tile, which reads as memory delivers
constexpr int64_t kGroupPanels = 4;

// Calls multiply(panel, piece, first_tile, last_tile) so that all tiles meet all pieces of all
// panels, the pieces of a panel in order. Of many rows a member takes a block with some panels at a
// time: few enough that the members end together, and what a neighbour takes finds its block near.
template <typename Multiply>
void meet_panels(Team& team, const Tiles& tiles, int64_t pieces, int64_t panels,
                 const Multiply& multiply) {
  if (tiles.rows <= kFewRows) {
    team.loop_in_shares(panels, [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; panel++)
        for (int64_t piece = 0; piece < pieces; piece++) multiply(panel, piece, 0, tiles.count());
    });
    return;
  }
  int64_t blocks = (tiles.rows + kBlockRows - 1) / kBlockRows;
  int64_t groups = (panels + kGroupPanels - 1) / kGroupPanels;
  team.loop(blocks * groups, [&](int64_t i) {
    int64_t block = i / groups, group = i % groups;
    for (int64_t piece = 0; piece < pieces; piece++)
      for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++)
        multiply(panel, piece, tiles.count() * block / blocks,
                 tiles.count() * (block + 1) / blocks);
  });
}

// What tile `i` of `count` fetches while it meets `bytes` of weights: its share of what comes after
// them, or, where memory's speed decides, what it needs itself a little later.
inline Prefetch prefetch_for(const void* weights, int64_t bytes_to_next, int64_t bytes, int64_t i,
                             int64_t count) {
  if (count == 1) return {(const char*)weights + kAheadBytes, 64};
  return {(const char*)weights + bytes_to_next + bytes * i / count, 64 / count};
}

// Outputs of a tile and a panel: calls work(init, out), both 16 columns wide. They begin as the
// bias, or go on where an earlier piece ended. The last panel when N is no multiple of 16 takes a
// detour, since its outputs end before it does.
template <int kRows, typename Work>
inline void with_outputs(const LinearParts& parts, float* out, int64_t first_row, int64_t panel,
                         bool is_first_piece, const Work& work) {
  int64_t column = panel * kPanel, used = std::min<int64_t>(kPanel, parts.width - column);
  Rows<float> target = {out + first_row * parts.width + column, parts.width};
  float detour[kRows * kPanel];
  Rows<float> whole = used == kPanel ? target : Rows<float>{detour, kPanel};
  if (used < kPanel && !is_first_piece)
    for (int r = 0; r < kRows; r++) std::copy_n(target.row(r), used, whole.row(r));
  Rows<const float> init = {whole.data, whole.stride};
  if (is_first_piece) init = {parts.bias + column, 0};
  work(init, whole);
  if (used < kPanel)
    for (int r = 0; r < kRows; r++) std::copy_n(whole.row(r), used, target.row(r));
}

}  // namespace isthmus
