// All layers of a decoder in one call: between the ops there is nothing to do but the next op, and
// the threads stay together. The ops and their order are those of the model's own forward pass.

#include <algorithm>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "threads.h"

// What follows mirrors the structures of the same names in binding.py, field by field.
namespace isthmus {

struct LayerParts {
  LinearParts qkv, output, gate_up, down;
  const float* attention_norm;  // [E]
  const float* ffn_norm;        // [E]
  const float* query_norm;      // [D] or null
  const float* key_norm;        // [D] or null
  int64_t window;
};

struct DecoderParts {
  const LayerParts* layers;
  int64_t num_layers;
  const float* final_norm;  // [E]
  LinearParts lm_head;
  float eps;
  int32_t num_threads;
};

struct StepParts {
  AttentionParts attention;
  RopeParts rope;
  float* hidden;                // [T, E] the embedded tokens; overwritten
  const int64_t* logits_index;  // [K]
  void* kv;                     // block 0 of the store
  float* kv_scales;             // of block 0, or null
  int64_t layer_bytes;          // from a layer of a block to the next
  int64_t scale_layer_stride;   // the same of the scales, in elements
  int64_t num_tokens, num_logits;
  float* workspace;  // of workspace_size floats
  float* logits;     // [K, V]
  int64_t* num_final_layers;  // null, or where to tell how many layers have all their KV
};

namespace {

// Consecutive parts of one buffer. Without a buffer it only counts.
class Workspace {
 public:
  explicit Workspace(float* data) : data_(data) {}

  float* take(int64_t count) {
    float* taken = data_ == nullptr ? nullptr : data_ + used_;
    used_ += (count + 15) / 16 * 16;
    return taken;
  }

  int64_t used() const { return used_; }

 private:
  float* data_;
  int64_t used_ = 0;
};

struct Buffers {
  float *normed, *projected, *attended, *gate_up, *activated, *packed;

  Buffers(Workspace& workspace, const DecoderParts& decoder, int64_t rows) {
    const LayerParts& layer = decoder.layers[0];
    int64_t hidden = layer.qkv.depth;
    normed = workspace.take(rows * hidden);
    projected = workspace.take(rows * std::max(layer.qkv.width, hidden));
    attended = workspace.take(rows * layer.output.depth);
    gate_up = workspace.take(rows * layer.gate_up.width);
    activated = workspace.take(rows * layer.down.depth);
    int64_t depth = std::max({hidden, layer.output.depth, layer.down.depth});
    packed = workspace.take(packed_size(rows, depth));
  }
};

// One member's view of a step; all members run it in step with each other.
class Step {
 public:
  Step(Team& team, const DecoderParts& decoder, const StepParts& parts, const Buffers& buffers)
      : team_(team), decoder_(decoder), parts_(parts), buffers_(buffers) {}

  void run() {
    int64_t rows = parts_.num_tokens, hidden = hidden_size();
    const LayerParts& first_layer = decoder_.layers[0];
    pack_made_rows(rows_for(first_layer.qkv, rows), buffers_.normed, [&](int64_t row) {
      rms_norm(parts_.hidden + row * hidden, first_layer.attention_norm, decoder_.eps, hidden,
               buffers_.normed + row * hidden);
    });
    for (int64_t index = 0; index < decoder_.num_layers; index++) {
      const LayerParts& layer = decoder_.layers[index];
      bool is_last = index + 1 == decoder_.num_layers;
      attend(layer, index);
      if (is_last) {  // KV is complete: only rows that need logits go on
        gather_rows(buffers_.attended, layer.output.depth);
        gather_rows(parts_.hidden, hidden);
        rows = parts_.num_logits;
      }
      PackedRows attended = rows_for(layer.output, rows);
      pack_made_rows(attended, buffers_.attended, [](int64_t) {});
      run_linear(team_, attended, buffers_.projected);
      run_linear(team_, add_and_norm(layer.ffn_norm, layer.gate_up, rows), buffers_.gate_up);
      run_linear(team_, activate(layer.down, rows), buffers_.projected);
      const LayerParts* next = is_last ? nullptr : &decoder_.layers[index + 1];
      add_and_norm(is_last ? decoder_.final_norm : next->attention_norm,
                   is_last ? decoder_.lm_head : next->qkv, rows);
    }
    run_linear(team_, rows_for(decoder_.lm_head, rows), parts_.logits);
  }

 private:
  int64_t hidden_size() const { return decoder_.layers[0].qkv.depth; }

  template <typename Work>
  void for_rows(int64_t rows, const Work& work) {
    team_.loop_in_shares(rows, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) work(row);
    });
  }

  PackedRows rows_for(const LinearParts& product, int64_t rows) const {
    return {product, {rows}, buffers_.packed};
  }

  // Makes rows of x and packs them for their product, while they are near.
  template <typename Make>
  void pack_made_rows(const PackedRows& rows, const float* x, const Make& make) {
    team_.loop_in_shares(rows.tiles.count(), [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; tile++) {
        for (int64_t row = rows.tiles.first(tile); row < rows.tiles.first(tile + 1); row++)
          make(row);
        pack_rows(rows, tile, x);
      }
    });
  }

  void attend(const LayerParts& layer, int64_t index) {
    const RopeParts& rope = parts_.rope;
    int64_t stride = layer.qkv.width;
    float* k = buffers_.projected + rope.num_heads * rope.head_dim;
    float* v = k + rope.num_kv_heads * rope.head_dim;
    char* kv = (char*)parts_.kv + index * parts_.layer_bytes;
    float* scales = parts_.kv_scales;
    if (scales != nullptr) scales += index * parts_.scale_layer_stride;
    run_linear(team_, rows_for(layer.qkv, parts_.num_tokens), buffers_.projected);
    for_rows(parts_.num_tokens, [&](int64_t row) {
      float* q = buffers_.projected + row * stride;
      if (layer.query_norm != nullptr) norm_heads(q, layer.query_norm, rope.num_heads);
      if (layer.key_norm != nullptr) norm_heads(k + row * stride, layer.key_norm, rope.num_kv_heads);
      rope_and_cache(rope, q, k + row * stride, v + row * stride, row, kv, scales);
    });
    tell_final_layers(index + 1);
    run_attention(team_, parts_.attention, buffers_.projected, stride, kv, scales, layer.window,
                  buffers_.attended);
  }

  // All members have met behind the last write of this layer's KV, and none gets to the next layer
  // before all are here: whoever stores, the count grows, behind what it speaks of.
  void tell_final_layers(int64_t count) {
    if (parts_.num_final_layers != nullptr)
      __atomic_store_n(parts_.num_final_layers, count, __ATOMIC_RELEASE);
  }

  void norm_heads(float* heads, const float* norm, int64_t count) const {
    int64_t dim = parts_.rope.head_dim;
    for (int64_t head = 0; head < count; head++)
      rms_norm(heads + head * dim, norm, decoder_.eps, dim, heads + head * dim);
  }

  // Rows of `logits_index`, in place: they ascend, so none is overwritten before it is read.
  void gather_rows(float* data, int64_t width) {
    team_.loop(1, [&](int64_t) {
      for (int64_t i = 0; i < parts_.num_logits; i++)
        std::copy_n(data + parts_.logits_index[i] * width, width, data + i * width);
    });
  }

  // hidden += projected; normed = its norm, which is packed for `product`
  PackedRows add_and_norm(const float* norm, const LinearParts& product, int64_t rows) {
    int64_t width = hidden_size();
    PackedRows packed = rows_for(product, rows);
    pack_made_rows(packed, buffers_.normed, [&](int64_t row) {
      float* hidden = parts_.hidden + row * width;
      add_rms_norm(buffers_.projected + row * width, hidden, norm, decoder_.eps, width,
                   buffers_.normed + row * width, hidden);
    });
    return packed;
  }

  PackedRows activate(const LinearParts& product, int64_t rows) {
    int64_t width = product.depth;
    PackedRows packed = rows_for(product, rows);
    pack_made_rows(packed, buffers_.activated, [&](int64_t row) {
      silu_mul(buffers_.gate_up + 2 * row * width, width, buffers_.activated + row * width);
    });
    return packed;
  }

  Team& team_;
  const DecoderParts& decoder_;
  const StepParts& parts_;
  const Buffers& buffers_;
};

}  // namespace
}  // namespace isthmus

extern "C" {

int64_t isthmus_workspace_size(const isthmus::DecoderParts* decoder, int64_t num_tokens) {
  isthmus::Workspace workspace(nullptr);
  isthmus::Buffers buffers(workspace, *decoder, num_tokens);
  return workspace.used();
}

void isthmus_decoder_step(const isthmus::DecoderParts* decoder, const isthmus::StepParts* parts) {
  isthmus::Workspace workspace(parts->workspace);
  isthmus::Buffers buffers(workspace, *decoder, parts->num_tokens);
  isthmus::run_team(decoder->num_threads, [&](isthmus::Team& team) {
    isthmus::Step(team, *decoder, *parts, buffers).run();
  });
}
}
