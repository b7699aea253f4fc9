// The rows of quantised weights, as integers with factors.

#pragma once

#include "vectors.h"

// Each kind is a row of a weight: `at` gives W numbers from `i` on as integers, which are `more` than they stand for, and
// `scales` and `mins` the factors and minima of LANES groups of them from group `g` on. `unpack` gives `step` numbers, which
// may be in another order, see `place`; each lane of four is of one group all the same, in the order of the groups.

struct Planes {
  const uint8_t* at[5];  // in the order of `kinds.py`
};

template <typename T>
static inline const T* row_of(const uint8_t* plane, int64_t n, int64_t entries) {
  return reinterpret_cast<const T*>(plane) + n * entries;
}

// `first` in the lanes of even groups of 32 numbers, and `step` more in those of odd ones; the vector begins at number `i`.
static inline words by_group(int64_t i, uint32_t first, uint32_t step) {
  if (W == 32) return words{} + static_cast<uint32_t>(first + i / 32 % 2 * step);
  words steps;
  for (int lane = 0; lane < LANES; ++lane) steps[lane] = lane / 8 * step;
  return steps + first;
}

static inline u8s shifted(u8s bytes, words by, uint8_t mask) { return (u8s)((words)bytes >> by) & mask; }

struct Int8 {
  typedef Signed Integers;
  static constexpr int bits = 8, group = 0, more = MORE;  // a factor for the whole row
  static constexpr bool has_mins = false;
  const int8_t* values;
  int64_t columns;
  float scale;
  Int8(const Planes& p, int64_t n, int64_t columns)
      : values(row_of<int8_t>(p.at[0], n, columns)), columns(columns), scale(*row_of<float>(p.at[1], n, 1)) {}
  template <bool whole>
  Integers at(int64_t i) const { return with_sign(load<whole, i8s>(values + i, columns - i)); }
};

struct Q8_0 {
  typedef Signed Integers;
  static constexpr int bits = 8, group = 32, more = MORE;
  static constexpr bool has_mins = false;
  const half* d;
  const int8_t* values;
  int64_t columns;
  Q8_0(const Planes& p, int64_t n, int64_t columns)
      : d(row_of<half>(p.at[0], n, columns / 32)), values(row_of<int8_t>(p.at[1], n, columns)), columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const { return with_sign(load<whole, i8s>(values + i, columns - i)); }
  template <bool whole>
  floats scales(int64_t g) const { return halves<whole>(d + g, columns / 32 - g); }
};

struct Q4_0 {
  typedef u8s Integers;
  static constexpr int step = 2 * W;
  static constexpr int bits = 4, group = 32, more = 8;
  static constexpr bool has_mins = false;
  const half* d;
  const uint8_t* values;
  int64_t columns;
  Q4_0(const Planes& p, int64_t n, int64_t columns)
      : d(row_of<half>(p.at[0], n, columns / 32)), values(row_of<uint8_t>(p.at[1], n, columns / 2)), columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const {
    words shift;
    for (int lane = 0; lane < LANES; ++lane) shift[lane] = lane / 4 % 2 * 4;
    return shifted(twice16<whole>(values + i / 2, (columns - i) / 2), shift, 15);
  }
  // The lower and the upper halves of W bytes: the first 16 numbers of every block, and the other 16.
  template <bool whole>
  void unpack(int64_t i, u8s* w) const {
    const u8s both = load<whole, u8s>(values + i / 2, (columns - i) / 2);
    w[0] = both & 15, w[1] = shifted(both, words{} + 4, 15);
  }
  static int64_t place(int64_t i) { return i / 32 * 16 % W + i % 32 / 16 * W + i % 16; }
  template <bool whole>
  floats scales(int64_t g) const { return halves<whole>(d + g, columns / 32 - g); }
};

template <bool five>
struct QK {
  typedef u8s Integers;
  static constexpr int bits = 4, group = 32, more = 0;
  static constexpr bool has_mins = true;
  const half *d, *dmin;
  const uint8_t *packed, *high, *values;
  int64_t columns;
  QK(const Planes& p, int64_t n, int64_t columns)
      : d(row_of<half>(p.at[0], n, columns / 256)),
        dmin(row_of<half>(p.at[1], n, columns / 256)),
        packed(row_of<uint8_t>(p.at[2], n, columns / 256 * 12)),
        high(five ? row_of<uint8_t>(p.at[3], n, columns / 8) : nullptr),
        values(row_of<uint8_t>(p.at[five ? 4 : 3], n, columns / 2)),
        columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const {
    const u8s low = shifted(all32(values + i / 64 * 32), by_group(i, 0, 4), 15);
    if (!five) return low;
    const uint32_t bit = i % 256 / 64 * 2;
    return low | (shifted(all32(high + i / 256 * 32), by_group(i, bit, 1), 1) << 4);
  }
  template <bool whole>
  floats scales(int64_t g) const {
    return wide(longer((bytes_of_lanes)of_blocks<whole>(g, [](const uint32_t* of) {
      return pair(of[0] & 0x3f3f3f3f, (of[2] & 0x0f0f0f0f) | ((of[0] >> 2) & 0x30303030));
    }))) * by_block<whole>(d, g);
  }
  template <bool whole>
  floats mins(int64_t g) const {
    return wide(longer((bytes_of_lanes)of_blocks<whole>(g, [](const uint32_t* of) {
      return pair(of[1] & 0x3f3f3f3f, ((of[2] >> 4) & 0x0f0f0f0f) | ((of[1] >> 2) & 0x30303030));
    }))) * by_block<whole>(dmin, g);
  }

 private:
  static uint64_t pair(uint32_t first, uint32_t second) { return first | uint64_t{second} << 32; }

  // Eight 6-bit numbers of each block; its 12 bytes hold two kinds of them.
  template <bool whole, typename Of>
  eights of_blocks(int64_t g, Of of) const {
    const auto block = [&](int64_t b) -> uint64_t {
      if (!whole && g + 8 * b >= columns / 32) return 0;
      uint32_t three[3];
      std::memcpy(three, packed + 12 * (g / 8 + b), 12);
      return of(three);
    };
    if constexpr (LANES == 8) {
      return eights{block(0)};
    } else {
      return eights{block(0), block(1)};
    }
  }

  template <bool whole>
  floats by_block(const half* from, int64_t g) const {
    const int64_t blocks = whole ? LANES / 8 : std::min<int64_t>(LANES / 8, columns / 256 - g / 8);
    const floats found = halves<false>(from + g / 8, blocks);
    return taken(found, spread_from<8>(0));
  }
};

struct Q6_K {
  typedef u8s Integers;
  static constexpr int bits = 4, group = 16, more = 32;
  static constexpr bool has_mins = false;
  const uint8_t *values, *high;  // the lower four bits, and the upper two
  const int8_t* of_group;
  const half* d;
  int64_t columns;
  Q6_K(const Planes& p, int64_t n, int64_t columns)
      : values(row_of<uint8_t>(p.at[0], n, columns / 2)),
        high(row_of<uint8_t>(p.at[1], n, columns / 4)),
        of_group(row_of<int8_t>(p.at[2], n, columns / 16)),
        d(row_of<half>(p.at[3], n, columns / 256)),
        columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const {  // every 128 numbers have 64 bytes of low halves, and 32 of four pairs of bits
    const uint32_t upper = i % 128 / 64;
    const u8s nibbles = shifted(load<u8s>(values + i / 128 * 64 + i % 64), words{} + 4 * upper, 15);
    return nibbles | (shifted(all32(high + i / 128 * 32), by_group(i, 4 * upper, 2), 3) << 4);
  }
  template <bool whole>
  floats scales(int64_t g) const {
    return wide(longer(load<narrow>(of_group + g))) * static_cast<float>(d[g / 16]);
  }
};
