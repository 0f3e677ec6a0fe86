// AMX's eight tiles of 16 rows of 64 bytes, and what loads and empties them.
#pragma once

namespace radar {
namespace RADAR_ISA_NAME {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileDepth = 32;  // bfloat16 elements of one row of a tile
constexpr int64_t kTileElements = kTileRows * kTileDepth;

// GCC does not know which memory its intrinsics load tiles from: this belongs between a load and
// what is written there before or after it.
RADAR_INLINE void order_memory() { __asm__ volatile("" ::: "memory"); }

// All eight tiles, as long as this lives. The thread's own tiles come back empty, but as they were
// laid out: their owner may count on that.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(before_);
    alignas(64) uint8_t layout[64] = {};
    layout[0] = 1;
    for (int tile = 0; tile < 8; ++tile) {
      layout[16 + 2 * tile] = 64;
      layout[48 + tile] = kTileRows;
    }
    __asm__ volatile("" ::"r"(layout), "r"(before_) : "memory");
    _tile_loadconfig(layout);
  }
  ~Tiles() {
    if (before_[0]) {
      _tile_loadconfig(before_);
    } else {
      _tile_release();
    }
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

}  // namespace RADAR_ISA_NAME
}  // namespace radar
