// Vectors of 16-bit integers, whose products are added in pairs to 32-bit sums.
#pragma once

#include "vec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus {

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
typedef Bytes UnalignedBytes __attribute__((aligned(1), may_alias));

ISTHMUS_INLINE inline Shorts widen_bytes(const int8_t* from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
  return __builtin_convertvector(*(const UnalignedBytes*)from, Shorts);
#endif
}

// The pair at `from` in every lane.
ISTHMUS_INLINE inline Shorts splat_pair(const int16_t* from) {
  int32_t pair;
  memcpy(&pair, from, sizeof(pair));
  return (Shorts)(pair - Ints{});
}

// Lane i: sum + a[2i] · b[2i] + a[2i + 1] · b[2i + 1]. Exact, so every way to compute it agrees.
ISTHMUS_INLINE inline Ints add_products_of_pairs(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__) && defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  Ints low = (((Ints)a << 16) >> 16) * (((Ints)b << 16) >> 16);
  return sum + low + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

}  // namespace isthmus
