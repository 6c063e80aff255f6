#include "linear.h"

#include <vector>

namespace isthmus {
namespace {

constexpr int64_t kFewRows = 24;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kPanelPieceBytes = 36 * 1024;  // shorter pieces write and read outputs more often
constexpr int64_t kAheadBytes = 4096;            // of a single tile, which reads as memory delivers
constexpr int64_t kSharesPerThread = 8;

// Rows of `tiles` interleaved one after the other: tile i is at first(i) · depth, as [depth][height].
void interleave(const Tiles& tiles, int64_t tile, const float* x, int64_t depth, float* packed) {
  int64_t first = tiles.first(tile);
  with_height(tiles.height(tile), [&](auto height) {
    const float* from = x + first * depth;
    float* to = packed + first * depth;
    for (int64_t k = 0; k < depth; k++)
      for (int r = 0; r < height; r++) to[k * height + r] = from[r * depth + k];
  });
}

template <typename W>
struct Linear {
  const float* packed;  // rows of x, interleaved
  const W* panels;      // [⌈N/16⌉, K, 16], zero beyond N
  const float* bias;    // [⌈N/16⌉ · 16]
  float* out;           // [T, N]
  Tiles tiles;
  int64_t depth, width;

  void run(int64_t first_panel, int64_t last_panel) const {
    if (tiles.rows <= kFewRows) {
      for (int64_t panel = first_panel; panel < last_panel; panel++)
        multiply(panel, 0, depth, 0, tiles.count());
      return;
    }
    int64_t longest = kPanelPieceBytes / (kPanel * sizeof(W));
    int64_t pieces = (depth + longest - 1) / longest;
    int64_t blocks = (tiles.rows + kBlockRows - 1) / kBlockRows;
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t piece = 0; piece < pieces; piece++)
        for (int64_t panel = first_panel; panel < last_panel; panel++)
          multiply(panel, depth * piece / pieces, depth * (piece + 1) / pieces,
                   tiles.count() * block / blocks, tiles.count() * (block + 1) / blocks);
  }

 private:
  // Adds the products over k in [k0, k1) to the outputs of some tiles, which begin as the bias.
  void multiply(int64_t panel, int64_t k0, int64_t k1, int64_t first_tile,
                int64_t last_tile) const {
    const W* weights = panels + (panel * depth + k0) * kPanel;
    const char* next = (const char*)(weights + depth * kPanel);
    int64_t count = last_tile - first_tile, bytes = (k1 - k0) * kPanel * sizeof(W);
    for (int64_t i = 0; i < count; i++) {
      Prefetch ahead = {next + bytes * i / count, 64 / count};
      if (count == 1) ahead = {(const char*)weights + kAheadBytes, 64};
      multiply_tile(first_tile + i, weights, panel, k0, k1, ahead);
    }
  }

  void multiply_tile(int64_t tile_index, const W* weights, int64_t panel, int64_t k0, int64_t k1,
                     Prefetch ahead) const {
    int64_t first = tiles.first(tile_index), column = panel * kPanel;
    Rows<float> target = {out + first * width + column, width};
    // The last panel when N is no multiple of 16 takes a detour: its outputs end before it does.
    float detour[kTileRows * kPanel];
    int64_t used = std::min<int64_t>(kPanel, width - column);
    with_height(tiles.height(tile_index), [&](auto height) {
      Interleaved<height> rows = {packed + first * depth + k0 * height};
      Rows<float> whole = used == kPanel ? target : Rows<float>{detour, kPanel};
      if (used < kPanel && k0 > 0)
        for (int r = 0; r < height; r++) std::copy_n(target.row(r), used, whole.row(r));
      Rows<const float> init = {whole.data, whole.stride};
      if (k0 == 0) init = {bias + column, 0};
      tile<height>(rows, weights, k1 - k0, init, whole, ahead);
      if (used < kPanel)
        for (int r = 0; r < height; r++) std::copy_n(whole.row(r), used, target.row(r));
    });
  }
};

}  // namespace

void run_linear(Team& team, const LinearParts& parts, const float* x, int64_t num_rows,
                float* packed, float* out) {
  Tiles tiles = {num_rows};
  team.loop(tiles.count(),
            [&](int64_t tile) { interleave(tiles, tile, x, parts.depth, packed); });
  auto multiply = [&](const auto* panels) {
    Linear<std::decay_t<decltype(*panels)>> linear = {packed, panels,      parts.bias, out,
                                                      tiles,  parts.depth, parts.width};
    team.loop_in_shares((parts.width + kPanel - 1) / kPanel, kSharesPerThread,
                        [&](int64_t first, int64_t last) { linear.run(first, last); });
  };
  parts.is_bf16 ? multiply((const bf16*)parts.panels) : multiply((const float*)parts.panels);
}

}  // namespace isthmus

extern "C" void isthmus_linear(const isthmus::LinearParts* parts, const float* x, int64_t num_rows,
                               float* out, int num_threads) {
  static thread_local std::vector<float> packed;
  packed.resize(num_rows * parts->depth);
  isthmus::run_team(num_threads, [parts, x, num_rows, out, to = packed.data()](isthmus::Team& team) {
    isthmus::run_linear(team, *parts, x, num_rows, to, out);
  });
}
