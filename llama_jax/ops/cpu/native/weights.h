// The rows of quantized weights, as integers with factors.

#pragma once

#include "simd.h"

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

// Of blocks of 256 numbers, the entry of each of LANES groups of 32 from group `g` on.
template <bool whole>
static inline floats by_block(const half* from, int64_t g, int64_t columns) {
  const int64_t blocks = whole ? LANES / 8 : std::min<int64_t>(LANES / 8, columns / 256 - g / 8);
  return taken(halves<false>(from + g / 8, blocks), spread_from<8>(0));
}

struct int8 {
  typedef Signed Integers;
  static constexpr int bits = 8, group = 0, more = MORE;  // a factor for the whole row
  static constexpr bool has_mins = false;
  const int8_t* values;
  int64_t columns;
  float scale;
  int8(const Planes& p, int64_t n, int64_t columns)
      : values(row_of<int8_t>(p.at[0], n, columns)), columns(columns), scale(*row_of<float>(p.at[1], n, 1)) {}
  template <bool whole>
  Integers at(int64_t i) const { return with_sign(load<whole, i8s>(values + i, columns - i)); }
};

struct q8_0 {
  typedef Signed Integers;
  static constexpr int bits = 8, group = 32, step = W, more = MORE;
  static constexpr bool has_mins = false;
  const half* d;
  const int8_t* values;
  int64_t columns;
  q8_0(const Planes& p, int64_t n, int64_t columns)
      : d(row_of<half>(p.at[0], n, columns / 32)), values(row_of<int8_t>(p.at[1], n, columns)), columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const { return with_sign(load<whole, i8s>(values + i, columns - i)); }
  template <bool whole>
  floats scales(int64_t g) const { return halves<whole>(d + g, columns / 32 - g); }
};

// Blocks of 32 numbers in the halves of 16 bytes, of which the low ones are the first 16 numbers.
struct Nibbles {
  static constexpr int bits = 4, group = 32, step = 2 * W;
  const uint8_t* values;
  int64_t columns;
  Nibbles(const uint8_t* plane, int64_t n, int64_t columns)
      : values(row_of<uint8_t>(plane, n, columns / 2)), columns(columns) {}
  template <bool whole>
  u8s in_order(int64_t i) const {
    words shift;
    for (int lane = 0; lane < LANES; ++lane) shift[lane] = lane / 4 % 2 * 4;
    return shifted(twice16<whole>(values + i / 2, (columns - i) / 2), shift, 15);
  }
  // The lower and the upper halves of W bytes: the first 16 numbers of every block, and the other 16.
  template <bool whole>
  void halves_of(int64_t i, u8s* w) const {
    const u8s both = load<whole, u8s>(values + i / 2, (columns - i) / 2);
    w[0] = both & 15, w[1] = shifted(both, words{} + 4, 15);
  }
  static int64_t place(int64_t i) { return i / 32 * 16 % W + i % 32 / 16 * W + i % 16; }
};

// q4_0, q4_1, q5_0, q5_1: such blocks with a factor, a minimum or none, and a fifth bit of each number or none.
template <bool five, bool min>
struct Q : Nibbles {
  typedef u8s Integers;
  static constexpr int more = min ? 0 : five ? 16 : 8;
  static constexpr bool has_mins = min;
  const half *d, *m;
  const uint8_t* high;
  Q(const Planes& p, int64_t n, int64_t columns)
      : Nibbles(p.at[1 + min + five], n, columns),
        d(row_of<half>(p.at[0], n, columns / 32)),
        m(min ? row_of<half>(p.at[1], n, columns / 32) : nullptr),
        high(five ? row_of<uint8_t>(p.at[1 + min], n, columns / 8) : nullptr) {}
  template <bool whole>
  Integers at(int64_t i) const {
    const u8s low = in_order<whole>(i);
    if constexpr (!five) return low;
    uint64_t bits = 0;
    std::memcpy(&bits, high + i / 8, whole ? W / 8 : std::min<int64_t>(W, columns - i) / 8);
    return low | spread(bits, 16);
  }
  template <bool whole>
  void unpack(int64_t i, u8s* w) const {
    halves_of<whole>(i, w);
    if constexpr (!five) return;
    uint64_t bits[2] = {}, first, second;
    std::memcpy(bits, high + i / 8, whole ? step / 8 : std::min<int64_t>(step, columns - i) / 8);
    split16(bits, &first, &second);
    w[0] |= spread(first, 16), w[1] |= spread(second, 16);
  }
  template <bool whole>
  floats scales(int64_t g) const { return halves<whole>(d + g, columns / 32 - g); }
  template <bool whole>
  floats mins(int64_t g) const { return -halves<whole>(m + g, columns / 32 - g); }
};

// iq4_nl, iq4_xs, mxfp4: such blocks, whose four bits select one of sixteen integers.
template <typename Table>
struct Selected : Nibbles {
  typedef Signed Integers;
  static constexpr int more = MORE;
  static constexpr bool has_mins = false;
  using Nibbles::Nibbles;
  template <bool whole>
  Integers at(int64_t i) const { return selected(in_order<whole>(i)); }
  template <bool whole>
  void unpack(int64_t i, Integers* w) const {
    u8s both[2];
    halves_of<whole>(i, both);
    w[0] = selected(both[0]), w[1] = selected(both[1]);
  }

 private:
  static Integers selected(u8s nibbles) { return with_sign((i8s)looked_up(Table::integers, nibbles)); }
};

struct OfIQ4 {
  static constexpr int8_t integers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct OfE2M1 {  // doubled
  static constexpr int8_t integers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

struct iq4_nl : Selected<OfIQ4> {
  const half* d;
  iq4_nl(const Planes& p, int64_t n, int64_t columns)
      : Selected(p.at[1], n, columns), d(row_of<half>(p.at[0], n, columns / 32)) {}
  template <bool whole>
  floats scales(int64_t g) const { return halves<whole>(d + g, columns / 32 - g); }
};

struct mxfp4 : Selected<OfE2M1> {
  const uint8_t* exponents;
  mxfp4(const Planes& p, int64_t n, int64_t columns)
      : Selected(p.at[1], n, columns), exponents(row_of<uint8_t>(p.at[0], n, columns / 32)) {}
  template <bool whole>
  floats scales(int64_t g) const {  // half of a power of two, as the integers are twice what they stand for
    const ints e = longer(load<whole, bytes_of_lanes>(exponents + g, columns / 32 - g));
    return (floats)(e > 1 ? (e - 1) << 23 : (ints{} + 0x00200000) << e);
  }
};

struct iq4_xs : Selected<OfIQ4> {
  const half* d;
  const uint16_t* high;  // of each block of 256 the upper two bits of eight factors
  const uint8_t* low;    // and the lower four
  iq4_xs(const Planes& p, int64_t n, int64_t columns)
      : Selected(p.at[3], n, columns),
        d(row_of<half>(p.at[0], n, columns / 256)),
        high(row_of<uint16_t>(p.at[1], n, columns / 256)),
        low(row_of<uint8_t>(p.at[2], n, columns / 64)) {}
  template <bool whole>
  floats scales(int64_t g) const {
    words lower, upper, shift;
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t block = g / 8 + (whole || g + lane < columns / 32 ? lane / 8 : 0);
      uint32_t four;
      std::memcpy(&four, low + 4 * block, 4);
      lower[lane] = four, upper[lane] = high[block], shift[lane] = lane % 8;
    }
    const words six = (lower >> 4 * shift & 15) | (upper >> 2 * shift & 3) << 4;
    return wide((ints)six - 32) * by_block<whole>(d, g, columns);
  }
};

template <bool five>
struct QK {
  typedef u8s Integers;
  static constexpr int bits = 4, group = 32, step = W, more = 0;
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
    }))) * by_block<whole>(d, g, columns);
  }
  template <bool whole>
  floats mins(int64_t g) const {
    return wide(longer((bytes_of_lanes)of_blocks<whole>(g, [](const uint32_t* of) {
      return pair(of[1] & 0x3f3f3f3f, ((of[2] >> 4) & 0x0f0f0f0f) | ((of[1] >> 2) & 0x30303030));
    }))) * by_block<whole>(dmin, g, columns);
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
};

struct q6_k {
  typedef u8s Integers;
  static constexpr int bits = 4, group = 16, step = W, more = 32;
  static constexpr bool has_mins = false;
  const uint8_t *values, *high;  // the lower four bits, and the upper two
  const int8_t* of_group;
  const half* d;
  int64_t columns;
  q6_k(const Planes& p, int64_t n, int64_t columns)
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

// q2_k and q3_k: every 128 numbers have 32 bytes of four pairs of bits; of q3_k a third bit lies apart.
template <bool third>
struct Pairs {
  typedef u8s Integers;
  static constexpr int bits = 2, group = 16, step = W, more = third ? 4 : 0;
  static constexpr bool has_mins = !third;
  const uint8_t *values, *packed, *high;
  const half *d, *dmin;
  int64_t columns;
  Pairs(const Planes& p, int64_t n, int64_t columns)
      : values(row_of<uint8_t>(p.at[1], n, columns / 4)),
        packed(row_of<uint8_t>(p.at[third ? 2 : 0], n, columns / 256 * each)),
        high(third ? row_of<uint8_t>(p.at[0], n, columns / 8) : nullptr),
        d(row_of<half>(p.at[third ? 3 : 2], n, columns / 256)),
        dmin(third ? nullptr : row_of<half>(p.at[3], n, columns / 256)),
        columns(columns) {}
  template <bool whole>
  Integers at(int64_t i) const {
    const u8s low = shifted(all32(values + i / 128 * 32), by_group(i, i % 128 / 64 * 4, 2), 3);
    if constexpr (!third) return low;
    return low | (shifted(all32(high + i / 256 * 32), by_group(i, i % 256 / 64 * 2, 1), 1) << 2);
  }
  template <bool whole>
  floats scales(int64_t g) const {
    const float factor = d[g / 16];
    const uint8_t* of = packed + g / 16 * each;
    if constexpr (!third) return wide(longer(load<bytes_of_lanes>(of + g % 16) & 15)) * factor;
    uint64_t low, above = 0;
    std::memcpy(&low, of, 8);
    std::memcpy(&above, of + 8, 4);
    above |= above << 30;  // the second four pairs of bits are two bits further than the first
    const auto eight = [&](int k) { return (low >> 4 * k & ~0ull / 17) | (above >> 4 * k & ~0ull / 85) << 4; };
    bytes_of_lanes six;
    if constexpr (LANES == 8) {
      six = (bytes_of_lanes)eights{eight(g / 8 % 2)};
    } else {
      six = (bytes_of_lanes)eights{eight(0), eight(1)};
    }
    return (wide(longer(six)) - 32.0f) * factor;
  }
  template <bool whole>
  floats mins(int64_t g) const {
    return wide(longer(load<bytes_of_lanes>(packed + g) >> 4)) * static_cast<float>(dmin[g / 16]);
  }

 private:
  static constexpr int each = third ? 12 : 16;
};

typedef Q<false, false> q4_0;
typedef Q<false, true> q4_1;
typedef Q<true, false> q5_0;
typedef Q<true, true> q5_1;
typedef Pairs<false> q2_k;
typedef Pairs<true> q3_k;
typedef QK<false> q4_k;
typedef QK<true> q5_k;
