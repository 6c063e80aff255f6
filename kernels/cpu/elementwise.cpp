#include "elementwise.h"

#include <cmath>

#include "kv_int8.h"
#include "vec.h"

namespace isthmus {
namespace {

float sum_of_squares(const float* x, int64_t count) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) {
      Floats value = load(x + i + j * kLanes);
      sums[j] += value * value;
    }
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; i++) total += x[i] * x[i];
  return total;
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// Writes a vector to its place in the store, and its scale where there are scales.
template <typename T>
void write_vector(const float* vector, int64_t dim, T* to, float*) {
  for (int64_t d = 0; d < dim; d++) narrow(vector[d], to + d);
}

inline void write_vector(const float* vector, int64_t dim, int8_t* to, float* scale) {
  *scale = quantise(vector, dim, kMostByte, to);
}

template <typename T>
void rope_and_cache(const RopeParts& parts, float* q, float* k, const float* v, int64_t token,
                    T* keys, float* scales) {
  int64_t dim = parts.head_dim, half = dim / 2, block_size = parts.block_size;
  int64_t to_values = parts.num_kv_heads * block_size;
  const float* cos = parts.cos_sin + parts.positions[token] * dim;
  for (int64_t h = 0; h < parts.num_heads; h++) rotate(q + h * dim, cos, cos + half, half);
  for (int64_t g = 0; g < parts.num_kv_heads; g++) rotate(k + g * dim, cos, cos + half, half);
  int64_t slot = parts.slot_mapping[token];
  if (slot < 0) return;
  T* block = keys + slot / block_size * parts.block_stride;
  float* block_scales = scales + slot / block_size * parts.scale_block_stride;
  for (int64_t g = 0; g < parts.num_kv_heads; g++) {
    int64_t place = g * block_size + slot % block_size;
    write_vector(k + g * dim, dim, block + place * dim, block_scales + place);
    place += to_values;
    write_vector(v + g * dim, dim, block + place * dim, block_scales + place);
  }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
  float inverse = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * inverse * weight[i];
}

void add_rms_norm(const float* x, const float* residual, const float* weight, float eps,
                  int64_t width, float* out, float* total) {
  for (int64_t i = 0; i < width; i++) total[i] = x[i] + residual[i];
  rms_norm(total, weight, eps, width, out);
}

void silu_mul(const float* gate_up, int64_t width, float* out) {
  const float* up = gate_up + width;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    store(out + i, silu(load(gate_up + i)) * load(up + i));
  for (; i < width; i++) out[i] = silu(splat(gate_up[i]))[0] * up[i];
}

void rope_and_cache(const RopeParts& parts, float* q, float* k, const float* v, int64_t token,
                    void* kv, float* kv_scales) {
  switch (parts.kv_type) {
    case KvType::kFloat32: return rope_and_cache(parts, q, k, v, token, (float*)kv, kv_scales);
    case KvType::kBfloat16: return rope_and_cache(parts, q, k, v, token, (bf16*)kv, kv_scales);
    case KvType::kInt8: return rope_and_cache(parts, q, k, v, token, (int8_t*)kv, kv_scales);
  }
}

}  // namespace isthmus

extern "C" {

void isthmus_rms_norm(const float* x, const float* weight, float eps, int64_t num_rows,
                      int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; row++)
    isthmus::rms_norm(x + row * width, weight, eps, width, out + row * width);
}

void isthmus_add_rms_norm(const float* x, const float* residual, const float* weight, float eps,
                          int64_t num_rows, int64_t width, float* out, float* total) {
  for (int64_t first = 0; first < num_rows * width; first += width)
    isthmus::add_rms_norm(x + first, residual + first, weight, eps, width, out + first,
                          total + first);
}

void isthmus_silu_mul(const float* gate_up, int64_t num_rows, int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; row++)
    isthmus::silu_mul(gate_up + 2 * row * width, width, out + row * width);
}

void isthmus_rope_and_cache(const isthmus::RopeParts* parts, float* q, int64_t q_stride, float* k,
                            int64_t k_stride, const float* v, int64_t v_stride,
                            int64_t num_tokens, void* kv, float* kv_scales) {
  for (int64_t token = 0; token < num_tokens; token++)
    isthmus::rope_and_cache(*parts, q + token * q_stride, k + token * k_stride,
                            v + token * v_stride, token, kv, kv_scales);
}
}
