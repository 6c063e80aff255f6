// Online softmax: scores of a tile of keys become weights relative to the highest score seen so
// far, and what was summed before is brought to the same scale.
//
// The weights of a tile are summed in kLanes sums, weight i to sum i modulo kLanes, which then meet
// as a tree. Both layouts keep to that order, so that a row has the same bits in either.
#pragma once

#include "vec.h"

namespace isthmus {

constexpr float kNothingSeen = -1e30f;  // finite, so that −∞ − kNothingSeen is no NaN

// One row: scores [width], outputs [output_width], both multiples of kLanes.
inline void softmax_row(float* scores, int64_t width, float& highest, float& total, float* output,
                        int64_t output_width) {
  Floats best = load(scores);
  for (int64_t i = kLanes; i < width; i += kLanes) best = max(best, load(scores + i));
  float tile_highest = max(best);
  if (tile_highest > highest) {
    Floats factor = exp(splat(highest - tile_highest));
    total *= factor[0];
    for (int64_t i = 0; i < output_width; i += kLanes)
      store(output + i, load(output + i) * factor);
    highest = tile_highest;
  }
  Floats sums = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats weights = exp(load(scores + i) - highest);
    sums += weights;
    store(scores + i, weights);
  }
  total += sum(sums);
}

// kLanes rows side by side: scores [count][16], outputs [output_width][16]. Weights are multiplied
// by `scales` [count] after they were summed, unless it is null.
inline void softmax_lanes(float* scores, int64_t count, const float* scales, float* highest,
                          float* total, float* outputs, int64_t output_width) {
  Floats before = load(highest), best = before;
  for (int64_t i = 0; i < count; i++) best = max(best, load(scores + i * kPanel));
  Floats summed = load(total);
  if (is_any(best > before)) {
    Floats factor = exp(before - best);  // exactly 1 where nothing changed
    summed *= factor;
    keep_in_register(summed);  // as one row: rounded before the tile's own sum comes in
    for (int64_t i = 0; i < output_width; i++)
      store(outputs + i * kPanel, load(outputs + i * kPanel) * factor);
    store(highest, best);
  }
  Floats sums[kLanes] = {};
  auto weigh = [&](int64_t i, int lane) ISTHMUS_INLINE {
    Floats weights = exp(load(scores + i * kPanel) - best);
    sums[lane] += weights;
    store(scores + i * kPanel, scales == nullptr ? weights : weights * scales[i]);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    repeat<kLanes>([&](auto lane) ISTHMUS_INLINE { weigh(i + lane, lane); });
  for (int lane = 0; i + lane < count; lane++) weigh(i + lane, lane);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
  store(total, summed + sums[0]);
}

// The same for the sixteen rows of a panel.
inline void softmax_panel(float* scores, int64_t count, const float* scales, float* highest,
                          float* total, float* outputs, int64_t output_width) {
  for (int lane = 0; lane < kPanel; lane += kLanes)
    softmax_lanes(scores + lane, count, scales, highest + lane, total + lane, outputs + lane,
                  output_width);
}

}  // namespace isthmus
