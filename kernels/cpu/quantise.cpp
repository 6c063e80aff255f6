// Vectors of a KV store in another dtype, quantised to where they will be sent from.

#include <vector>

#include "kv_int8.h"

namespace isthmus {

// Vectors [A][B][C][E] of `dim` elements each, at any strides, and where each goes. Strides are in
// elements. Mirrors the structure of binding.py, field by field.
struct QuantiseParts {
  const void* from;
  int8_t* to;
  float* scales;
  int64_t counts[4], from_strides[4], to_strides[4], scale_strides[4];
  int64_t dim;
  KvType from_type;
};

namespace {

template <typename T>
void quantise_vectors(const QuantiseParts& parts, const T* from) {
  static thread_local std::vector<float> wide;
  wide.resize(parts.dim);
  int64_t at[4] = {};
  auto place = [&](const int64_t (&strides)[4]) {
    return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3];
  };
  for (at[0] = 0; at[0] < parts.counts[0]; at[0]++)
    for (at[1] = 0; at[1] < parts.counts[1]; at[1]++)
      for (at[2] = 0; at[2] < parts.counts[2]; at[2]++)
        for (at[3] = 0; at[3] < parts.counts[3]; at[3]++) {
          const T* vector = from + place(parts.from_strides);
          widen_all(vector, parts.dim, wide.data());
          parts.scales[place(parts.scale_strides)] =
              quantise(wide.data(), parts.dim, kMostByte, parts.to + place(parts.to_strides));
        }
}

}  // namespace
}  // namespace isthmus

extern "C" void isthmus_quantise_kv(const isthmus::QuantiseParts* parts) {
  using isthmus::KvType;
  if (parts->from_type == KvType::kBfloat16) {
    isthmus::quantise_vectors(*parts, (const isthmus::bf16*)parts->from);
  } else {
    isthmus::quantise_vectors(*parts, (const float*)parts->from);
  }
}
