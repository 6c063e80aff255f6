// Sets of holders, each kept once: there are millions of blocks and few sets of who has them.
#pragma once

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace isthmus {

using Word = uint64_t;
constexpr int64_t kWordBits = 64;

// Spreads bits: SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
inline uint64_t spread(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

// By number, each with how many blocks have it; 0 = nobody. One that no block has any more is
// forgotten, and its number given to another. A set is found by the exclusive or of its members'
// marks, so that one member more or less is one operation.
class HolderSets {
 public:
  HolderSets() : words_(1), marks_(1), num_blocks_(1) {}

  int64_t width() const { return width_; }  // words of a set
  int64_t size() const { return num_blocks_.size(); }
  const Word* words(uint32_t set) const { return words_.data() + set * width_; }
  bool has(uint32_t set, int64_t slot) const {
    return words(set)[slot / kWordBits] >> (slot % kWordBits) & 1;
  }

  void make_room(int64_t slot) {
    int64_t wider = slot / kWordBits + 1;
    if (wider <= width_) return;
    std::vector<Word> words(size() * wider);
    for (int64_t set = 0; set < size(); set++)
      std::memcpy(&words[set * wider], this->words(set), width_ * sizeof(Word));
    words_.swap(words);
    width_ = wider;
  }

  // `set` and `slot`, or without it where it is in the set. The caller has a block for what is new.
  uint32_t toggled(uint32_t set, int64_t slot) {
    uint64_t mark = marks_[set] ^ spread(slot);
    std::vector<Word> wanted(words(set), words(set) + width_);
    wanted[slot / kWordBits] ^= Word(1) << (slot % kWordBits);
    if (wanted == std::vector<Word>(width_)) return 0;
    auto range = by_mark_.equal_range(mark);
    for (auto found = range.first; found != range.second; ++found)
      if (!std::memcmp(words(found->second), wanted.data(), width_ * sizeof(Word)))
        return found->second;
    uint32_t made = unused_number();
    std::memcpy(&words_[made * width_], wanted.data(), width_ * sizeof(Word));
    marks_[made] = mark;
    by_mark_.emplace(mark, made);
    return made;
  }

  // A block had `from` and has `to`. True when `from` is forgotten.
  bool move(uint32_t from, uint32_t to) {
    if (to) num_blocks_[to]++;
    if (!from || --num_blocks_[from]) return false;
    auto range = by_mark_.equal_range(marks_[from]);
    for (auto found = range.first; found != range.second; ++found)
      if (found->second == from) {
        by_mark_.erase(found);
        break;
      }
    free_.push_back(from);
    return true;
  }

  int64_t num_bytes() const {
    constexpr int64_t kNode = 6 * sizeof(void*);  // of the map, about
    return words_.capacity() * sizeof(Word) + marks_.capacity() * sizeof(uint64_t) +
           num_blocks_.capacity() * sizeof(int64_t) + by_mark_.size() * kNode;
  }

 private:
  uint32_t unused_number() {
    if (!free_.empty()) {
      uint32_t number = free_.back();
      free_.pop_back();
      return number;
    }
    words_.resize(words_.size() + width_);
    marks_.push_back(0);
    num_blocks_.push_back(0);
    return size() - 1;
  }

  int64_t width_ = 1;
  std::vector<Word> words_;  // [sets, width]
  std::vector<uint64_t> marks_;
  std::vector<int64_t> num_blocks_;
  std::vector<uint32_t> free_;
  std::unordered_multimap<uint64_t, uint32_t> by_mark_;
};

}  // namespace isthmus
