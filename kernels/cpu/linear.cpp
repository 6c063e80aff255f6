#include "linear.h"

#include <vector>

namespace isthmus {
namespace {

constexpr int64_t kPieceBytes = 36 * 1024;  // shorter pieces write and read outputs more often

// Rows of a tile as [depth][height]; tile i lies at first(i) · depth.
void interleave(const PackedRows& rows, int64_t tile, const float* x) {
  int64_t first = rows.tiles.first(tile), depth = rows.parts.depth;
  with_height(rows.tiles.height(tile), [&](auto height) {
    const float* from = x + first * depth;
    float* to = rows.packed + first * depth;
    for (int64_t k = 0; k < depth; k++)
      for (int r = 0; r < height; r++) to[k * height + r] = from[r * depth + k];
  });
}

// Weights of float32 or bf16, which is widened in registers.
template <typename W>
struct Linear {
  const LinearParts& parts;
  const float* packed;  // rows of x, interleaved
  Tiles tiles;
  float* out;  // [T, N]

  void run(Team& team) const {
    int64_t longest = kPieceBytes / (kPanel * sizeof(W)), depth = parts.depth;
    int64_t pieces = tiles.rows <= kFewRows ? 1 : (depth + longest - 1) / longest;
    meet_panels(team, tiles, pieces, num_panels(parts),
                [&](int64_t panel, int64_t piece, int64_t first_tile, int64_t last_tile) {
                  multiply(panel, depth * piece / pieces, depth * (piece + 1) / pieces, first_tile,
                           last_tile);
                });
  }

 private:
  // Adds the products over k in [k0, k1) to the outputs of some tiles.
  void multiply(int64_t panel, int64_t k0, int64_t k1, int64_t first_tile,
                int64_t last_tile) const {
    const W* weights = (const W*)parts.panels + (panel * parts.depth + k0) * kPanel;
    int64_t row_bytes = kPanel * sizeof(W), count = last_tile - first_tile;
    for (int64_t i = 0; i < count; i++) {
      Prefetch ahead =
          prefetch_for(weights, parts.depth * row_bytes, (k1 - k0) * row_bytes, i, count);
      int64_t row = tiles.first(first_tile + i);
      with_height(tiles.height(first_tile + i), [&](auto height) {
        Interleaved<height> rows = {packed + row * parts.depth + k0 * height};
        with_outputs<height>(parts, out, row, panel, k0 == 0, [&](auto init, auto outputs) {
          tile<height>(rows, weights, k1 - k0, init, outputs, ahead);
        });
      });
    }
  }
};

}  // namespace

void pack_rows(const PackedRows& rows, int64_t tile, const float* x) {
  if (rows.parts.weight_type == kInt8) return pack_rows_int8(rows, tile, x);
  interleave(rows, tile, x);
}

void run_linear(Team& team, const PackedRows& rows, float* out) {
  switch (rows.parts.weight_type) {
    case kFloat32: return Linear<float>{rows.parts, rows.packed, rows.tiles, out}.run(team);
    case kBfloat16: return Linear<bf16>{rows.parts, rows.packed, rows.tiles, out}.run(team);
    case kInt8: return run_linear_int8(team, rows, out);
  }
}

}  // namespace isthmus

extern "C" void isthmus_linear(const isthmus::LinearParts* parts, const float* x, int64_t num_rows,
                               float* out, int num_threads) {
  static thread_local std::vector<float> packed;
  packed.resize(isthmus::packed_size(num_rows, parts->depth));
  isthmus::PackedRows rows = {*parts, {num_rows}, packed.data()};
  isthmus::run_team(num_threads, [&rows, x, out](isthmus::Team& team) {
    team.loop(rows.tiles.count(), [&](int64_t i) { isthmus::pack_rows(rows, i, x); });
    isthmus::run_linear(team, rows, out);
  });
}
