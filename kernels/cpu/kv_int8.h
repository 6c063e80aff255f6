// KV in one byte an element, with a scale for each vector.
//
// Scores are products of integers: a query is rounded to 16 bits, finer by far than the keys are,
// and a sum of products of 16-bit integers is exact, so it has no order. Values are widened and
// weighed with weights that have taken up their scales.
#pragma once

#include <algorithm>
#include <cmath>

#include "few_rows.h"
#include "vec_int16.h"

namespace isthmus {

constexpr float kMostByte = 127.0f;
constexpr float kMostShort = 32767.0f;
constexpr int64_t kMostExact = 512;  // products of a sum: 512 · 127 · 32,767 < 2^31

// Adding it to a float of magnitude below 2^22 rounds to an integer, to nearest even.
constexpr float kRoundToInteger = 12582912.0f;

inline bool has_exact_scores(int64_t head_dim) {
  return head_dim % kFewColumns == 0 && head_dim <= kMostExact;
}

// The largest magnitude; NaN when an element is NaN or infinite.
inline float largest_of(const float* x, int64_t count) {
  Floats best = {}, poison = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats value = load(x + i);
    best = max(best, max(value, -value));
    poison += value * 0.0f;
  }
  float most = max(best), spoilt = sum(poison);
  for (; i < count; i++) {
    most = std::max(most, std::fabs(x[i]));
    spoilt += x[i] * 0.0f;
  }
  return most + spoilt;
}

// Returns the scale by which integers up to `most` are about x. The rule of reference/quant.py, by
// the same operations: every implementation writes the same bits.
template <typename Integer>
inline float quantise(const float* x, int64_t count, float most, Integer* to) {
  float largest = largest_of(x, count);
  float scale = largest / most;
  if (!(largest <= 3.0e38f)) {  // NaN
    std::fill_n(to, count, Integer(0));
    return largest;
  }
  float divisor = scale > 0.0f ? scale : 1.0f;
  for (int64_t i = 0; i < count; i++) {
    float rounded = (x[i] / divisor + kRoundToInteger) - kRoundToInteger;
    rounded = rounded > most ? most : rounded < -most ? -most : rounded;
    to[i] = Integer(int32_t(rounded));
  }
  return scale;
}

// Queries as `score_int8_keys` wants them: of every four elements first the even, then the odd
// ones, as the halves of a word of four bytes come apart.
inline void part_even_and_odd(int16_t* query, int64_t head_dim) {
  for (int64_t d = 0; d + 4 <= head_dim; d += 4) std::swap(query[d + 1], query[d + 2]);
}

// scores[r][0 … 31] = queries[r] · keys, without the keys' scales.
template <int kRows>
void score_int8_keys(const int16_t* queries, const float* query_scales, int64_t head_dim,
                     const uint32_t* words, float* scores, int64_t scores_stride,
                     VectorPrefetch& ahead) {
  constexpr int kVectors = kFewKeys / kLanes;
  Ints acc[kRows][kVectors] = {};
  for (int64_t d = 0; d < head_dim; d += 4) {
    ahead.step();
    for (int v = 0; v < kVectors; v++) {
      Shorts word = (Shorts)load_ints(words + d / 4 * kFewKeys + v * kLanes);
      Shorts even = (word << 8) >> 8, odd = word >> 8;
      for (int r = 0; r < kRows; r++) {
        const int16_t* query = queries + r * head_dim + d;
        acc[r][v] = add_products_of_pairs(acc[r][v], even, splat_pair(query));
        acc[r][v] = add_products_of_pairs(acc[r][v], odd, splat_pair(query + 2));
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++)
      store(scores + r * scores_stride + v * kLanes,
            __builtin_convertvector(acc[r][v], Floats) * query_scales[r]);
}

// scores[r][·] = keys[r] · queries, without the keys' scales; queries as pairs [D / 2][16][2].
template <int kRows>
ISTHMUS_APART void score_short_keys(const int16_t* keys, int64_t head_dim, const int16_t* queries,
                      const float* query_scales, float* scores) {
  Ints sums[kRows][kParts] = {};
  for (int64_t d = 0; d < head_dim; d += 2) {
    Shorts query[kParts];
    repeat<kParts>([&](auto part) ISTHMUS_INLINE {
      query[part] = (Shorts)load_ints(queries + d * kPanel + part * 2 * kLanes);
    });
    repeat<kRows>([&](auto r) ISTHMUS_INLINE {
      Shorts key = splat_pair(keys + r * head_dim + d);
      repeat<kParts>([&](auto part) ISTHMUS_INLINE {
        sums[r][part] = add_products_of_pairs(sums[r][part], key, query[part]);
        keep_in_register(sums[r][part]);
      });
    });
  }
  repeat<kRows>([&](auto r) ISTHMUS_INLINE {
    repeat<kParts>([&](auto part) ISTHMUS_INLINE {
      store(scores + r * kPanel + part * kLanes,
            __builtin_convertvector(sums[r][part], Floats) * load(query_scales + part * kLanes));
    });
  });
}

// dim is a multiple of kFewColumns.
inline void widen_to_shorts(const int8_t* from, int64_t dim, int16_t* to) {
  for (int64_t d = 0; d < dim; d += 2 * kLanes) store_ints(to + d, (Ints)widen_bytes(from + d));
}

}  // namespace isthmus
