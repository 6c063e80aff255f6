// What serving a query would cost: costs.py, with the same names and the same order of operations.
#pragma once

#include "forecast.h"

namespace isthmus {

constexpr double kGapFactor = 3.0, kGapPenalty = 2.0, kOverlap = 0.9;
constexpr double kHost = 0.5, kBalance = 0.1, kTightness = 0.02;

// Infinite where a promise would be broken or, but for `least_pair`, nothing can start now.
struct Costs {
  double *own, *best, *rest, *local, *travel, *last, *pairs;  // [P] ×2, [D] ×4, [P, D]
  double least_pair = kNever;

  explicit Costs(const Forecast& found) {
    int64_t prefills = found.remote.count, decodes = found.local.count;
    own = found.costs;
    best = own + prefills;  // of each prefill instance's pairs
    rest = best + prefills;
    local = rest + decodes;
    travel = local + decodes;
    last = travel + decodes;
    pairs = last + decodes;
  }

  static int64_t size(int64_t prefills, int64_t decodes) {
    return 2 * prefills + 4 * decodes + prefills * decodes;
  }
};

// costs: of the instances from row `first` on.
inline void favour(const Query& query, double* costs, int64_t first, int64_t count) {
  for (int64_t row : {query.last_prefill, query.last_decode})
    if (row >= first && row < first + count) costs[row - first] -= query.session_worth_ms;
}

// Of the prefill instance alone, infinite where it may not be chosen or would be late.
inline void prefill_costs(const Forecast& found, const double* prefill, const double* ttft,
                          double ratio, double* own) {
  const Query& query = found.query;
  const Prompts& remote = found.remote;
  const double* token = found.table.prompt(kToken);
  double fastest = least(token, remote.count);
  for (int64_t row = 0; row < remote.count; row++) {
    if (!query.is_urgent()) {
      own[row] = ttft[row] + (query.price_prefill - 1.0) * prefill[row];
      continue;
    }
    double cost = prefill[row] * (fastest / std::max(token[row], 1e-9));
    cost += remote.wait[row];
    cost += query.line_ms;
    cost *= query.price_prefill;
    cost -= kTightness * ttft[row];
    own[row] = cost;
  }
  favour(query, own, 0, remote.count);
  for (int64_t row = 0; row < remote.count; row++) {
    if (query.is_urgent() && quantile_of(ttft[row], ratio) > query.left_ms) own[row] = kNever;
    own[row] += remote.barred[row];
  }
}

// Of the answer alone.
inline void decode_costs(const Forecast& found, double* rest) {
  const Query& query = found.query;
  const double *capacity = found.table.decode(kCapacity), *seqs = found.table.decode(kSeqs);
  int64_t count = found.local.count;
  for (int64_t i = 0; i < count; i++) {
    double own = query.output_tokens * found.tpot[i];
    double share = (query.num_tokens + query.output_tokens) / capacity[i];
    if (!query.is_urgent()) {
      share *= query.price_decode - 1.0;
      share += 1.0;
    } else {
      share *= query.price_decode;
      share += !query.has_tpot() ? kBalance : seqs[i] < 1.0 ? kHost : 0.0;
    }
    own *= share;
    if (query.has_tpot()) own += query.worth_ms * found.own_missed[i];
    rest[i] = own;
  }
  favour(query, rest, found.table.num_prefills, count);
}

inline double gap_cost(double late) { return std::max(late, 0.0) * kGapPenalty; }

// Where links and steps are alike, what is left of a transfer is much the same for all prefills.
inline void alike_pairs(const Forecast& found, const Costs& costs, const double* rest) {
  const Query& query = found.query;
  int64_t decodes = found.local.count;
  const double *token_bytes = found.table.decode(kTokenBytes), *uncached = found.local.uncached;
  double gap = kGapFactor * query.tpot_ms;
  for (int64_t i = 0; i < decodes; i++) {
    costs.travel[i] = uncached[i] * token_bytes[i] / query.rate;
    costs.last[i] = std::min(query.budget / std::max(uncached[i], 1.0), 1.0) * costs.travel[i];
  }
  for (int64_t row = 0; row < found.remote.count; row++) {
    double own = costs.own[row], hidden = kOverlap * found.remote.prefill[row];
    double* pairs = costs.pairs + row * decodes;
    for (int64_t i = 0; i < decodes; i++) {
      double exposed = std::max(costs.travel[i] - hidden, costs.last[i]) + kSetupMs;
      double cost = own + rest[i] + exposed;
      pairs[i] = cost + gap_cost(exposed + found.quantile[i] - gap);
    }
  }
}

inline void unlike_pairs(const Forecast& found, const Costs& costs, const double* rest) {
  const Query& query = found.query;
  int64_t decodes = found.local.count;
  const double *token_bytes = found.table.decode(kTokenBytes), *uncached = found.local.uncached;
  const double* budget = found.table.prompt(kBudget);
  double gap = kGapFactor * query.tpot_ms;
  for (int64_t row = 0; row < found.remote.count; row++) {
    double own = costs.own[row], hidden = kOverlap * found.remote.prefill[row];
    const double* rates = found.table.rates + row * decodes;
    double* pairs = costs.pairs + row * decodes;
    for (int64_t i = 0; i < decodes; i++) {
      double travel = uncached[i] * token_bytes[i] / rates[i];
      double last = std::min(budget[row] / std::max(uncached[i], 1.0), 1.0) * travel;
      double exposed = std::max(travel - hidden, last) + kSetupMs;
      double cost = own + rest[i] + exposed;
      pairs[i] = cost + gap_cost(exposed + found.quantile[i] - gap);
    }
  }
}

// As pair_costs, of pairs with the decode instance that KV is fetched from.
inline void fetched_costs(const Forecast& found, const Fetched& one, const Costs& costs,
                          double rest, double ratio) {
  const Query& query = found.query;
  const double* budget = found.table.prompt(kBudget);
  int64_t decodes = found.local.count;
  double uncached = found.local.uncached[one.column];
  double gap = found.quantile[one.column] - kGapFactor * query.tpot_ms;
  prefill_costs(found, one.prefill, one.ttft, ratio, costs.own);
  for (int64_t row = 0; row < found.remote.count; row++) {
    double rate = found.table.rates[row * decodes + one.column];
    double travel = uncached * found.table.decode(kTokenBytes)[one.column] / rate;
    double last = std::min(budget[row] / std::max(uncached, 1.0), 1.0);
    double hidden = kOverlap * one.prefill[row];
    double exposed = kSetupMs + std::max(travel - hidden, travel * last);
    double cost = costs.own[row] + rest + exposed;
    costs.pairs[row * decodes + one.column] = cost + gap_cost(exposed + gap);
  }
}

// Costs of pairs: goodput._pairs.
inline void pair_costs(const Forecast& found, Costs& costs, double ratio) {
  const Query& query = found.query;
  int64_t prefills = found.remote.count, decodes = found.local.count;
  prefill_costs(found, found.remote.prefill, found.remote.ttft, ratio, costs.own);
  double* rest = costs.local;  // free until local_costs
  for (int64_t i = 0; i < decodes; i++) {
    bool may_pair = found.may_decode[i] != 0.0 && found.is_forced[i] == 0.0;
    rest[i] = may_pair ? costs.rest[i] : kNever;
  }
  if (query.rate != 0.0 && query.budget != 0.0)
    alike_pairs(found, costs, rest);
  else
    unlike_pairs(found, costs, rest);
  for (int64_t n = 0; n < found.num_fetched; n++) {
    const Fetched& one = found.fetched[n];
    fetched_costs(found, one, costs, rest[one.column], ratio);
  }
  const double* ahead = found.table.prompt(kAhead);
  for (int64_t row = 0; row < prefills; row++) {
    costs.best[row] = least(costs.pairs + row * decodes, decodes);
    costs.least_pair = std::min(costs.least_pair, costs.best[row]);
    if (found.remote.wait[row] <= ahead[row]) continue;
    std::fill_n(costs.pairs + row * decodes, decodes, kNever);
    costs.best[row] = kNever;
  }
}

// Costs of local prefills: goodput._alone.
inline void local_costs(const Forecast& found, const Costs& costs, double ratio) {
  const Query& query = found.query;
  const Table& table = found.table;
  const Prompts& local = found.local;
  const double* seqs = table.decode(kSeqs);
  const double* ahead = table.local(kAhead);
  for (int64_t i = 0; i < local.count; i++) {
    bool may = found.may_decode[i] != 0.0 && local.wait[i] <= ahead[i];
    if (query.is_urgent()) may = may && quantile_of(local.ttft[i], ratio) <= query.left_ms;
    double total;
    if (!query.is_urgent()) {
      total = costs.rest[i] + local.ttft[i] +
              local.prefill[i] * (1.0 + seqs[i]) * query.price_decode;
    } else {
      total = local.prefill[i] + local.wait[i];
      total *= query.price_decode;
      total += costs.rest[i];
    }
    bool is_dear = query.is_urgent() && table.num_prefills && total > costs.least_pair;
    costs.local[i] = may && !is_dear ? total : kNever;
  }
}

}  // namespace isthmus
