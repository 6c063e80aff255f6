#include "linear.h"

#include <vector>

namespace isthmus {
namespace {

constexpr int64_t kPieceBytes = 36 * 1024;  // shorter pieces write and read outputs more often

// Rows of a tile as [depth][height]; tile i lies at first(i) · depth.
void interleave(const Tiles& tiles, int64_t tile, const float* x, int64_t depth, float* packed) {
  int64_t first = tiles.first(tile);
  with_height(tiles.height(tile), [&](auto height) {
    const float* from = x + first * depth;
    float* to = packed + first * depth;
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

  void run(int64_t first_panel, int64_t last_panel) const {
    int64_t longest = kPieceBytes / (kPanel * sizeof(W)), depth = parts.depth;
    int64_t pieces = tiles.rows <= kFewRows ? 1 : (depth + longest - 1) / longest;
    meet_panels(tiles, pieces, first_panel, last_panel,
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

template <typename W>
void run_linear_of(Team& team, const LinearParts& parts, const float* x, int64_t num_rows,
                   float* packed, float* out) {
  Tiles tiles = {num_rows};
  team.loop(tiles.count(), [&](int64_t i) { interleave(tiles, i, x, parts.depth, packed); });
  Linear<W> linear = {parts, packed, tiles, out};
  team.loop_in_shares((parts.width + kPanel - 1) / kPanel, kSharesPerThread,
                      [&](int64_t first, int64_t last) { linear.run(first, last); });
}

}  // namespace

void run_linear(Team& team, const LinearParts& parts, const float* x, int64_t num_rows,
                float* packed, float* out) {
  switch (parts.weight_type) {
    case kFloat32: return run_linear_of<float>(team, parts, x, num_rows, packed, out);
    case kBfloat16: return run_linear_of<bf16>(team, parts, x, num_rows, packed, out);
    case kInt8: return run_linear_int8(team, parts, x, num_rows, packed, out);
  }
}

}  // namespace isthmus

extern "C" void isthmus_linear(const isthmus::LinearParts* parts, const float* x, int64_t num_rows,
                               float* out, int num_threads) {
  static thread_local std::vector<float> packed;
  packed.resize(isthmus::packed_size(num_rows, parts->depth));
  isthmus::run_team(num_threads, [parts, x, num_rows, out, to = packed.data()](isthmus::Team& team) {
    isthmus::run_linear(team, *parts, x, num_rows, to, out);
  });
}
