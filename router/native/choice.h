// Which of all that cost something: choice.py.
#pragma once

#include <tuple>

#include "costs.h"

namespace isthmus {

constexpr double kNearTieMs = 1.0;  // choice.NEAR_TIE_MS

struct Place {
  int64_t row, column;  // row −1: a local prefill
};

// False when nothing is possible. Of near ties, whose decode instance was chosen least recently,
// then whose prefill instance was.
inline bool cheapest(const Forecast& found, const Costs& costs, Place& chosen) {
  int64_t prefills = found.remote.count, decodes = found.local.count;
  double best_pair = least(costs.best, prefills);
  double best_alone = least(costs.local, decodes);
  double best = std::min(best_pair, best_alone);
  if (best == kNever) return false;
  double limit = best + kNearTieMs;
  const double *turn = found.table.local(kTurn), *prefill_turn = found.table.prompt(kTurn);
  std::tuple<double, double, int64_t, int64_t> first(kNever, kNever, 0, 0);
  for (int64_t i = 0; i < decodes; i++)
    if (costs.local[i] <= limit)
      first = std::min(first, std::make_tuple(turn[i], turn[i], int64_t(-1), i));
  for (int64_t row = 0; row < prefills; row++)
    if (costs.best[row] <= limit)
      for (int64_t i = 0; i < decodes; i++)
        if (costs.pairs[row * decodes + i] <= limit)
          first = std::min(first, std::make_tuple(turn[i], prefill_turn[row], row, i));
  chosen = {std::get<2>(first), std::get<3>(first)};
  return true;
}

// Calls `visit` for each place that is possible, until it returns false: choice.anyone.
template <typename Visit>
void each_place(const Forecast& found, const Costs& costs, Visit visit) {
  int64_t prefills = found.remote.count, decodes = found.local.count;
  for (int64_t at = 0; at < prefills * decodes; at++)
    if (costs.pairs[at] != kNever && !visit(Place{at / decodes, at % decodes})) return;
  for (int64_t i = 0; i < decodes; i++)
    if (costs.local[i] != kNever && !visit(Place{-1, i})) return;
}

inline int64_t num_places(const Forecast& found, const Costs& costs) {
  int64_t count = 0;
  each_place(found, costs, [&](Place) { return ++count; });
  return count;
}

inline bool picked(const Forecast& found, const Costs& costs, Place& chosen) {
  int64_t left = found.query.pick;
  each_place(found, costs, [&](Place place) {
    chosen = place;
    return left-- > 0;
  });
  return left < 0;
}

// Where the least of `count` costs is, but for `chosen`: as argmin, of equals the first.
inline int64_t best_but(const double* costs, int64_t count, int64_t stride, int64_t chosen) {
  int64_t best = 0;
  double least_cost = kNever;
  for (int64_t i = 0; i < count; i++)
    if (i != chosen && costs[i * stride] < least_cost) best = i, least_cost = costs[i * stride];
  return best;
}

inline Candidate candidate(const Forecast& found, Place place, double cost) {
  int64_t row = place.row, i = place.column;
  const Prompts& side = row < 0 ? found.local : found.remote;
  int64_t at = row < 0 ? i : row;
  const double *cached = side.cached, *uncached = side.uncached;
  const double *prefill = side.prefill, *ttft = side.ttft;
  for (int64_t n = 0; n < found.num_fetched && row >= 0; n++) {
    const Fetched& one = found.fetched[n];
    if (one.column == i)
      cached = one.cached, uncached = one.uncached, prefill = one.prefill, ttft = one.ttft;
  }
  double factor = row < 0 ? found.table.local(kFactor)[i] * found.humility[i]
                          : found.table.prompt(kFactor)[row];
  return {double(row), double(i), cost, cached[at], uncached[at], side.wait[at], prefill[at],
          ttft[at], factor, found.local.cached[i], found.table.decode(kSeqs)[i], found.tpot[i],
          found.is_full[i]};
}

// The chosen one, then the best other prefill instance for the same decode instance, the best other
// decode instance for the same prefill instance, and the decode instance alone.
inline int64_t listed(const Forecast& found, const Costs& costs, Place chosen,
                      Candidate* candidates) {
  int64_t prefills = found.remote.count, decodes = found.local.count;
  Place picks[kMaxCandidates] = {chosen};
  int64_t num_picks = 1;
  if (prefills && decodes) {
    int64_t other = best_but(costs.pairs + chosen.column, prefills, decodes, chosen.row);
    picks[num_picks++] = {other, chosen.column};
  }
  if (chosen.row >= 0) {
    const double* row = costs.pairs + chosen.row * decodes;
    picks[num_picks++] = {chosen.row, best_but(row, decodes, 1, chosen.column)};
  }
  picks[num_picks++] = {-1, chosen.column};
  int64_t count = 0;
  for (int64_t n = 0; n < num_picks; n++) {
    Place pick = picks[n];
    auto is_pick = [&](const Place& other) {
      return other.row == pick.row && other.column == pick.column;
    };
    if (std::any_of(picks, picks + n, is_pick)) continue;
    double cost = pick.row < 0 ? costs.local[pick.column]
                               : costs.pairs[pick.row * decodes + pick.column];
    if (cost != kNever) candidates[count++] = candidate(found, pick, cost);
  }
  return count;
}

}  // namespace isthmus
