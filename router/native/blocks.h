// Who holds which blocks: blocks.py.
//
// An entry is a block that somebody holds: its hash, its neighbours in the order of use, and the
// number of a set of holders. Entry 0 is both ends of the order. Entries are found through a table of
// places (open, linear probing). Hashes come from prompts, so where they lie depends on a secret.
#pragma once

#include <algorithm>

#include "holder_sets.h"

namespace isthmus {

constexpr int64_t kHashBytes = 16;  // ids.HASH_BYTES

struct Hash {
  uint64_t low, high;

  static Hash at(const char* hashes, int64_t place) {
    Hash hash;
    std::memcpy(&hash, hashes + place * kHashBytes, kHashBytes);
    return hash;
  }
  bool operator==(const Hash& other) const { return low == other.low && high == other.high; }
};

class Blocks {
 public:
  explicit Blocks(uint64_t secret)
      : secret_(secret), places_(kLeastPlaces), entries_(1), set_of_(1) {}

  int64_t size() const { return size_; }
  int64_t held_by(int64_t slot) const {
    return slot < int64_t(num_held_.size()) ? num_held_[slot] : 0;
  }

  // All become the last ones used, parents after their children.
  void store(int64_t slot, const char* hashes, int64_t count) {
    sets_.make_room(slot);
    if (slot >= int64_t(num_held_.size())) num_held_.resize(slot + 1);
    make_room(count);
    Change change(*this, slot, true);
    uint32_t before = entries_[0].previous;  // each goes between it and its parent
    walk(hashes, count, [&](const Hash& hash, uint32_t key) {
      uint32_t entry = find(hash, key);
      if (entry) {
        if (entry == before) before = entries_[entry].previous;
        unlink(entry);
      } else {
        entry = add(hash, key);
      }
      link(entry, before);
      change.make(entry);
      return true;
    });
  }

  void remove(int64_t slot, const char* hashes, int64_t count) {
    if (!held_by(slot)) return;
    Change change(*this, slot, false);
    walk(hashes, count, [&](const Hash& hash, uint32_t key) {
      uint32_t entry = find(hash, key);
      if (entry) change.make(entry);
      return true;
    });
  }

  // Everything that it holds: looks at each entry, in the order of memory.
  void clear(int64_t slot) {
    Change change(*this, slot, false);
    for (uint32_t entry = 1; held_by(slot); entry++)
      if (set_of_[entry]) change.make(entry);
  }

  // Those used longest ago.
  void evict(int64_t count) {
    for (; count > 0 && size_; count--) {
      uint32_t entry = entries_[0].next, set = set_of_[entry];
      each(sets_.words(set), [&](int64_t slot) { num_held_[slot]--; });
      sets_.move(set, 0);
      drop(entry);
    }
  }

  // Writes how many leading hashes each holder has, where it has any. `is_use`: as far as somebody
  // has them they become the last ones used, parents after their children.
  void depths(const char* hashes, int64_t count, bool is_use, double* depths) {
    used_.clear();
    uint32_t last = 0;
    int64_t depth = 0;
    walk(hashes, count, [&](const Hash& hash, uint32_t key) {
      uint32_t entry = find(hash, key);
      if (!entry) return false;
      uint32_t set = set_of_[entry];
      const Word* words = sets_.words(set);
      if (!depth)
        alive_.assign(words, words + sets_.width());
      else if (set != last && !narrow(words, depth, depths))
        return false;
      last = set, depth++;
      used_.push_back(entry);
      return true;
    });
    if (depth) each(alive_.data(), [&](int64_t slot) { depths[slot] = depth; });
    for (size_t i = used_.size(); is_use && i-- > 0;) {
      unlink(used_[i]);
      link(used_[i], entries_[0].previous);
    }
  }

  int64_t width() const { return sets_.width(); }  // words of a set of holders

  // Everything in the order of use, the oldest first: hashes [size, 16], holders [size, width].
  void list(char* hashes, Word* holders) const {
    for (uint32_t entry = entries_[0].next; entry; entry = entries_[entry].next) {
      std::memcpy(hashes, &entries_[entry].hash, kHashBytes);
      std::memcpy(holders, sets_.words(set_of_[entry]), width() * sizeof(Word));
      hashes += kHashBytes, holders += width();
    }
  }

  int64_t num_bytes() const {
    return places_.capacity() * sizeof(Place) + entries_.capacity() * sizeof(Entry) +
           set_of_.capacity() * sizeof(uint32_t) + sets_.num_bytes();
  }

 private:
  static constexpr int64_t kLeastPlaces = 1024;
  static constexpr int64_t kLoad = 7;    // tenths of the places that may be taken
  static constexpr int64_t kChunk = 32;  // blocks whose memory is asked for together

  struct Place {
    uint32_t key;    // of the hash: its low bits are where it should be
    uint32_t entry;  // 0 = free
  };
  struct Entry {
    Hash hash;
    uint32_t previous, next;
  };

  // One holder more or less for block after block, most of which have the holders of the one before.
  class Change {
   public:
    Change(Blocks& blocks, int64_t slot, bool adds) : blocks_(blocks), slot_(slot), adds_(adds) {}

    void make(uint32_t entry) {
      uint32_t& set = blocks_.set_of_[entry];
      if (!is_known_ || set != from_) look(set);
      if (from_ == to_) return;
      set = to_;
      is_known_ = !blocks_.sets_.move(from_, to_);
      blocks_.num_held_[slot_] += adds_ ? 1 : -1;
      if (!to_) blocks_.drop(entry);
    }

   private:
    void look(uint32_t set) {
      bool is_so = blocks_.sets_.has(set, slot_) == adds_;
      from_ = set, to_ = is_so ? set : blocks_.sets_.toggled(set, slot_), is_known_ = true;
    }

    Blocks& blocks_;
    int64_t slot_;
    bool adds_, is_known_ = false;
    uint32_t from_ = 0, to_ = 0;
  };

  template <typename Action>
  void each(const Word* words, Action action) const {
    for (int64_t place = 0; place < sets_.width(); place++)
      for (Word rest = words[place]; rest; rest &= rest - 1)
        action(place * kWordBits + __builtin_ctzll(rest));
  }

  // Whose blocks end here. False when nobody has more.
  bool narrow(const Word* words, int64_t depth, double* depths) {
    bool is_any = false;
    for (int64_t place = 0; place < sets_.width(); place++) {
      for (Word rest = alive_[place] & ~words[place]; rest; rest &= rest - 1)
        depths[place * kWordBits + __builtin_ctzll(rest)] = depth;
      alive_[place] &= words[place];
      is_any = is_any || alive_[place];
    }
    return is_any;
  }

  uint32_t key(const Hash& hash) const {
    return spread(hash.low ^ spread(hash.high ^ secret_)) >> 32;
  }
  size_t home(uint32_t key) const { return key & (places_.size() - 1); }
  size_t after(size_t place) const { return (place + 1) & (places_.size() - 1); }

  // Of an entry with this hash, or a free one.
  size_t place_of(const Hash& hash, uint32_t key) const {
    size_t place = home(key);
    for (; places_[place].entry; place = after(place))
      if (places_[place].key == key && entries_[places_[place].entry].hash == hash) break;
    return place;
  }

  uint32_t find(const Hash& hash, uint32_t key) const {
    return places_[place_of(hash, key)].entry;
  }

  // Does `action` for each until that returns false. The blocks of a prompt lie anywhere in memory:
  // asked for together they come in little more than the time of one.
  template <typename Action>
  void walk(const char* hashes, int64_t count, Action action) const {
    uint32_t keys[kChunk];
    for (int64_t first = 0; first < count; first += kChunk) {
      int64_t size = std::min(kChunk, count - first);
      for (int64_t i = 0; i < size; i++) {
        keys[i] = key(Hash::at(hashes, first + i));
        __builtin_prefetch(&places_[home(keys[i])], 1);
      }
      for (int64_t i = 0; i < size; i++) {
        uint32_t entry = places_[home(keys[i])].entry;
        __builtin_prefetch(&entries_[entry], 1);
        __builtin_prefetch(&set_of_[entry], 1);
      }
      for (int64_t i = 0; i < size; i++)
        if (!action(Hash::at(hashes, first + i), keys[i])) return;
    }
  }

  void make_room(int64_t count) {
    size_t wanted = places_.size();
    while ((size_ + count) * 10 > int64_t(wanted) * kLoad) wanted *= 2;
    if (wanted == places_.size()) return;
    std::vector<Place> old(wanted);
    old.swap(places_);
    for (const Place& place : old)
      if (place.entry) {
        size_t to = home(place.key);
        while (places_[to].entry) to = after(to);
        places_[to] = place;
      }
  }

  uint32_t add(const Hash& hash, uint32_t key) {
    uint32_t entry = free_;
    if (entry) {
      free_ = entries_[entry].next;
    } else {
      entry = entries_.size();
      if (entries_.size() == entries_.capacity()) {  // by less than vectors do
        entries_.reserve(entries_.size() + entries_.size() / 8 + kLeastPlaces);
        set_of_.reserve(entries_.capacity());
      }
      entries_.push_back({});
      set_of_.push_back(0);
    }
    entries_[entry].hash = hash;
    places_[place_of(hash, key)] = {key, entry};
    size_++;
    return entry;
  }

  void drop(uint32_t entry) {
    size_t gap = place_of(entries_[entry].hash, key(entries_[entry].hash));
    // Whoever had to go past the gap may now be nearer to where it should be.
    for (size_t place = after(gap); places_[place].entry; place = after(place)) {
      size_t mask = places_.size() - 1;
      if (((place - home(places_[place].key)) & mask) < ((place - gap) & mask)) continue;
      places_[gap] = places_[place];
      gap = place;
    }
    places_[gap] = {0, 0};
    unlink(entry);
    set_of_[entry] = 0;
    entries_[entry].next = free_;
    free_ = entry;
    size_--;
  }

  void unlink(uint32_t entry) {
    const Entry& gone = entries_[entry];
    entries_[gone.previous].next = gone.next;
    entries_[gone.next].previous = gone.previous;
  }

  void link(uint32_t entry, uint32_t before) {
    uint32_t after = entries_[before].next;
    entries_[entry].previous = before, entries_[entry].next = after;
    entries_[before].next = entry;
    entries_[after].previous = entry;
  }

  uint64_t secret_;
  int64_t size_ = 0;
  std::vector<Place> places_;  // a power of two
  std::vector<Entry> entries_;
  std::vector<uint32_t> set_of_;  // by entry; 0 = free
  uint32_t free_ = 0;             // an entry, whose next one is the next; 0 = none
  std::vector<int64_t> num_held_;  // by slot
  HolderSets sets_;
  std::vector<Word> alive_;     // of a lookup: who has had all blocks yet
  std::vector<uint32_t> used_;  // by it
};

}  // namespace isthmus
