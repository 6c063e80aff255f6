// Keys and values of a tile as panels of float32, for attention of many rows.
#pragma once

#include "gemm.h"

namespace isthmus {

// Transposes 8 × 8 words.
inline void transpose(Words (&m)[8]) {
  Words pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      Words a = pairs[i + j], b = pairs[i + j + 2];
      quads[i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      quads[i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    m[i] = __builtin_shufflevector(quads[i], quads[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + 4] = __builtin_shufflevector(quads[i], quads[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Words d … d + 7 of eight keys, transposed into columns of a panel.
inline void put_columns(Words (&words)[8], const float*, float* panel) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) store8(panel + i * kPanel, (Floats8)words[i]);
}

inline void put_columns(Words (&words)[8], const bf16*, float* panel) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    store8(panel + 2 * i * kPanel, low_halves(words[i]));
    store8(panel + (2 * i + 1) * kPanel, high_halves(words[i]));
  }
}

inline void put_columns(Words (&words)[8], const int8_t*, float* panel) {
  typedef int32_t Ints8 __attribute__((vector_size(32)));
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; byte++) {
      Ints8 wide = (Ints8)(words[i] << (24 - 8 * byte)) >> 24;
      store8(panel + (4 * i + byte) * kPanel, __builtin_convertvector(wide, Floats8));
    }
}

// Sixteen keys of D elements as a panel [D][16].
template <typename T>
void keys_to_panel(const T* const* keys, int64_t head_dim, float* panel) {
  constexpr int64_t kStep = 32 / sizeof(T);  // elements in eight words
  int64_t whole = head_dim / kStep * kStep;
  for (int first = 0; first < kPanel; first += 8)
    for (int64_t d = 0; d < whole; d += kStep) {
      Words words[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) words[i] = load_words(keys[first + i] + d);
      transpose(words);
      put_columns(words, keys[0], panel + d * kPanel + first);
    }
  for (int64_t d = whole; d < head_dim; d++)
    for (int i = 0; i < kPanel; i++) panel[d * kPanel + i] = widen(keys[i][d]);
}

// Values of a tile's first `count` keys as panels [⌈D/16⌉][tile_keys][16].
template <typename T>
void values_to_panels(const T* const* values, int64_t count, int64_t head_dim, int64_t tile_keys,
                      float* panels) {
  int64_t whole = head_dim / kPanel * kPanel;
  for (int64_t key = 0; key < count; key++) {
    float* row = panels + key * kPanel;
    for (int64_t d = 0; d < whole; d += kPanel) widen16(values[key] + d, row + d * tile_keys);
    if (whole == head_dim) continue;
    float* last = row + whole * tile_keys;
    for (int64_t d = 0; d < kPanel; d++)
      last[d] = whole + d < head_dim ? widen(values[key][whole + d]) : 0.0f;
  }
}

}  // namespace isthmus
