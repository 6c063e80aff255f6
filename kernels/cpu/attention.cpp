// Causal attention over a paged KV store, chunk and decode alike.
//
// One piece of work is a block of queries of one sequence under one KV head: its rows are the
// queries times the heads that share the KV head, so keys and values are read once for all of
// them. Keys come in tiles of 64 counted from the start of the sequence; a tile is widened to
// float32 panels, then both products run through the loop of gemm.h with an online softmax between
// them (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1).
//
// Tiles, the order within them and every sum are fixed by a key's position alone, and a key out of
// a row's sight adds exactly nothing: a row's result does not depend on the chunk it came in.

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "threads.h"

namespace isthmus {
namespace {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kStep = 2 * kPanel;  // columns of a product at a time
constexpr float kNothingSeen = -1e30f;  // finite, so that −∞ − kNothingSeen is no NaN

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;   // elements from a block to the next
  int64_t values_offset;  // elements from the keys of a block's layer to its values

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_dim() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
};

// Queries first … first + count − 1 of a sequence (rows of q and out); the first is at `position`.
struct QueryBlock {
  int64_t sequence, first_row, count, position;
};

// Where the keys and values of a tile lie. Those out of sight of every row point to zeros; `count`
// is one more than the last in sight.
template <typename T>
struct KeyTile {
  int64_t count;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
};

// Buffers of one thread, reused from call to call.
struct Scratch {
  std::vector<float> queries, scores, outputs, highest, total, key_panels, value_panels;

  void resize(int64_t rows, const Shape& shape) {
    queries.resize(rows * shape.head_dim);
    scores.resize(rows * kTileKeys);
    outputs.assign(rows * shape.padded_dim(), 0.0f);
    highest.assign(rows, kNothingSeen);
    total.assign(rows, 0.0f);
    key_panels.resize(kStep * shape.head_dim);
    value_panels.resize(kTileKeys * shape.padded_dim());
  }
};

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

inline void store8(float* to, Floats8 value) { memcpy(to, &value, sizeof(value)); }

// Words d … d + 7 of eight keys, transposed into columns of a panel.
inline void put_columns(Words (&words)[8], const float*, float* panel) {
  for (int i = 0; i < 8; i++) store8(panel + i * kPanel, (Floats8)words[i]);
}

inline void put_columns(Words (&words)[8], const bf16*, float* panel) {
  for (int i = 0; i < 8; i++) {
    store8(panel + 2 * i * kPanel, low_halves(words[i]));
    store8(panel + (2 * i + 1) * kPanel, high_halves(words[i]));
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
      for (int i = 0; i < 8; i++) words[i] = load_words(keys[first + i] + d);
      transpose(words);
      put_columns(words, keys[0], panel + d * kPanel + first);
    }
  for (int64_t d = whole; d < head_dim; d++)
    for (int i = 0; i < kPanel; i++) panel[d * kPanel + i] = widen(keys[i][d]);
}

// Values of the tile's first `count` keys as panels [⌈D/16⌉][64][16].
template <typename T>
void values_to_panels(const T* const* values, int64_t count, int64_t head_dim, float* panels) {
  int64_t whole = head_dim / kPanel * kPanel;
  for (int64_t key = 0; key < count; key++) {
    float* row = panels + key * kPanel;
    for (int64_t d = 0; d < whole; d += kPanel) widen16(values[key] + d, row + d * kTileKeys);
    if (whole == head_dim) continue;
    float* last = row + whole * kTileKeys;
    for (int64_t d = 0; d < kPanel; d++)
      last[d] = whole + d < head_dim ? widen(values[key][whole + d]) : 0.0f;
  }
}

// Turns a row's scores into weights relative to the highest score seen so far, and brings what was
// summed before to the same scale.
inline void softmax_row(float* scores, int64_t width, float& highest, float& total, float* output,
                        int64_t output_width) {
  Floats best = load(scores);
  for (int64_t i = kLanes; i < width; i += kLanes) best = max(best, load(scores + i));
  float tile_highest = max(best);
  if (tile_highest > highest) {
    Floats factor = exp(splat(highest - tile_highest));
    total *= factor[0];
    for (int64_t i = 0; i < output_width; i += kLanes)
      store(output + i, load(output + i) * factor);
    highest = tile_highest;
  }
  Floats sums = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats weights = exp(load(scores + i) - highest);
    sums += weights;
    store(scores + i, weights);
  }
  total += sum(sums);
}

template <typename T>
struct Attention {
  const float* q;  // [T, H, D], rows q_stride apart
  int64_t q_stride;
  const T* keys;  // of one layer
  Shape shape;
  const int32_t* block_table;  // [S, M]
  int64_t max_blocks;
  float scale;
  int64_t window;  // keys a query sees, itself included
  float* out;      // [T, H, D]
  const T* zeros;  // [D]

  void run(const QueryBlock& block, int64_t kv_head) const {
    static thread_local Scratch scratch;
    int64_t rows = block.count * shape.group();
    scratch.resize(rows, shape);
    load_queries(block, kv_head, scratch);
    int64_t last = block.position + block.count - 1;
    int64_t first = std::max<int64_t>(0, block.position - window + 1);
    int64_t tile = first / kTileKeys * kTileKeys;
    KeyTile<T> tiles[2];
    locate(block.sequence, kv_head, tile, first, last, tiles[0]);
    for (int here = 0; tile <= last; tile += kTileKeys, here = 1 - here) {
      locate(block.sequence, kv_head, tile + kTileKeys, first, last, tiles[1 - here]);
      attend(block, tiles[here], tiles[1 - here], tile, scratch);
    }
    store_outputs(block, kv_head, scratch);
  }

 private:
  void load_queries(const QueryBlock& block, int64_t kv_head, Scratch& scratch) const {
    int64_t width = shape.group() * shape.head_dim;  // heads of a group are neighbours
    for (int64_t i = 0; i < block.count; i++) {
      const float* from = q + (block.first_row + i) * q_stride + kv_head * width;
      for (int64_t d = 0; d < width; d++) scratch.queries[i * width + d] = from[d] * scale;
    }
  }

  void store_outputs(const QueryBlock& block, int64_t kv_head, const Scratch& scratch) const {
    for (int64_t row = 0; row < block.count * shape.group(); row++) {
      int64_t query = block.first_row + row / shape.group();
      int64_t head = kv_head * shape.group() + row % shape.group();
      float* to = out + (query * shape.num_heads + head) * shape.head_dim;
      const float* from = scratch.outputs.data() + row * shape.padded_dim();
      float inverse = 1.0f / scratch.total[row];
      for (int64_t d = 0; d < shape.head_dim; d++) to[d] = from[d] * inverse;
    }
  }

  void locate(int64_t sequence, int64_t kv_head, int64_t tile, int64_t first, int64_t last,
              KeyTile<T>& found) const {
    found.count = std::clamp<int64_t>(last + 1 - tile, 0, kTileKeys);
    const int32_t* blocks = block_table + sequence * max_blocks;
    int64_t index = tile / shape.block_size, offset = tile % shape.block_size;
    for (int64_t i = 0; i < kTileKeys; i++) {
      bool in_sight = tile + i >= first && tile + i <= last;
      int64_t slot = kv_head * shape.block_size + offset;
      const T* key = zeros;
      if (in_sight) key = keys + blocks[index] * shape.block_stride + slot * shape.head_dim;
      found.keys[i] = key;
      found.values[i] = in_sight ? key + shape.values_offset : zeros;
      if (++offset == shape.block_size) {
        offset = 0;
        index++;
      }
    }
  }

  void prefetch(const T* const* vectors, int64_t first, int64_t last) const {
    for (int64_t i = first; i < last; i++)
      for (int64_t d = 0; d < shape.head_dim; d += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(vectors[i] + d);
  }

  // One tile of keys, the first of which is at position `tile`. The next tile is fetched meanwhile,
  // a little at a time: a burst would fill the queue of outstanding reads and stall.
  void attend(const QueryBlock& block, const KeyTile<T>& here, const KeyTile<T>& next,
              int64_t tile, Scratch& scratch) const {
    int64_t rows = block.count * shape.group(), padded = shape.padded_dim();
    int64_t width = (here.count + kPanel - 1) / kPanel * kPanel;
    score(rows, here, next, width, scratch);
    for (int64_t row = 0; row < rows; row++) {
      float* scores = scratch.scores.data() + row * kTileKeys;
      hide_unseen(scores, width, block.position + row / shape.group() - tile);
      softmax_row(scores, width, scratch.highest[row], scratch.total[row],
                  scratch.outputs.data() + row * padded, padded);
    }
    add_values(rows, here, next, scratch);
  }

  // scores [rows][width] = queries · keysᵀ
  void score(int64_t rows, const KeyTile<T>& here, const KeyTile<T>& next, int64_t width,
             Scratch& scratch) const {
    static const float zeros_row[kTileKeys] = {};
    int64_t dim = shape.head_dim;
    float* panels = scratch.key_panels.data();
    for (int64_t first = 0; first < width; first += kStep) {
      int64_t step = std::min(kStep, width - first);
      for (int64_t i = 0; i < step; i += kPanel)
        keys_to_panel(here.keys + first + i, dim, panels + i * dim);
      prefetch(next.keys, first, first + step);
      multiply<0, float>(rows, {scratch.queries.data(), dim}, {panels, kPanel * dim},
                         step / kPanel, dim, {zeros_row, 0},
                         {scratch.scores.data() + first, kTileKeys});
    }
  }

  // outputs [rows][D] += weights · values
  void add_values(int64_t rows, const KeyTile<T>& here, const KeyTile<T>& next,
                  Scratch& scratch) const {
    int64_t padded = shape.padded_dim();
    values_to_panels(here.values, here.count, shape.head_dim, scratch.value_panels.data());
    for (int64_t first = 0; first < padded; first += kStep) {
      int64_t step = std::min(kStep, padded - first);
      prefetch(next.values, kTileKeys * first / padded, kTileKeys * (first + step) / padded);
      float* outputs = scratch.outputs.data() + first;
      const float* panels = scratch.value_panels.data() + first * kTileKeys;
      multiply<0, float>(rows, {scratch.scores.data(), kTileKeys}, {panels, kPanel * kTileKeys},
                         step / kPanel, here.count, {outputs, padded}, {outputs, padded});
    }
  }

  // `position` is the query's, counted from the tile's first key.
  void hide_unseen(float* scores, int64_t width, int64_t position) const {
    int64_t begin = std::clamp<int64_t>(position - window + 1, 0, width);
    int64_t end = std::clamp<int64_t>(position + 1, begin, width);
    std::fill(scores, scores + begin, -__builtin_inff());
    std::fill(scores + end, scores + width, -__builtin_inff());
  }
};

std::vector<QueryBlock> query_blocks(const int32_t* query_start, const int32_t* seq_lens,
                                     int64_t num_sequences, int64_t group) {
  std::vector<QueryBlock> blocks;
  int64_t most = std::max<int64_t>(1, kBlockRows / group);
  for (int64_t s = 0; s < num_sequences; s++) {
    int64_t start = query_start[s], count = query_start[s + 1] - start;
    for (int64_t first = 0; first < count; first += most)
      blocks.push_back({s, start + first, std::min(most, count - first),
                        seq_lens[s] - count + first});
  }
  return blocks;
}

}  // namespace
}  // namespace isthmus

// Mirrors `AttentionCall` of library.py, field by field.
struct IsthmusAttentionCall {
  const float* q;
  const void* kv;  // the keys of one layer of block 0
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  float* out;
  int64_t q_stride, num_sequences, max_blocks;
  int64_t num_heads, num_kv_heads, head_dim, block_size, block_stride;
  int64_t window;
  float scale;
  int32_t is_bf16, num_threads;
};

namespace isthmus {
namespace {

template <typename T>
void run_attention(const IsthmusAttentionCall& call) {
  Shape shape = {call.num_heads,  call.num_kv_heads, call.head_dim,
                 call.block_size, call.block_stride, 0};
  shape.values_offset = shape.num_kv_heads * shape.block_size * shape.head_dim;
  std::vector<T> zeros(shape.head_dim, T{});
  Attention<T> attention = {call.q,     call.q_stride,    (const T*)call.kv,
                            shape,      call.block_table, call.max_blocks,
                            call.scale, call.window,      call.out,
                            zeros.data()};
  std::vector<QueryBlock> blocks =
      query_blocks(call.query_start, call.seq_lens, call.num_sequences, shape.group());
  parallel_for(call.num_threads, int64_t(blocks.size()) * shape.num_kv_heads, [&](int64_t i) {
    attention.run(blocks[i / shape.num_kv_heads], i % shape.num_kv_heads);
  });
}

}  // namespace
}  // namespace isthmus

extern "C" void isthmus_paged_attention(const IsthmusAttentionCall* call) {
  if (call->is_bf16) {
    isthmus::run_attention<isthmus::bf16>(*call);
  } else {
    isthmus::run_attention<float>(*call);
  }
}
