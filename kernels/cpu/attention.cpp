// One piece of work is a block of queries of one sequence under one KV head: its rows are the
// queries times the heads that share the KV head, so keys and values are read once for all of
// them. Keys come in tiles of 64 counted from the start of the sequence, with an online softmax
// between the two products (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1). Many rows
// meet a tile that was widened for all of them (many_rows.h), few rows as it lies (few_rows.h).
//
// Tiles, the order within them and every sum are fixed by a key's position alone, and a key out of
// a row's sight adds exactly nothing: a row's result does not depend on the chunk it came in.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "few_rows.h"
#include "kv_int8.h"
#include "many_rows.h"
#include "softmax.h"

namespace isthmus {
namespace {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kQueryRows = 96;
constexpr int64_t kScalesPerLine = 16;  // of a cache line

// Queries first_row … first_row + count − 1 (rows of q and out) of a sequence under one KV head;
// the first is at `position`.
struct Piece {
  int64_t sequence, first_row, count, position, kv_head;
};

// Where the keys and values of a tile lie. Those out of sight of every row point to zeros; `count`
// is one more than the last in sight.
template <typename T>
struct KeyTile {
  int64_t count;
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  const float* key_scales[kTileKeys];  // of int8
  const float* value_scales[kTileKeys];
};

template <typename T>
constexpr bool is_quantised = std::is_same_v<T, int8_t>;

constexpr float kNoScale = 0.0f;  // of what is out of sight

// Buffers of one thread, reused from call to call.
struct Scratch {
  std::vector<float> queries, scores, outputs, highest, total, keys, values;
  std::vector<uint32_t> words;
  std::vector<int16_t> short_queries, short_keys;
  std::vector<float> query_scales, key_scales, value_scales;
  ManyRows many_rows;

  // `rows` with what pads them.
  void resize(int64_t rows, int64_t head_dim) {
    queries.assign(rows * head_dim, 0.0f);
    scores.resize(rows * kTileKeys);
    outputs.assign(rows * head_dim, 0.0f);
    highest.assign(rows, kNothingSeen);
    total.assign(rows, 0.0f);
    keys.resize(kTileKeys * head_dim);
    values.resize(kTileKeys * head_dim);
    words.resize(kFewKeys * head_dim);
    short_queries.assign(rows * head_dim, 0);
    short_keys.resize(kTileKeys * head_dim);
    query_scales.assign(rows, 0.0f);
    key_scales.resize(kTileKeys);
    value_scales.resize(kTileKeys);
  }
};

template <typename T>
struct Attention {
  const AttentionParts& parts;
  const float* q;  // [T, H, D], rows q_stride apart
  int64_t q_stride;
  const T* keys;  // of one layer
  const float* scales;
  int64_t window;
  float* out;      // [T, H, D]
  const T* zeros;  // [D]

  // `next` is what this thread does afterwards, or null: its first tile is fetched early.
  void run(const Piece& piece, const Piece* next) const {
    static thread_local Scratch scratch;
    RowShape shape = {piece.count * group(), group(), parts.head_dim, piece.position, window};
    scratch.resize(shape.padded(), parts.head_dim);
    load_queries(piece, scratch);
    if (has_integers()) quantise_queries(piece, scratch);
    if (is_few(piece)) {
      for_tiles(piece, next, [&](int64_t start, const KeyTile<T>& here, const KeyTile<T>& after) {
        attend_few(piece, start, here, after, scratch);
      });
    } else {
      const int16_t* shorts = has_integers() ? scratch.short_queries.data() : nullptr;
      scratch.many_rows.begin(shape, scratch.queries.data(), shorts, scratch.query_scales.data(),
                              kTileKeys);
      for_tiles(piece, next, [&](int64_t start, const KeyTile<T>& here, const KeyTile<T>& after) {
        scratch.many_rows.attend(widen(start, here, after, scratch));
      });
      scratch.many_rows.end(scratch.outputs.data());
    }
    store_outputs(piece, scratch);
  }

 private:
  int64_t group() const { return parts.num_heads / parts.num_kv_heads; }
  bool has_integers() const { return is_quantised<T> && has_exact_scores(parts.head_dim); }
  bool is_few(const Piece& piece) const {
    if (is_quantised<T> && !has_integers()) return false;
    return few_rows_can_take(piece.count * group(), parts.head_dim);
  }

  int64_t last_position(const Piece& piece) const { return piece.position + piece.count - 1; }
  int64_t first_position(const Piece& piece) const {
    return std::max<int64_t>(0, piece.position - window + 1);
  }
  int64_t first_tile(const Piece& piece) const {
    return first_position(piece) / kTileKeys * kTileKeys;
  }

  // Calls work(start, here, next) for each tile of a piece, which begins at position `start`, and
  // what this thread meets after it.
  template <typename Work>
  void for_tiles(const Piece& piece, const Piece* next, const Work& work) const {
    int64_t last = last_position(piece);
    KeyTile<T> tiles[2];
    int64_t start = first_tile(piece);
    locate(piece, start, tiles[0]);
    for (int here = 0; start <= last; here = 1 - here) {
      int64_t after = start + kTileKeys;
      if (after > last && next != nullptr) {
        locate(*next, first_tile(*next), tiles[1 - here]);
      } else {
        locate(piece, after, tiles[1 - here]);
      }
      work(start, tiles[here], tiles[1 - here]);
      start = after;
    }
  }

  void load_queries(const Piece& piece, Scratch& scratch) const {
    int64_t width = group() * parts.head_dim;  // heads of a group are neighbours
    for (int64_t i = 0; i < piece.count; i++) {
      const float* from = q + (piece.first_row + i) * q_stride + piece.kv_head * width;
      for (int64_t d = 0; d < width; d++) scratch.queries[i * width + d] = from[d] * parts.scale;
    }
  }

  void quantise_queries(const Piece& piece, Scratch& scratch) const {
    int64_t dim = parts.head_dim;
    for (int64_t row = 0; row < piece.count * group(); row++) {
      int16_t* query = scratch.short_queries.data() + row * dim;
      scratch.query_scales[row] =
          quantise(scratch.queries.data() + row * dim, dim, kMostShort, query);
      if (is_few(piece)) part_even_and_odd(query, dim);
    }
  }

  void store_outputs(const Piece& piece, const Scratch& scratch) const {
    bool is_here_few = is_few(piece);
    for (int64_t row = 0; row < piece.count * group(); row++) {
      int64_t query = piece.first_row + row / group();
      int64_t head = piece.kv_head * group() + row % group();
      float* to = out + (query * parts.num_heads + head) * parts.head_dim;
      const float* from = scratch.outputs.data() + row * parts.head_dim;
      if (!is_here_few) {
        std::copy_n(from, parts.head_dim, to);
        continue;
      }
      float inverse = 1.0f / scratch.total[row];
      for (int64_t d = 0; d < parts.head_dim; d++) to[d] = from[place_of_column<T>(d)] * inverse;
    }
  }

  void locate(const Piece& piece, int64_t tile, KeyTile<T>& found) const {
    int64_t first = first_position(piece), last = last_position(piece);
    int64_t to_values = parts.num_kv_heads * parts.block_size;
    found.count = std::clamp<int64_t>(last + 1 - tile, 0, kTileKeys);
    const int32_t* blocks = parts.block_table + piece.sequence * parts.max_blocks;
    int64_t index = tile / parts.block_size, offset = tile % parts.block_size;
    for (int64_t i = 0; i < kTileKeys; i++) {
      bool in_sight = tile + i >= first && tile + i <= last;
      int64_t slot = piece.kv_head * parts.block_size + offset;
      const T* key = zeros;
      if (in_sight) key = keys + blocks[index] * parts.block_stride + slot * parts.head_dim;
      found.keys[i] = key;
      found.values[i] = in_sight ? key + to_values * parts.head_dim : zeros;
      if constexpr (is_quantised<T>) {
        const float* scale = &kNoScale;
        if (in_sight) scale = scales + blocks[index] * parts.scale_block_stride + slot;
        found.key_scales[i] = scale;
        found.value_scales[i] = in_sight ? scale + to_values : scale;
        if (offset % kScalesPerLine == 0) {
          __builtin_prefetch(found.key_scales[i]);
          __builtin_prefetch(found.value_scales[i]);
        }
      }
      if (++offset == parts.block_size) {
        offset = 0;
        index++;
      }
    }
  }

  // One tile of keys for few rows, the first of which is at position `start`; the next is fetched
  // meanwhile.
  void attend_few(const Piece& piece, int64_t start, const KeyTile<T>& here,
                  const KeyTile<T>& next, Scratch& scratch) const {
    int64_t rows = piece.count * group(), dim = parts.head_dim;
    int64_t width = (here.count + kPanel - 1) / kPanel * kPanel;
    VectorPrefetch ahead((const void* const*)next.keys, 2 * kTileKeys, dim * sizeof(T));
    score_few(rows, here, width, scratch, ahead);
    for (int64_t row = 0; row < rows; row++) {
      float* scores = scratch.scores.data() + row * kTileKeys;
      hide_unseen(scores, width, piece.position + row / group() - start);
      softmax_row(scores, width, scratch.highest[row], scratch.total[row],
                  scratch.outputs.data() + row * dim, dim);
    }
    if constexpr (is_quantised<T>) scale_columns(rows, width, here.value_scales, scratch);
    add_few(rows, here, scratch, ahead);
  }

  // scores [rows][width] = queries · keysᵀ
  void score_few(int64_t rows, const KeyTile<T>& here, int64_t width, Scratch& scratch,
                 VectorPrefetch& ahead) const {
    int64_t dim = parts.head_dim;
    for (int64_t first = 0; first < width; first += kFewKeys) {
      transpose_keys(here.keys + first, dim, scratch.words.data(), ahead);
      for_few_rows(rows, [&](auto height, int64_t row) {
        float* scores = scratch.scores.data() + row * kTileKeys + first;
        if constexpr (is_quantised<T>) {
          score_int8_keys<height>(scratch.short_queries.data() + row * dim,
                                  scratch.query_scales.data() + row, dim, scratch.words.data(),
                                  scores, kTileKeys, ahead);
        } else {
          score_keys<height, T>(scratch.queries.data() + row * dim, dim, scratch.words.data(),
                                scores, kTileKeys, ahead);
        }
      });
    }
    if constexpr (is_quantised<T>) scale_columns(rows, width, here.key_scales, scratch);
  }

  // scores [rows][width] times the scale of each key, or of each value.
  void scale_columns(int64_t rows, int64_t width, const float* const* column_scales,
                     Scratch& scratch) const {
    float* scales_here = scratch.key_scales.data();
    for (int64_t i = 0; i < width; i++) scales_here[i] = *column_scales[i];
    for (int64_t row = 0; row < rows; row++) {
      float* scores = scratch.scores.data() + row * kTileKeys;
      for (int64_t i = 0; i < width; i += kLanes)
        store(scores + i, load(scores + i) * load(scales_here + i));
    }
  }

  // outputs [rows][D] += weights · values
  void add_few(int64_t rows, const KeyTile<T>& here, Scratch& scratch,
               VectorPrefetch& ahead) const {
    int64_t dim = parts.head_dim;
    for (int64_t d = 0; d < dim; d += kFewColumns)
      for_few_rows(rows, [&](auto height, int64_t row) {
        add_values<height>(scratch.scores.data() + row * kTileKeys, kTileKeys, here.values,
                           here.count, d, scratch.outputs.data() + row * dim + d, dim, ahead);
      });
  }

  // `position` is the query's, counted from the tile's first key.
  void hide_unseen(float* scores, int64_t width, int64_t position) const {
    int64_t begin = std::clamp<int64_t>(position - window + 1, 0, width);
    int64_t end = std::clamp<int64_t>(position + 1, begin, width);
    std::fill(scores, scores + begin, -__builtin_inff());
    std::fill(scores + end, scores + width, -__builtin_inff());
  }

  // A tile for many rows; the next is fetched meanwhile.
  WideTile widen(int64_t start, const KeyTile<T>& here, const KeyTile<T>& next,
                 Scratch& scratch) const {
    int64_t dim = parts.head_dim;
    for (int64_t i = 0; i < here.count; i++) {
      prefetch(next.keys[i]);
      prefetch(next.values[i]);
      widen_all(here.values[i], dim, scratch.values.data() + i * dim);
      if constexpr (is_quantised<T>) {
        scratch.key_scales[i] = *here.key_scales[i];
        scratch.value_scales[i] = *here.value_scales[i];
        if (has_integers()) {
          widen_to_shorts(here.keys[i], dim, scratch.short_keys.data() + i * dim);
          continue;
        }
      }
      widen_all(here.keys[i], dim, scratch.keys.data() + i * dim);
    }
    WideTile tile = {start, here.count, scratch.keys.data(), nullptr, scratch.values.data(),
                     nullptr, nullptr};
    if (has_integers()) tile.short_keys = scratch.short_keys.data();
    if (is_quantised<T>) {
      tile.key_scales = scratch.key_scales.data();
      tile.value_scales = scratch.value_scales.data();
    }
    return tile;
  }

  void prefetch(const T* vector) const {
    for (int64_t d = 0; d < parts.head_dim; d += 64 / int64_t(sizeof(T)))
      __builtin_prefetch(vector + d);
  }
};

// All work of a call, the longest pieces first, so that none is left when the others have ended. The
// pieces of a sequence under its KV heads are neighbours, as its keys are.
std::vector<Piece> pieces_of(const AttentionParts& parts) {
  std::vector<Piece> pieces;
  int64_t group = parts.num_heads / parts.num_kv_heads;
  int64_t most = std::max<int64_t>(1, kQueryRows / group);
  for (int64_t s = 0; s < parts.num_sequences; s++) {
    int64_t start = parts.query_start[s], count = parts.query_start[s + 1] - start;
    for (int64_t first = 0; first < count; first += most)
      for (int64_t head = 0; head < parts.num_kv_heads; head++)
        pieces.push_back({s, start + first, std::min(most, count - first),
                          parts.seq_lens[s] - count + first, head});
  }
  auto products = [](const Piece& piece) { return piece.count * (piece.position + piece.count); };
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) {
    return products(a) > products(b);
  });
  return pieces;
}

template <typename T>
void attend(Team& team, const AttentionParts& parts, const float* q, int64_t q_stride,
            const T* keys, const float* scales, int64_t window, float* out) {
  static thread_local std::vector<T> zeros;
  zeros.resize(parts.head_dim);
  Attention<T> attention = {parts, q, q_stride, keys, scales, window, out, zeros.data()};
  std::vector<Piece> pieces = pieces_of(parts);
  team.loop_knowing_next(int64_t(pieces.size()), [&](int64_t i, int64_t next) {
    attention.run(pieces[i], next < int64_t(pieces.size()) ? &pieces[next] : nullptr);
  });
}

}  // namespace

void run_attention(Team& team, const AttentionParts& parts, const float* q, int64_t q_stride,
                   const void* kv, const float* kv_scales, int64_t window, float* out) {
  auto attend_over = [&](auto* keys) {
    attend(team, parts, q, q_stride, keys, kv_scales, window, out);
  };
  switch (parts.kv_type) {
    case KvType::kFloat32: return attend_over((const float*)kv);
    case KvType::kBfloat16: return attend_over((const bf16*)kv);
    case KvType::kInt8: return attend_over((const int8_t*)kv);
  }
}

}  // namespace isthmus

extern "C" void isthmus_paged_attention(const isthmus::AttentionParts* parts, const float* q,
                                        int64_t q_stride, const void* kv,
                                        const float* kv_scales, int64_t window, float* out,
                                        int num_threads) {
  isthmus::run_team(num_threads, [=](isthmus::Team& team) {
    isthmus::run_attention(team, *parts, q, q_stride, kv, kv_scales, window, out);
  });
}
