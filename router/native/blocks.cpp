// The C interface of Blocks.
#include "blocks.h"

using isthmus::Blocks;

extern "C" {

Blocks* isthmus_blocks_make(uint64_t secret) { return new Blocks(secret); }
void isthmus_blocks_free(Blocks* blocks) { delete blocks; }
int64_t isthmus_blocks_size(const Blocks* blocks) { return blocks->size(); }
int64_t isthmus_blocks_width(const Blocks* blocks) { return blocks->width(); }
int64_t isthmus_blocks_bytes(const Blocks* blocks) { return blocks->num_bytes(); }
int64_t isthmus_blocks_held_by(const Blocks* blocks, int64_t slot) { return blocks->held_by(slot); }

void isthmus_blocks_store(Blocks* blocks, int64_t slot, const char* hashes, int64_t count) {
  blocks->store(slot, hashes, count);
}
void isthmus_blocks_remove(Blocks* blocks, int64_t slot, const char* hashes, int64_t count) {
  blocks->remove(slot, hashes, count);
}
void isthmus_blocks_clear(Blocks* blocks, int64_t slot) { blocks->clear(slot); }
void isthmus_blocks_evict(Blocks* blocks, int64_t count) { blocks->evict(count); }
void isthmus_blocks_depths(Blocks* blocks, const char* hashes, int64_t count, int64_t is_use,
                           double* depths) {
  blocks->depths(hashes, count, is_use != 0, depths);
}
void isthmus_blocks_list(const Blocks* blocks, char* hashes, uint64_t* holders) {
  blocks->list(hashes, holders);
}

}  // extern "C"
