// Norms, rotary embedding with the KV write, activation: everything that touches each
// element a few times. All run on the calling thread; beside the products they take little.

#include <algorithm>
#include <cmath>

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

void normalise(const float* x, const float* weight, float eps, int64_t count, float* out) {
  float inverse = 1.0f / std::sqrt(sum_of_squares(x, count) / float(count) + eps);
  for (int64_t i = 0; i < count; i++) out[i] = x[i] * inverse * weight[i];
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = second * cos[i] + first * sin[i];
  }
}

inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

void silu_mul_row(const float* gate, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < count; i++) out[i] = silu(splat(gate[i]))[0] * up[i];
}

}  // namespace
}  // namespace isthmus

// Mirrors `RopeCall` of library.py, field by field.
struct IsthmusRopeCall {
  float* q;
  float* k;
  const float* v;
  const float* cos_sin;  // [P, D]: cosines, then sines
  const int64_t* positions;
  const int64_t* slot_mapping;
  void* kv;  // the keys of one layer of block 0
  int64_t q_stride, k_stride, v_stride;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, block_stride;
  int32_t is_bf16;
};

namespace isthmus {
namespace {

template <typename T>
void rope_and_cache(const IsthmusRopeCall& call) {
  int64_t dim = call.head_dim, half = dim / 2;
  int64_t values_offset = call.num_kv_heads * call.block_size * dim;
  for (int64_t t = 0; t < call.num_tokens; t++) {
    const float* cos = call.cos_sin + call.positions[t] * dim;
    float* k = call.k + t * call.k_stride;
    const float* v = call.v + t * call.v_stride;
    for (int64_t h = 0; h < call.num_heads; h++)
      rotate(call.q + t * call.q_stride + h * dim, cos, cos + half, half);
    for (int64_t g = 0; g < call.num_kv_heads; g++) rotate(k + g * dim, cos, cos + half, half);
    int64_t slot = call.slot_mapping[t];
    if (slot < 0) continue;
    T* block = (T*)call.kv + slot / call.block_size * call.block_stride;
    for (int64_t g = 0; g < call.num_kv_heads; g++) {
      T* to = block + (g * call.block_size + slot % call.block_size) * dim;
      for (int64_t d = 0; d < dim; d++) narrow(k[g * dim + d], to + d);
      for (int64_t d = 0; d < dim; d++) narrow(v[g * dim + d], to + values_offset + d);
    }
  }
}

}  // namespace
}  // namespace isthmus

extern "C" {

void isthmus_rms_norm(const float* x, const float* weight, float eps, int64_t num_rows,
                      int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; row++)
    isthmus::normalise(x + row * width, weight, eps, width, out + row * width);
}

void isthmus_add_rms_norm(const float* x, const float* residual, const float* weight, float eps,
                          int64_t num_rows, int64_t width, float* out, float* total) {
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t first = row * width;
    for (int64_t i = first; i < first + width; i++) total[i] = x[i] + residual[i];
    isthmus::normalise(total + first, weight, eps, width, out + first);
  }
}

void isthmus_silu_mul(const float* gate_up, int64_t num_rows, int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; row++) {
    const float* gate = gate_up + 2 * row * width;
    isthmus::silu_mul_row(gate, gate + width, width, out + row * width);
  }
}

void isthmus_rope_and_cache(const IsthmusRopeCall* call) {
  if (call->is_bf16) {
    isthmus::rope_and_cache<isthmus::bf16>(*call);
  } else {
    isthmus::rope_and_cache<float>(*call);
  }
}
}
