// x [T, K] · weightᵀ [K, N], the weight packed as panels [⌈N/16⌉][K][16] of float32 or bf16.
//
// Few rows: every panel is read once, straight through, and meets all rows; memory's speed decides.
// Many rows: a piece of a panel stays in a near cache while the rows of a block, which stay in the
// second, pass by; the multipliers' speed decides. bf16 is widened in registers either way.

#include <algorithm>

#include "gemm.h"
#include "threads.h"

namespace isthmus {
namespace {

constexpr int64_t kFewRows = 24;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kPanelPieceBytes = 36 * 1024;  // shorter pieces write and read outputs more often
constexpr int kPrefetch = 512 / sizeof(float);

template <typename W>
struct Linear {
  const float* x;     // [T, K]
  const W* panels;    // [⌈N/16⌉, K, 16], zero beyond N
  const float* bias;  // [⌈N/16⌉ · 16]
  float* out;         // [T, N]
  int64_t num_rows, depth, width;

  void run(int64_t first_panel, int64_t last_panel) const {
    int64_t last_whole = std::min(last_panel, width / kPanel);
    if (num_rows <= kFewRows) {
      multiply_block(0, num_rows, 0, depth, first_panel, last_whole);
    } else {
      run_blocks(first_panel, last_whole);
    }
    if (last_panel > last_whole) multiply_ragged(last_whole);
  }

 private:
  Rows<const float> inputs(int64_t row, int64_t k) const { return {x + row * depth + k, depth}; }

  Panels<W> weights(int64_t panel, int64_t k) const {
    return {panels + (panel * depth + k) * kPanel, depth * kPanel};
  }

  Rows<float> outputs(int64_t row, int64_t panel) const {
    return {out + row * width + panel * kPanel, width};
  }

  void run_blocks(int64_t first_panel, int64_t last_panel) const {
    int64_t longest = kPanelPieceBytes / (kPanel * sizeof(W));
    int64_t pieces = (depth + longest - 1) / longest;
    int64_t blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t piece = 0; piece < pieces; piece++)
        multiply_block(num_rows * block / blocks, num_rows * (block + 1) / blocks,
                       depth * piece / pieces, depth * (piece + 1) / pieces, first_panel,
                       last_panel);
  }

  // Adds the products over k in [k0, k1) to the outputs, which begin as the bias.
  void multiply_block(int64_t row0, int64_t row1, int64_t k0, int64_t k1, int64_t panel0,
                      int64_t panel1) const {
    Rows<float> target = outputs(row0, panel0);
    Rows<const float> init = {target.data, target.stride};
    if (k0 == 0) init = {bias + panel0 * kPanel, 0};
    multiply<kPrefetch>(row1 - row0, inputs(row0, k0), weights(panel0, k0), panel1 - panel0,
                        k1 - k0, init, target);
  }

  // The last panel when N is no multiple of 16: its outputs take a detour, row by row.
  void multiply_ragged(int64_t panel) const {
    for (int64_t row = 0; row < num_rows; row++) {
      float whole[kPanel];
      tile<1, 1, 0>(inputs(row, 0), weights(panel, 0), depth, {bias + panel * kPanel, 0},
                    {whole, 0});
      std::copy_n(whole, width % kPanel, outputs(row, panel).data);
    }
  }
};

template <typename W>
void run_linear(const Linear<W>& linear, int num_threads) {
  int64_t num_panels = (linear.width + kPanel - 1) / kPanel;
  parallel_for(num_threads, num_threads, [&](int64_t share) {
    linear.run(num_panels * share / num_threads, num_panels * (share + 1) / num_threads);
  });
}

}  // namespace
}  // namespace isthmus

extern "C" void isthmus_linear(const float* x, const void* panels, int is_bf16, const float* bias,
                               float* out, int64_t num_rows, int64_t depth, int64_t width,
                               int num_threads) {
  using namespace isthmus;
  if (is_bf16) {
    run_linear<bf16>({x, (const bf16*)panels, bias, out, num_rows, depth, width}, num_threads);
  } else {
    run_linear<float>({x, (const float*)panels, bias, out, num_rows, depth, width}, num_threads);
  }
}
