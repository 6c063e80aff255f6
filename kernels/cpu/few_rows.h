// The two products of attention for a few rows, as in a decode step: keys and values are used as
// they lie. Panels would cost more than they save, since each is met by few rows.
//
// Every sum has the order it has with panels, so the results are the same bits.
#pragma once

#include "panels.h"

namespace isthmus {

constexpr int64_t kFewQueryRows = 8;
constexpr int kFewTile = 3;          // rows whose accumulators leave room for what they meet
constexpr int64_t kFewKeys = 32;     // keys at a time
constexpr int64_t kFewColumns = 32;  // columns of values at a time

inline bool few_rows_can_take(int64_t rows, int64_t head_dim) {
  return rows <= kFewQueryRows && head_dim % kFewColumns == 0;
}

// Column d of the outputs stands at this place while values are summed: of a word's two bf16, all
// low halves come first.
template <typename T>
inline int64_t place_of_column(int64_t d) {
  return std::is_same_v<T, bf16> ? d / 16 * 16 + d % 2 * 8 + d % 16 / 2 : d;
}

// Calls work(std::integral_constant<int, h>, first) for tiles of h rows that make up `rows`.
template <typename Work>
inline void for_few_rows(int64_t rows, const Work& work) {
  int64_t tiles = (rows + kFewTile - 1) / kFewTile;
  for (int64_t i = 0; i < tiles; i++) {
    int64_t first = rows * i / tiles;
    with_height<kFewTile>(int(rows * (i + 1) / tiles - first),
                          [&](auto height) { work(height, first); });
  }
}

// Fetches vectors ahead of their use, some cache lines at every step. The steps are spread over all
// that is done meanwhile: in bursts, memory would stand still in between.
class VectorPrefetch {
 public:
  VectorPrefetch(const void* const* vectors, int64_t count, int64_t vector_bytes)
      : vector_(vectors), end_(vectors + count), bytes_(vector_bytes) {}

  void step() {
    if (vector_ == end_) return;
    __builtin_prefetch((const char*)*vector_ + offset_);
    offset_ += 64;
    if (offset_ < bytes_) return;
    offset_ = 0;
    vector_++;
  }

 private:
  const void* const* vector_;
  const void* const* end_;
  int64_t bytes_, offset_ = 0;
};

// 32 keys as words [D · sizeof(T) / 4][32].
template <typename T>
void transpose_keys(const T* const* keys, int64_t head_dim, uint32_t* words,
                    VectorPrefetch& ahead) {
  constexpr int64_t kPerWord = 4 / sizeof(T);
  for (int64_t first = 0; first < kFewKeys; first += 8)
    for (int64_t d = 0; d < head_dim; d += 8 * kPerWord) {
      Words rows[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) rows[i] = load_words(keys[first + i] + d);
      for (int i = 0; i < 3; i++) ahead.step();
      transpose(rows);
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++)
        store_words(words + (d / kPerWord + i) * kFewKeys + first, rows[i]);
    }
}

template <typename T>
inline Floats element_of(Ints word, int index) {
  if (sizeof(T) == 4) return (Floats)word;
  return (Floats)(index == 0 ? word << 16 : word & int32_t(0xffff0000));
}

// scores[r][0 … 31] = queries[r] · keys
template <int kRows, typename T>
void score_keys(const float* queries, int64_t head_dim, const uint32_t* words, float* scores,
                int64_t scores_stride, VectorPrefetch& ahead) {
  constexpr int kPerWord = 4 / sizeof(T), kVectors = kFewKeys / kLanes;
  Floats acc[kRows][kVectors] = {};
  for (int64_t d = 0; d < head_dim; d += kPerWord) {
    ahead.step();
    for (int i = 0; i < kPerWord; i++) {
      Floats query[kRows];
      for (int r = 0; r < kRows; r++) query[r] = splat(queries[r * head_dim + d + i]);
      for (int v = 0; v < kVectors; v++) {
        Ints word = load_ints(words + d / kPerWord * kFewKeys + v * kLanes);
        Floats key = element_of<T>(word, i);
        for (int r = 0; r < kRows; r++) acc[r][v] += query[r] * key;
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++) store(scores + r * scores_stride + v * kLanes, acc[r][v]);
}

inline void load_values(const bf16* from, Floats8 (&columns)[4]) {
  for (int i = 0; i < 2; i++) {
    Words words = load_words(from + 16 * i);
    columns[2 * i] = low_halves(words);
    columns[2 * i + 1] = high_halves(words);
  }
}

inline void load_values(const int8_t* from, Floats8 (&columns)[4]) {
  for (int i = 0; i < 4; i++) columns[i] = widen8(from + 8 * i);
}

inline void load_values(const float* from, Floats8 (&columns)[4]) {
  for (int i = 0; i < 4; i++) columns[i] = load8(from + 8 * i);
}

// outputs[r][0 … 31] += weights[r] · values, in the places of `place_of_column`.
template <int kRows, typename T>
void add_values(const float* weights, int64_t weights_stride, const T* const* values,
                int64_t count, int64_t column, float* outputs, int64_t outputs_stride,
                VectorPrefetch& ahead) {
  Floats8 acc[kRows][4];
  for (int r = 0; r < kRows; r++)
    for (int i = 0; i < 4; i++) acc[r][i] = load8(outputs + r * outputs_stride + 8 * i);
  for (int64_t key = 0; key < count; key++) {
    Floats8 columns[4];
    load_values(values[key] + column, columns);
    ahead.step();
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < 4; i++) acc[r][i] += weights[r * weights_stride + key] * columns[i];
  }
  for (int r = 0; r < kRows; r++)
    for (int i = 0; i < 4; i++) store8(outputs + r * outputs_stride + 8 * i, acc[r][i]);
}

}  // namespace isthmus
