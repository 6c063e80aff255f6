// What would become of one query on each instance: forecast.py, quantiles.py and lengths.py, with
// the same names and the same order of operations, so that rounding is the same too.
#pragma once

#include <algorithm>
#include <cmath>

#include "parts.h"

namespace isthmus {

constexpr double kMaxShare = 0.9;           // forecast.MAX_SHARE
constexpr double kPromptMemoryMs = 4000.0;  // cluster_view.PROMPT_MEMORY_MS
constexpr double kSetupMs = 2.0;            // links.SETUP_MS
constexpr int64_t kEnough = 20;             // quantiles.ENOUGH
constexpr double kPriorSpread = 0.25;       // quantiles.PRIOR_SPREAD
constexpr double kTolerance = 0.03;         // quantiles.TOLERANCE

// --- how wrong a prediction is -------------------------------------------------------------------

inline double quantile_of(double predicted, double ratio) {
  return (predicted + kFloorMs) * ratio - kFloorMs;
}

inline double most_ratio(double target, double floor) {
  if (target == kNever || floor == kNever) return kNever;
  return std::max(1.0, (target + kFloorMs) / (floor + kFloorMs));
}

inline double at(const Residuals& found, double level) {
  double top = found.ordered[found.count - 1];
  if (level >= 1.0) return top * (1.0 + (level - 1.0) * 4);
  double place = level * (found.count - 1);
  int64_t below = place, above = std::min(below + 1, found.count - 1);
  double low = found.ordered[below], high = found.ordered[above];
  return low + (high - low) * (place - below);
}

inline double within(const Residuals& found, double most) {
  if (found.ratio <= most) return found.ratio;
  if (found.count < kEnough) return most;
  const double* place = std::lower_bound(found.ordered, found.ordered + found.count, most);
  double share = double(place - found.ordered) / found.count;
  return std::min(most, at(found, std::max(0.0, share - kTolerance)));
}

inline double share_above(const Residuals& found, double ratio) {
  double guess = std::min(std::max((1.0 - ratio) / (2 * kPriorSpread) + 0.5, 0.0), 1.0);
  if (!found.count) return guess;
  const double* place = std::upper_bound(found.ordered, found.ordered + found.count, ratio);
  double seen = 1.0 - double(place - found.ordered) / found.count;
  double share = std::min(1.0, double(found.count) / kEnough);
  return share * seen + (1.0 - share) * guess;
}

// --- columns -------------------------------------------------------------------------------------

// One side's columns.
struct Prompts {
  int64_t count;
  double *cached, *uncached, *wait, *prefill, *ttft, *barred;
  int64_t num_usable;

  bool is_usable(int64_t row) const { return barred[row] == 0.0; }
};

inline double least_usable(const Prompts& side, const double* column) {
  double least = kNever;
  for (int64_t row = 0; row < side.count; row++) least = std::min(least, column[row] + side.barred[row]);
  return least;
}

inline double least(const double* column, int64_t count) {
  // The least is the same in any order, and several chains of comparisons run side by side.
  double found[8] = {kNever, kNever, kNever, kNever, kNever, kNever, kNever, kNever};
  int64_t row = 0;
  for (; row + 8 <= count; row += 8)
    for (int i = 0; i < 8; i++) found[i] = column[row + i] < found[i] ? column[row + i] : found[i];
  for (; row < count; row++) found[0] = std::min(found[0], column[row]);
  for (int i = 1; i < 8; i++) found[0] = std::min(found[0], found[i]);
  return found[0];
}

// The prefill instances, for pairs with the decode instance of `column` that they fetch KV from.
struct Fetched {
  int64_t column;
  double *cached, *uncached, *prefill, *ttft;
};

struct Forecast {
  const Table& table;
  const Query& query;
  Prompts all, remote, local;
  double *pairs, *chunks, *alone;  // [P + D]
  double *humility, *step, *tpot, *quantile, *own_missed;  // [D]
  double *is_full, *is_kept, *is_forced, *may_decode;                      // [D]: 0 or 1
  Fetched fetched[kMaxHolders];
  int64_t num_fetched = 0;
  double handoff = 0.0, least_ttft = kNever, least_tpot = kNever;

  Forecast(const Table& table, const Query& query) : table(table), query(query) {
    double* free = table.workspace;
    auto take = [&](int64_t count) {
      double* taken = free;
      free += count;
      return taken;
    };
    int64_t prefills = table.num_prefills, decodes = table.num_decodes, count = table.count();
    all = {count, take(count), take(count), take(count), take(count), take(count), take(count), 0};
    auto part = [&](int64_t first, int64_t size) {
      return Prompts{size, all.cached + first, all.uncached + first, all.wait + first,
                     all.prefill + first, all.ttft + first, all.barred + first, 0};
    };
    remote = part(0, prefills);
    local = part(prefills, decodes);
    for (double** column : {&pairs, &chunks, &alone}) *column = take(count);
    for (double** column : {&humility, &step, &tpot, &quantile, &own_missed, &is_full,
                            &is_kept, &is_forced, &may_decode})
      *column = take(decodes);
    for (Fetched& one : fetched)
      one = {0, take(prefills), take(prefills), take(prefills), take(prefills)};
    costs = free;
  }

  // Doubles that it takes of a workspace, whose rest begins at `costs`.
  static int64_t size(int64_t prefills, int64_t decodes) {
    return 9 * (prefills + decodes) + 9 * decodes + 4 * kMaxHolders * prefills;
  }

  double* costs;
};

// forecast._unreported, of one kind of instances.
inline void unreported(Forecast& found, int64_t begin, int64_t end) {
  const Table& table = found.table;
  const double *heard_at = table.prompt(kHeardAt), *barred = table.prompt(kBarred);
  const double* strange = table.prompt(kStrange);
  double now = found.query.now_ms, stale = found.query.stale_ms, freshest = kNever;
  for (int64_t row = begin; row < end; row++)
    freshest = std::min(freshest, std::max(now - heard_at[row], 0.0) + barred[row]);
  for (int64_t row = begin; row < end; row++) {
    double age = std::max(now - heard_at[row], 0.0);
    double trusted = freshest > stale ? age : std::min(age, stale);
    double work = std::max(strange[row] - trusted, 0.0);
    found.all.wait[row] += work + std::min(age - trusted, kMaxDoubtMs);
  }
}

inline void waits(Forecast& found) {
  const Table& table = found.table;
  const Query& query = found.query;
  int64_t count = table.count();
  const double *factor = table.prompt(kFactor), *prompts = table.prompt(kPrompts);
  const double *head = table.prompt(kHead), *head_since = table.prompt(kHeadSince);
  const double *head_late = table.prompt(kHeadLate), *heard_at = table.prompt(kHeardAt);
  double *wait = found.all.wait, now = query.now_ms, stale = query.stale_ms;
  for (int64_t row = 0; row < count; row++) {
    double done = (now - head_since[row]) / factor[row];
    wait[row] = prompts[row] - std::min(head[row], done);
    wait[row] += std::max(done - head_late[row], 0.0);
  }
  if (query.has_strange || now - least(heard_at, count) > stale) {
    unreported(found, 0, table.num_prefills);
    unreported(found, table.num_prefills, count);
  }
  for (int64_t row = 0; row < count; row++) wait[row] *= factor[row];
}

inline void prompts(Forecast& found) {
  const Table& table = found.table;
  const Query& query = found.query;
  int64_t count = table.count();
  const double *base = table.prompt(kBase), *token = table.prompt(kToken);
  const double *pair = table.prompt(kPair), *factor = table.prompt(kFactor);
  const double *budget = table.prompt(kBudget), *barred = table.prompt(kBarred);
  const double *sizes = table.block_sizes, num_tokens = query.num_tokens;
  Prompts& all = found.all;
  for (int64_t row = 0; row < count; row++) {
    double depth = query.needs_whole ? 0.0 : query.depths[row];
    double blocks = std::min(depth, std::floor((num_tokens - 1) / sizes[row]));
    double cached = blocks * sizes[row], uncached = num_tokens - cached;
    double pairs = uncached / 2 + cached, chunks = std::ceil(uncached / budget[row]);
    double prefill = base[row] * chunks;
    prefill += token[row] * uncached;
    prefill += pair[row] * uncached * pairs;
    bool is_unfit = num_tokens > table.longest[row];
    all.cached[row] = cached;
    all.uncached[row] = uncached;
    all.prefill[row] = prefill;
    all.ttft[row] = all.wait[row] + prefill;
    all.barred[row] = is_unfit ? kNever : barred[row];
    found.pairs[row] = pairs;
    found.chunks[row] = chunks;
    found.alone[row] = is_unfit ? kNever : prefill / factor[row];
  }
  for (int64_t i = 0; i < query.num_excluded; i++) all.barred[query.excluded[i]] = kNever;
  for (Prompts* side : {&found.remote, &found.local})
    for (int64_t row = 0; row < side->count; row++) side->num_usable += side->is_usable(row);
  found.least_ttft = least(found.alone, count);
}

inline void humble(Forecast& found) {
  const Table& table = found.table;
  const Prompts &remote = found.remote, &local = found.local;
  const double* token = table.prompt(kToken);
  int64_t row = 0;
  double quickest = kNever;
  for (int64_t i = 0; i < remote.count; i++)
    if (token[i] + remote.barred[i] < quickest) quickest = token[i], row = i;
  double base = table.prompt(kBase)[row], pair = table.prompt(kPair)[row];
  double budget = table.prompt(kBudget)[row];
  const double* pairs = found.pairs + table.num_prefills;
  for (int64_t i = 0; i < local.count; i++) {
    double rival = base * std::ceil(local.uncached[i] / budget);
    rival += token[row] * local.uncached[i];
    rival += pair * local.uncached[i] * pairs[i];
    rival = std::max(rival, local.prefill[i]);
    rival = table.is_mixed[i] != 0.0 ? local.prefill[i] : rival;
    found.humility[i] = rival / local.prefill[i];
    local.prefill[i] = rival;
  }
}

// Of the batch at the handoff, and held up by prompts beside it.
inline void steps(Forecast& found) {
  const Table& table = found.table;
  const Query& query = found.query;
  const Prompts& local = found.local;
  double output = query.output_tokens, handoff = found.handoff;
  const double *base = table.decode(kDecodeBase), *seq = table.decode(kSeq);
  const double *ctx = table.decode(kCtx), *large_batch = table.decode(kLargeBatch);
  const double *large_base = table.decode(kLargeBase), *large_seq = table.decode(kLargeSeq);
  const double *large_ctx = table.decode(kLargeCtx), *seqs = table.decode(kSeqs);
  const double *there = table.decode(kContext), *now_step = table.decode(kStep);
  const double *first = table.decode(kFirst), *factor = table.decode(kDecodeFactor);
  const double *prompt = table.decode(kPrompt), *prompt_at = table.decode(kPromptAt);
  const double* chunks = found.chunks + table.num_prefills;
  const double* tightest = table.decode(kTightest);
  double *step = found.step, *tpot = found.tpot, *alone = found.alone + table.num_prefills;
  for (int64_t i = 0; i < local.count; i++) {
    double stay = output * now_step[i];
    stay = 1.0 - std::min(handoff / std::max(stay, 1.0), 0.9);
    double context = there[i] * stay;
    context += query.num_tokens;
    context += output / 2;
    stay *= seqs[i];
    stay += 1;
    double small = base[i] + seq[i] * stay;
    small += ctx[i] * context;
    double large = large_base[i] + large_seq[i] * stay + large_ctx[i] * context;
    step[i] = stay >= large_batch[i] ? large : small;
    double pace = kPace * tightest[i];
    double beside = (local.wait[i] + local.prefill[i]) /
                    std::max(pace - now_step[i], kLeastShare * pace);
    beside = std::min(beside, output);
    beside *= now_step[i];
    local.prefill[i] = local.prefill[i] + std::max(beside, chunks[i] * (step[i] - base[i]));
    local.ttft[i] = local.wait[i] + local.prefill[i];
    small = first[i] + ctx[i] * query.num_tokens;
    large = large_base[i] + large_seq[i] + large_ctx[i] * query.num_tokens;
    alone[i] = large_batch[i] <= 1.0 ? large : small;
    found.least_tpot = std::min(found.least_tpot, alone[i] / factor[i]);
  }
  for (int64_t i = 0; i < local.count; i++) {
    tpot[i] = step[i];
    if (prompt[i] != 0.0) {
      double decayed = prompt[i] * std::exp((prompt_at[i] - query.now_ms) / kPromptMemoryMs);
      tpot[i] = step[i] / (1.0 - std::min(decayed / kPromptMemoryMs, kMaxShare));
    }
    double left = local.is_usable(i) ? std::max(local.wait[i] - handoff, 0.0) : 0.0;
    tpot[i] = std::max(tpot[i], step[i] + left / output);
    if (query.has_tpot()) tpot[i] = std::min(tpot[i], std::max(step[i], kPace * query.tpot_ms));
  }
}

inline void decodes(Forecast& found) {
  const Table& table = found.table;
  const Query& query = found.query;
  const Prompts& local = found.local;
  const double *room = table.decode(kRoom), *sizes = table.decode(kBlockSize);
  const double* tightest = table.decode(kTightest);
  steps(found);
  const double* step = found.step;
  double least_alone = least(found.alone + table.num_prefills, local.count);
  double ratio = within(query.tpot, most_ratio(query.tpot_ms, least_alone));
  double limit = query.tpot_ms;
  for (int64_t i = 0; i < local.count; i++) {
    double needed = std::floor(query.num_tokens / sizes[i]) + 1 - local.cached[i] / sizes[i];
    found.is_full[i] = needed > room[i];
    found.quantile[i] = quantile_of(step[i], ratio);
  }
  if (query.left_alone >= table.num_prefills)
    found.is_full[query.left_alone - table.num_prefills] = 1.0;
  for (int64_t i = 0; i < local.count; i++) {
    double most = limit;
    found.own_missed[i] = 0.0;
    if (query.has_tpot()) {
      double ratio_left = (query.tpot_ms + kFloorMs) / (step[i] + kFloorMs);
      found.own_missed[i] = share_above(query.tpot, ratio_left);
    }
    if (query.spares_residents) most = std::min(tightest[i], most);
    found.is_kept[i] = found.quantile[i] <= most;
    found.is_forced[i] = table.is_mixed[i] != 0.0 || local.uncached[i] < query.min_remote_tokens;
  }
}

// For the few decode instances that hold most of the prompt.
inline void fetches(Forecast& found) {
  const Table& table = found.table;
  const Query& query = found.query;
  const Prompts &remote = found.remote, &local = found.local;
  if (!remote.num_usable || query.needs_whole) return;
  double enough = kNever;
  for (int64_t row = 0; row < remote.count; row++)
    enough = std::min(enough, remote.cached[row] + table.fetch_min[row]);
  if (enough == kNever) return;
  // Of more than there is room for, those that hold most; of equals the last ones.
  for (int64_t i = 0; i < local.count; i++) {
    if (local.cached[i] < enough) continue;
    int64_t place = found.num_fetched;
    if (place == kMaxHolders) {
      place = 0;
      for (int64_t other = 1; other < kMaxHolders; other++) {
        double one = local.cached[found.fetched[other].column];
        double least_one = local.cached[found.fetched[place].column];
        int64_t column = found.fetched[other].column;
        if (one < least_one || (one == least_one && column < found.fetched[place].column))
          place = other;
      }
      if (local.cached[i] < local.cached[found.fetched[place].column]) continue;
    } else {
      found.num_fetched++;
    }
    found.fetched[place].column = i;
  }
  const double *base = table.prompt(kBase), *token = table.prompt(kToken);
  const double *pair = table.prompt(kPair), *budget = table.prompt(kBudget);
  const double *sizes = table.block_sizes, *token_bytes = table.decode(kTokenBytes);
  for (int64_t n = 0; n < found.num_fetched; n++) {
    Fetched& one = found.fetched[n];
    double held = std::min(local.cached[one.column], query.num_tokens - 1);
    for (int64_t row = 0; row < remote.count; row++) {
      double blocks = std::floor(held / sizes[row]) * sizes[row];
      double missing = blocks - remote.cached[row];
      bool is_fetched = missing >= table.fetch_min[row];
      double cached = is_fetched ? blocks : remote.cached[row];
      double uncached = query.num_tokens - cached;
      double rate = table.rates[row * table.num_decodes + one.column];
      double travel = missing * token_bytes[one.column] / rate;
      double prefill = kSetupMs + travel + base[row] * std::ceil(uncached / budget[row]);
      prefill += token[row] * uncached + pair[row] * uncached * (cached + uncached / 2);
      one.cached[row] = cached;
      one.uncached[row] = uncached;
      one.prefill[row] = is_fetched ? prefill : remote.prefill[row];
      one.ttft[row] = remote.wait[row] + one.prefill[row];
    }
  }
}

inline void forecast(Forecast& found) {
  waits(found);
  prompts(found);
  for (int64_t i = 0; i < found.local.count; i++) found.humility[i] = 1.0;
  if (found.remote.num_usable) {
    humble(found);
    found.handoff = least_usable(found.remote, found.remote.ttft);
  }
  decodes(found);
  fetches(found);
}

}  // namespace isthmus
