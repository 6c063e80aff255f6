// Blocks of words turned on their side.
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

// Words [8][8] whose rows are from_stride apart, transposed to rows that are to_stride apart.
inline void transpose_words(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  Words words[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) words[i] = load_words((const uint32_t*)from + i * from_stride);
  transpose(words);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) store_words((uint32_t*)to + i * to_stride, words[i]);
}

// Words [16][width] as a panel [width][16].
inline void rows_to_panel(const uint32_t* rows, int64_t width, uint32_t* panel) {
  int64_t whole = width / 8 * 8;
  for (int64_t d = 0; d < whole; d += 8)
    for (int first = 0; first < kPanel; first += 8)
      transpose_words(rows + first * width + d, width, panel + d * kPanel + first, kPanel);
  for (int64_t d = whole; d < width; d++)
    for (int i = 0; i < kPanel; i++) panel[d * kPanel + i] = rows[i * width + d];
}

// The way back.
inline void panel_to_rows(const uint32_t* panel, int64_t width, uint32_t* rows) {
  int64_t whole = width / 8 * 8;
  for (int64_t d = 0; d < whole; d += 8)
    for (int first = 0; first < kPanel; first += 8)
      transpose_words(panel + d * kPanel + first, kPanel, rows + first * width + d, width);
  for (int64_t d = whole; d < width; d++)
    for (int i = 0; i < kPanel; i++) rows[i * width + d] = panel[d * kPanel + i];
}

}  // namespace isthmus
