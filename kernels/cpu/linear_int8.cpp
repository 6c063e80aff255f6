// Products with int8 weights, exact in integers: each row of x is scaled to 14-bit integers, a sum
// of up to 2,048 products fits in 32 bits, and only then the scales of row and column come in.
// Sums of integers have no order, so a row is the same bits in any batch and on any processor.
//
// Neighbours in k stand side by side, as the instructions that multiply 16-bit integers and add
// pairs of products want them.

#include <cmath>
#include <vector>

#include "linear.h"
#include "vec_int16.h"

namespace isthmus {
namespace {

constexpr int64_t kPiece = 2048;   // 2,048 · 127 · 8,191 < 2^31
constexpr float kMostX = 8191.0f;  // what the largest element of a row becomes

// Scales of the rows, then the rows of each tile as [pairs][height][2]; tile i lies at
// first(i) · 2 · pairs.
struct IntRows {
  float* scales;
  int16_t* data;

  IntRows(float* packed, int64_t num_rows) : scales(packed), data((int16_t*)(packed + num_rows)) {}
};

// Returns the scale of the row: x ≈ q · scale. NaN, which all its outputs become, for a row that
// has a NaN or an infinity.
float quantise_row(const float* x, int64_t depth, int16_t* q) {
  Floats best = {}, not_finite = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    Floats value = load(x + k);
    best = max(best, max(value, -value));
    not_finite += value * 0.0f;
  }
  float most = max(best), poison = sum(not_finite);
  for (int64_t i = k; i < depth; i++) {
    most = std::max(most, std::fabs(x[i]));
    poison += x[i] * 0.0f;
  }
  bool is_usable = poison == 0.0f && most > 1e-30f;
  float inverse = is_usable ? kMostX / most : 0.0f;
  for (int64_t i = 0; i < depth; i++)
    q[i] = is_usable ? int16_t(std::nearbyintf(x[i] * inverse)) : 0;
  return most / kMostX + poison;
}


// The scales of a tile's rows and of a panel's columns.
struct Scales {
  const float* rows;
  const float* columns;
};

// out[r][·] = init[r][·] + scales · Σ_p rows[p][r] · panel[p][·], of `pairs` pairs
template <int kRows>
inline void tile_int8(const int16_t* rows, const int8_t* panel, int64_t pairs, Scales scales,
                      Rows<const float> init, Rows<float> out, Prefetch ahead) {
  Ints sums[kRows][kParts];
  repeat<kRows>([&](auto r) ISTHMUS_INLINE {
    repeat<kParts>([&](auto part) ISTHMUS_INLINE { sums[r][part] = Ints{}; });
  });
  auto multiply = [&](int64_t p) ISTHMUS_INLINE {
    Shorts weights[kParts];
    repeat<kParts>([&](auto part) ISTHMUS_INLINE {
      weights[part] = widen_bytes(panel + p * 2 * kPanel + part * 2 * kLanes);
    });
    repeat<kRows>([&](auto r) ISTHMUS_INLINE {
      Shorts x = splat_pair(rows + (p * kRows + r) * 2);
      repeat<kParts>([&](auto part) ISTHMUS_INLINE {
        sums[r][part] = add_products_of_pairs(sums[r][part], x, weights[part]);
      });
    });
  };
  int64_t p = 0;
  for (; p + 2 <= pairs; p += 2) {
    ahead.step();
    multiply(p);
    multiply(p + 1);
  }
  if (p < pairs) multiply(p);
  repeat<kRows>([&](auto r) ISTHMUS_INLINE {
    repeat<kParts>([&](auto part) ISTHMUS_INLINE {
      Floats factor = load(scales.columns + part * kLanes) * scales.rows[r];
      Floats sum = __builtin_convertvector(sums[r][part], Floats);
      store(out.row(r) + part * kLanes, load(init.row(r) + part * kLanes) + sum * factor);
    });
  });
}

struct LinearInt8 {
  const LinearParts& parts;
  IntRows rows;
  Tiles tiles;
  float* out;  // [T, N]

  int64_t pairs() const { return (parts.depth + 1) / 2; }

  void run(Team& team) const {
    int64_t pieces = (parts.depth + kPiece - 1) / kPiece;
    meet_panels(team, tiles, pieces, num_panels(parts),
                [&](int64_t panel, int64_t piece, int64_t first_tile, int64_t last_tile) {
                  multiply(panel, pairs() * piece / pieces, pairs() * (piece + 1) / pieces,
                           first_tile, last_tile);
                });
  }

 private:
  // Adds the products of pairs p0 … p1 − 1 to the outputs of some tiles.
  void multiply(int64_t panel, int64_t p0, int64_t p1, int64_t first_tile,
                int64_t last_tile) const {
    constexpr int64_t kPairBytes = 2 * kPanel;
    const int8_t* weights = (const int8_t*)parts.panels + (panel * pairs() + p0) * kPairBytes;
    int64_t count = last_tile - first_tile;
    for (int64_t i = 0; i < count; i++) {
      Prefetch ahead =
          prefetch_for(weights, pairs() * kPairBytes, (p1 - p0) * kPairBytes, i, count);
      int64_t row = tiles.first(first_tile + i);
      with_height(tiles.height(first_tile + i), [&](auto height) {
        const int16_t* piece = rows.data + (row * pairs() + p0 * height) * 2;
        Scales scales = {rows.scales + row, parts.scales + panel * kPanel};
        with_outputs<height>(parts, out, row, panel, p0 == 0, [&](auto init, auto outputs) {
          tile_int8<height>(piece, weights, p1 - p0, scales, init, outputs, ahead);
        });
      });
    }
  }
};

}  // namespace

void pack_rows_int8(const PackedRows& rows, int64_t tile, const float* x) {
  static thread_local std::vector<int32_t> buffer;
  int64_t first = rows.tiles.first(tile), depth = rows.parts.depth, pairs = (depth + 1) / 2;
  buffer.resize(pairs);
  IntRows integers(rows.packed, rows.tiles.rows);
  int32_t* to = (int32_t*)integers.data + first * pairs;
  int height = rows.tiles.height(tile);
  for (int r = 0; r < height; r++) {
    buffer[pairs - 1] = 0;
    integers.scales[first + r] =
        quantise_row(x + (first + r) * depth, depth, (int16_t*)buffer.data());
    for (int64_t p = 0; p < pairs; p++) to[p * height + r] = buffer[p];
  }
}

void run_linear_int8(Team& team, const PackedRows& rows, float* out) {
  LinearInt8{rows.parts, IntRows(rows.packed, rows.tiles.rows), rows.tiles, out}.run(team);
}

}  // namespace isthmus
