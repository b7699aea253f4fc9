// Tokens as integers of 8 bits with factors.

#pragma once

#include <limits>
#include <vector>

#include "simd.h"

static inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline floats nearest(floats x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: such are integers

static inline ints put(floats integers, int8_t* to) {
  const ints v = __builtin_convertvector(integers, ints);
  store(to, shorter(v));
  return v;
}

// A row of integers that stand for a token, with zeros up to two whole vectors: factors and sums of each group.
struct Row {
  std::vector<i8s> q;
  std::vector<float> factor;
  std::vector<int32_t> total;
  int8_t* at(int64_t i) { return reinterpret_cast<int8_t*>(q.data()) + i; }
};

// The integers of a token: for `int8` two rows, the second of which counts 1 / 254 of the first. Of a group that is not
// finite they are zeros, and the factor is NaN.
template <typename Kind>
static void read(const float* x, int64_t columns, Row* rows) {
  constexpr bool whole = Kind::group == 0;
  const int64_t block = whole ? columns : 32, group = whole ? columns : Kind::group;
  for (int r = 0; r < (whole ? 2 : 1); ++r) {
    rows[r].q.assign(up_to(columns, 2 * W) / W, i8s{});
    rows[r].factor.assign(up_to(columns / group, LANES), 0);
    rows[r].total.assign(up_to(columns / group, LANES), 0);
  }
  for (int64_t begin = 0; begin < columns; begin += block) {
    const auto some = [&](int64_t i) {
      return !whole || i + LANES <= columns ? load<floats>(x + i) : load<false, floats>(x + i, 4 * (columns - i));
    };
    words sizes{};
    for (int64_t i = begin; i < begin + block; i += LANES) {
      const words size = (words)some(i) & 0x7fffffff;
      sizes = size > sizes ? size : sizes;
    }
    const uint32_t bits = largest(sizes);
    const bool finite = bits < 0x7f800000;
    float most = std::numeric_limits<float>::quiet_NaN();
    if (finite) std::memcpy(&most, &bits, 4);
    for (int64_t g = begin / group; g * group < begin + block; ++g)
      for (int r = 0; r < (whole ? 2 : 1); ++r) rows[r].factor[g] = most / 127 / (r ? 254 : 1);
    if (!finite || bits == 0) continue;
    const float inverse = 127 / most;
    ints totals[2] = {};
    for (int64_t i = begin; i < begin + block; i += LANES) {
      const floats scaled = some(i) * inverse, coarse = nearest(scaled);
      totals[0] += put(coarse, rows[0].at(i));
      if (whole) totals[1] += put(nearest((scaled - coarse) * 254), rows[1].at(i));
      if (!whole && (i + LANES) % group == 0) rows[0].total[i / group] = sum(totals[0]), totals[0] = ints{};
    }
    if (whole)
      for (int r = 0; r < 2; ++r) rows[r].total[0] = sum(totals[r]);
  }
}
