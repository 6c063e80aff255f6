// Vectors of floats in the widest registers the target has, by GCC's vector extensions: the same
// source makes AVX2, AVX-512 or NEON code, whatever -march says.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Matrices are cut into panels of 16 columns; a row of a panel is kParts vectors.
constexpr int kPanel = 16;
constexpr int kParts = kPanel / kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef Floats UnalignedFloats __attribute__((aligned(4), may_alias));

// Eight 32-bit words, each of two bf16.
typedef float Floats8 __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef Ints UnalignedInts __attribute__((aligned(4), may_alias));
typedef Words UnalignedWords __attribute__((aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

// What a KV store holds; mirrors `KV_TYPES` of parts.py. int8 comes with scales.
enum class KvType : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) { return *(const UnalignedFloats*)from; }

inline void store(float* to, Floats value) { *(UnalignedFloats*)to = value; }

inline Ints load_ints(const void* from) { return *(const UnalignedInts*)from; }

inline void store_ints(void* to, Ints value) { *(UnalignedInts*)to = value; }

// Not memcpy, which GCC makes of smaller pieces.
inline Words load_words(const void* from) { return *(const UnalignedWords*)from; }

inline void store_words(void* to, Words value) { *(UnalignedWords*)to = value; }

inline Floats8 load8(const float* from) { return (Floats8)load_words(from); }

inline void store8(float* to, Floats8 value) { store_words(to, (Words)value); }

// A bf16 is the upper half of a float, so two of them widen with a shift and a mask.
inline Floats8 low_halves(Words words) { return (Floats8)(words << 16); }

inline Floats8 high_halves(Words words) { return (Floats8)(words & 0xffff0000u); }

// Eight bytes as floats.
inline Floats8 widen8(const int8_t* from) {
#if defined(__AVX2__)
  return (Floats8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Floats8 wide;
  for (int i = 0; i < 8; i++) wide[i] = float(from[i]);
  return wide;
#endif
}

#define ISTHMUS_INLINE __attribute__((always_inline))
#define ISTHMUS_APART __attribute__((noinline))

// Calls work(std::integral_constant<int, i>) for i in [0, kCount). A loop that is unrolled by the
// optimiser comes too late for arrays that should be registers.
template <typename Work, int... kIndices>
ISTHMUS_INLINE inline void repeat_over(std::integer_sequence<int, kIndices...>, const Work& work) {
  (work(std::integral_constant<int, kIndices>{}), ...);
}

template <int kCount, typename Work>
ISTHMUS_INLINE inline void repeat(const Work& work) {
  repeat_over(std::make_integer_sequence<int, kCount>{}, work);
}

ISTHMUS_INLINE inline void load_parts(const float* from, Floats (&parts)[kParts]) {
  repeat<kParts>([&](auto part) ISTHMUS_INLINE { parts[part] = load(from + part * kLanes); });
}

ISTHMUS_INLINE inline void load_panel_row(const float* from, Floats (&row)[kParts]) { load_parts(from, row); }

// Word i of a bf16 panel row holds column i in its low half and column i + 8 in its high half.
ISTHMUS_INLINE inline void load_panel_row(const bf16* from, Floats (&row)[kParts]) {
  Words words = load_words(from);
  Floats8 low = low_halves(words), high = high_halves(words);
#if defined(__AVX512F__)
  row[0] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  memcpy(&row[0], &low, sizeof(low));
  memcpy(&row[kParts / 2], &high, sizeof(high));
#endif
}

// Says that `value` is in a register here: without it GCC moves the loads of later rows of a product
// before this one's sums, and spills sums to make room for them.
template <typename Vector>
ISTHMUS_INLINE inline void keep_in_register(Vector& value) {
#if defined(__x86_64__) || defined(__i386__)
  asm volatile("" : "+v"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#endif
}

// The conditional operator over vectors: GCC makes one instruction of these two. NaN against a number
// is the second argument.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

inline bool is_any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; i++) any |= mask[i];
  return any != 0;
#endif
}

// Both reduce as a tree, halves first.
inline float sum(Floats value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max(Floats value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline float widen(int8_t value) { return float(value); }

inline void widen16(const int8_t* from, float* to) {
  store8(to, widen8(from));
  store8(to + 8, widen8(from + 8));
}

inline void widen16(const float* from, float* to) { memcpy(to, from, 16 * sizeof(float)); }

inline void widen16(const bf16* from, float* to) {
  typedef uint64_t Quads __attribute__((vector_size(32)));
  Quads quads = (Quads)load_words(from);
  // Interleaving works within 128-bit halves: swap the middle quarters first.
  Halves value = (Halves)__builtin_shufflevector(quads, quads, 0, 2, 1, 3);
  Halves low = __builtin_shufflevector(Halves{}, value, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25,
                                       10, 26, 11, 27);
  Halves high = __builtin_shufflevector(Halves{}, value, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29,
                                        14, 30, 15, 31);
  store_words(to, (Words)low);
  store_words(to + 8, (Words)high);
}

// Elements of any type as floats.
template <typename T>
inline void widen_all(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) widen16(from + i, to + i);
  for (; i < count; i++) to[i] = widen(from[i]);
}

inline void narrow(float value, float* to) { *to = value; }

// Rounds to nearest even; NaN stays NaN.
inline void narrow(float value, bf16* to) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = value == value ? uint16_t(rounded) : 0x7fc0;
}

// e^x to about 1 ulp: x = n·ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r (coefficients of
// Cephes' expf), and n added to the exponent bits. Below −87.3 (and at −∞) the result is 0.
inline Floats exp(Floats x) {
  const Floats lowest = splat(-87.3f), highest = splat(88.3f);
  const Floats round = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  Floats bounded = max(lowest, min(highest, x));  // NaN stays NaN
  Floats n = (bounded * 1.44269504088896341f + round) - round;
  Floats r = bounded - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Floats result = (Floats)((Ints)p + (__builtin_convertvector(n, Ints) << 23));
  return x < lowest ? Floats{} : result;
}

}  // namespace isthmus
