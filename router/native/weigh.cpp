// GoodputPolicy.weigh over one table in one call: goodput.py.
#include "choice.h"

namespace isthmus {
namespace {

// What an idle cluster could do, and when somebody of this one is free; and how wrong the TTFT of a
// remote and of a local prefill may turn out to be.
struct Ratios {
  double remote, local;
};

Ratios outlook(const Forecast& found, Answer& answer) {
  const Query& query = found.query;
  const Prompts &remote = found.remote, &local = found.local;
  bool can_pair = false;
  for (int64_t i = 0; i < local.count && remote.num_usable; i++)
    can_pair = can_pair || (local.is_usable(i) && found.is_forced[i] == 0.0);
  double best_remote = kNever;
  if (can_pair) {
    best_remote = least_usable(remote, remote.prefill);
    for (int64_t n = 0; n < found.num_fetched; n++)
      best_remote = std::min(best_remote, least_usable(remote, found.fetched[n].prefill));
  }
  double best_local = least_usable(local, local.prefill);
  double work = std::min(best_remote, best_local);
  double most = most_ratio(query.ttft_ms, work);
  Ratios ratios = {within(query.remote, most), within(query.local, most)};
  double ratio = best_remote <= best_local ? ratios.remote : ratios.local;
  const Prompts& side = can_pair ? remote : local;
  const double* ahead = can_pair ? found.table.prompt(kAhead) : found.table.local(kAhead);
  double ready = kNever;
  for (int64_t row = 0; row < side.count; row++)
    ready = std::min(ready, side.wait[row] - ahead[row] + side.barred[row]);
  answer.work = work;
  answer.floor_quantile = (work + kFloorMs) * ratio - kFloorMs;
  answer.least_ttft = found.least_ttft;
  answer.least_tpot = found.least_tpot;
  answer.ready = std::max(0.0, ready);
  answer.num_workers = std::max<int64_t>(1, side.num_usable);
  return ratios;
}

Obstacle obstacle(const Forecast& found) {
  const Prompts &remote = found.remote, &local = found.local;
  const double* ahead = found.table.prompt(kAhead);
  bool has_room = false, may_decode = false, starts = false;
  for (int64_t i = 0; i < local.count; i++) {
    has_room = has_room || (local.is_usable(i) && found.is_full[i] == 0.0);
    may_decode = may_decode || found.may_decode[i] != 0.0;
  }
  for (int64_t row = 0; row < remote.count; row++)
    starts = starts || (remote.is_usable(row) && remote.wait[row] <= ahead[row]);
  if (!local.num_usable) return kNoDecodeInstance;
  if (!has_room) return kDecodeFull;
  if (!may_decode) return kTpot;
  return remote.num_usable && !starts ? kPrefillBusy : kTtft;
}

}  // namespace

extern "C" int64_t isthmus_workspace_size(int64_t num_prefills, int64_t num_decodes) {
  return Forecast::size(num_prefills, num_decodes) + Costs::size(num_prefills, num_decodes);
}

// How many places were possible for the query that was weighed last.
extern "C" int64_t isthmus_num_places(const Table* table, const Query* query) {
  Forecast found(*table, *query);
  return num_places(found, Costs(found));
}

extern "C" void isthmus_weigh(const Table* table, const Query* query, Answer* answer) {
  Forecast found(*table, *query);
  forecast(found);
  Ratios ratios = outlook(found, *answer);
  bool may_any = false;
  for (int64_t i = 0; i < found.local.count; i++) {
    bool may = found.is_kept[i] > found.is_full[i] && found.local.is_usable(i);
    found.may_decode[i] = may;
    may_any = may_any || may;
  }
  answer->num_candidates = 0;
  answer->obstacle = kNothing;
  Place chosen;
  bool is_possible = false;
  if (may_any) {
    Costs costs(found);
    decode_costs(found, costs.rest);
    pair_costs(found, costs, ratios.remote);
    local_costs(found, costs, ratios.local);
    is_possible = query->pick < 0 ? cheapest(found, costs, chosen) : picked(found, costs, chosen);
    if (is_possible)
      answer->num_candidates = listed(found, costs, chosen, answer->candidates);
  }
  if (!is_possible) answer->obstacle = obstacle(found);
}

}  // namespace isthmus
