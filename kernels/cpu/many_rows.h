// Attention of many rows. Sixteen rows stand side by side as a panel, each in a lane of its own;
// keys and values are broadcast to them as they lie, but for being widened. So scores come out as
// the panel [keys][16] that the sum over values wants, and the softmax never looks across lanes.
//
// Every sum has the order it has with few rows (softmax.h, few_rows.h), so results are the same
// bits.
#pragma once

#include <algorithm>
#include <vector>

#include "kv_int8.h"
#include "panels.h"
#include "softmax.h"

namespace isthmus {

// Keys and values [count][D] of neighbours in a sequence, the first at position `start`. Of int8
// keys there are either floats or 16-bit integers, and scales [count] of both; else no scales.
struct WideTile {
  int64_t start, count;
  const float* keys;
  const int16_t* short_keys;
  const float* values;
  const float* key_scales;
  const float* value_scales;
};

// Rows of a piece: row r is of the query at position + r / group, and sees `window` keys up to it.
struct RowShape {
  int64_t count, group, head_dim, position, window;

  int64_t num_panels() const { return (count + kPanel - 1) / kPanel; }
  int64_t padded() const { return num_panels() * kPanel; }
  // Behind the last row it goes on as another of the last.
  int64_t position_of(int64_t row) const { return position + std::min(row, count - 1) / group; }
};

inline constexpr float kZeros[kPanel] = {};

// The left side of a product whose rows are columns of a matrix [depth][stride].
struct Columns {
  const float* data;
  int64_t stride;

  float at(int row, int64_t k) const { return data[k * stride + row]; }
};

// Buffers that are used again from piece to piece, and the state of the softmax in between tiles.
class ManyRows {
 public:
  // Queries [padded rows][D] of which those behind the last are zeros; or short_queries with a
  // scale for each row, for tiles of short keys.
  void begin(const RowShape& shape, const float* queries, const int16_t* short_queries,
             const float* query_scales, int64_t tile_keys) {
    shape_ = shape;
    int64_t dim = shape.head_dim, rows = shape.padded();
    int64_t width = short_queries == nullptr ? dim : dim / 2;
    const uint32_t* from = (const uint32_t*)queries;
    if (short_queries != nullptr) from = (const uint32_t*)short_queries;
    query_scales_ = query_scales;
    queries_.resize(rows * width);
    for (int64_t row = 0; row < rows; row += kPanel)
      rows_to_panel(from + row * width, width, queries_.data() + row * width);
    scores_.resize(tile_keys * kPanel);
    outputs_.assign(rows * dim, 0.0f);
    highest_.assign(rows, kNothingSeen);
    total_.assign(rows, 0.0f);
    positions_.resize(rows);
    for (int64_t row = 0; row < rows; row++)
      positions_[row] = int32_t(shape.position_of(row) - shape.position);
  }

  void attend(const WideTile& tile) {
    for (int64_t row = 0; row < shape_.count; row += kPanel) {
      int64_t first = shape_.position_of(row), last = shape_.position_of(row + kPanel - 1);
      int64_t count = std::min(tile.count, last + 1 - tile.start);
      if (count <= 0 || tile.start + count <= first + 1 - shape_.window) continue;
      score(tile, row, count);
      hide_unseen(row, tile.start, count, first, last);
      softmax_panel(scores_.data(), count, tile.value_scales, highest_.data() + row,
                    total_.data() + row, outputs_of(row), shape_.head_dim);
      add_values(tile, row, count);
    }
  }

  // The results as [padded rows][D].
  void end(float* results) {
    for (int64_t row = 0; row < shape_.count; row += kPanel) {
      float* outputs = outputs_of(row);
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        Floats inverse = 1.0f / load(total_.data() + row + lane);
        for (int64_t d = 0; d < shape_.head_dim; d++)
          store(outputs + d * kPanel + lane, load(outputs + d * kPanel + lane) * inverse);
      }
      panel_to_rows((const uint32_t*)outputs, shape_.head_dim,
                    (uint32_t*)results + row * shape_.head_dim);
    }
  }

 private:
  float* outputs_of(int64_t row) { return outputs_.data() + row * shape_.head_dim; }

  // scores [count][16] = keys · queries
  void score(const WideTile& tile, int64_t row, int64_t count) {
    if (tile.short_keys != nullptr) {
      score_shorts(tile, row, count);
    } else {
      const float* queries = (const float*)queries_.data() + row * shape_.head_dim;
      for_tiles(count, [&](auto height, int64_t first) {
        Apart keys = {tile.keys + first * shape_.head_dim, shape_.head_dim};
        isthmus::tile<height>(keys, queries, shape_.head_dim, {kZeros, 0},
                              {scores_.data() + first * kPanel, kPanel}, NoPrefetch{});
      });
    }
    if (tile.key_scales != nullptr) scale_scores(tile.key_scales, count);
  }

  void score_shorts(const WideTile& tile, int64_t row, int64_t count) {
    int64_t dim = shape_.head_dim;
    const int16_t* queries = (const int16_t*)queries_.data() + row * dim;
    for_tiles(count, [&](auto height, int64_t first) {
      score_short_keys<height>(tile.short_keys + first * dim, dim, queries, query_scales_ + row,
                               scores_.data() + first * kPanel);
    });
  }

  void scale_scores(const float* scales, int64_t count) {
    for (int64_t key = 0; key < count; key++)
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        float* scores = scores_.data() + key * kPanel + lane;
        store(scores, load(scores) * scales[key]);
      }
  }

  // outputs [D][16] += valuesᵀ · weights
  void add_values(const WideTile& tile, int64_t row, int64_t count) {
    for_tiles(shape_.head_dim, [&](auto height, int64_t first) {
      Rows<float> outputs = {outputs_of(row) + first * kPanel, kPanel};
      isthmus::tile<height>(Columns{tile.values + first, shape_.head_dim}, scores_.data(), count,
                            {outputs.data, kPanel}, outputs, NoPrefetch{});
    });
  }

  // A row at position p sees the keys from p − window + 1 to p. All rows of a panel see most keys;
  // `first` and `last` are the positions of its first and last row.
  void hide_unseen(int64_t row, int64_t start, int64_t count, int64_t first, int64_t last) {
    for (int64_t key = std::max<int64_t>(0, first + 1 - start); key < count; key++)
      hide(row, key, [&](Ints position) { return position < int32_t(start + key - shape_.position); });
    int64_t behind = std::min(count, last + 1 - shape_.window - start);
    for (int64_t key = 0; key < behind; key++)
      hide(row, key, [&](Ints position) {
        return position >= int32_t(start + key - shape_.position + shape_.window);
      });
  }

  template <typename Condition>
  void hide(int64_t row, int64_t key, const Condition& is_hidden) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      float* scores = scores_.data() + key * kPanel + lane;
      Ints position = load_ints(positions_.data() + row + lane);
      store(scores, is_hidden(position) ? splat(-__builtin_inff()) : load(scores));
    }
  }

  // Calls work(std::integral_constant<int, h>, first) for tiles of h rows that make up `count`.
  template <typename Work>
  static void for_tiles(int64_t count, const Work& work) {
    Tiles tiles = {count};
    for (int64_t i = 0; i < tiles.count(); i++)
      with_height(tiles.height(i), [&](auto height) { work(height, tiles.first(i)); });
  }

  RowShape shape_;
  const float* query_scales_ = nullptr;
  std::vector<uint32_t> queries_;  // panels [D][16] of floats, or [D / 2][16] of pairs of integers
  std::vector<float> scores_, outputs_, highest_, total_;
  std::vector<int32_t> positions_;  // of the rows, counted from the first one's
};

}  // namespace isthmus
