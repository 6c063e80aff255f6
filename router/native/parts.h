// What a choice reads and writes. Times are milliseconds; infinite = never, or no such target.
//
// Every field is eight bytes, and Python fills them in by their order (weigher.py). Columns are those of
// columns.py and table.py, one entry an instance: P prefill instances, then D that decode.
#pragma once

#include <cstdint>
#include <limits>

namespace isthmus {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kFloorMs = 10.0;       // quantiles.FLOOR_MS
constexpr double kPace = 0.9;           // pacing.PACE
constexpr double kLeastShare = 0.1;     // pacing.LEAST_SHARE
constexpr double kMaxDoubtMs = 2000.0;  // predictor.MAX_DOUBT_MS
constexpr int64_t kMaxHolders = 4;      // forecast.MAX_HOLDERS
constexpr int64_t kMaxCandidates = 4;   // choice.listed

// Columns of PromptColumns and of DecodeColumns, in their order.
enum PromptColumn {
  kBase, kToken, kPair, kFactor, kBudget, kStrange, kHeardAt, kPrompts, kHead, kHeadSince,
  kHeadLate, kAhead, kTurn, kBarred, kNumPromptColumns
};
enum DecodeColumn {
  kDecodeBase, kSeq, kCtx, kLargeBatch, kLargeBase, kLargeSeq, kLargeCtx, kSeqs, kContext,
  kStep, kFirst, kRoom, kCapacity, kTokenBytes, kTightest, kPrompt, kPromptAt,
  kDecodeFactor, kBlockSize,
  kNumDecodeColumns
};

// A PairTable; lives as long as that, and so do its arrays.
struct Table {
  int64_t num_prefills, num_decodes;
  const double* prompts;        // [kNumPromptColumns, P + D]
  const double* decodes;        // [kNumDecodeColumns, D]
  const double* longest;        // [P + D]
  const double* block_sizes;    // [P + D]
  const double* is_mixed;       // [D]: 0 or 1
  const double* rates;          // [P, D]
  const double* fetch_min;      // [P]
  double* workspace;            // workspace_size()

  int64_t count() const { return num_prefills + num_decodes; }
  const double* prompt(PromptColumn column) const { return prompts + column * count(); }
  const double* local(PromptColumn column) const { return prompt(column) + num_prefills; }
  const double* decode(DecodeColumn column) const { return decodes + column * num_decodes; }
};

// Measured / predicted: its quantile, and all of it in order.
struct Residuals {
  double ratio;
  const double* ordered;
  int64_t count;
};

// A query, its Ask, the Prices and what else is the same for all instances.
struct Query {
  double num_tokens, output_tokens, ttft_ms, left_ms, tpot_ms, quantile;
  double now_ms, stale_ms, min_remote_tokens;
  double price_prefill, price_decode, line_ms, worth_ms, session_worth_ms;
  double rate, budget;  // where they are the same for all, else 0
  int64_t needs_whole, spares_residents, has_strange;
  int64_t left_alone, last_prefill, last_decode;  // rows; −1 = nobody
  const double* depths;                           // [P + D]: leading blocks of the prompt
  const int64_t* excluded;                        // rows
  int64_t num_excluded;
  Residuals remote, local, tpot;
  int64_t pick;  // of the possible places; −1 = the cheapest

  bool is_urgent() const { return ttft_ms < kNever; }
  bool has_tpot() const { return tpot_ms < kNever; }
};

// Of goodput._obstacle, in this order.
enum Obstacle { kNothing, kNoDecodeInstance, kDecodeFull, kTpot, kPrefillBusy, kTtft };

struct Candidate {
  double row, column, cost;  // row −1: a local prefill
  double cached, uncached, wait, prefill, ttft, factor;
  double decode_cached, seqs, tpot, is_full;
};

struct Answer {
  double work, floor_quantile, least_ttft, least_tpot, ready, num_workers;
  double obstacle, num_candidates;
  Candidate candidates[kMaxCandidates];
};

}  // namespace isthmus
