// Matmuls of some tokens with a weight of float32 or bfloat16: each number of it is read from memory once.

#pragma once

#include <type_traits>

#include "sharing.h"
#include "vectors.h"

constexpr int TOKENS_TOGETHER = VNNI ? 6 : 2;  // by four rows: sums stay in registers, of which AVX-512 has 32 and AVX2 16

// Tokens [T, D] and a weight [N, D].
template <typename T>
struct Product {
  const float* x;
  const T* weight;
  float* out;
  int64_t tokens, rows, columns;
};

// C tokens from `x` on, with four rows of the weight from `n` on.
template <int C, typename T>
static void multiply_floats_together(const Product<T>& job, const float* x, int64_t n, float* out) {
  constexpr int R = TOGETHER;
  const int64_t columns = job.columns;
  const T* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = job.weight + std::min(n + r, job.rows - 1) * columns;
  const T* following = rows[0] + std::max<int64_t>(R * columns, AHEAD / sizeof(T));  // as in `multiply_together`
  floats total[C][R] = {};
  const auto add = [&](auto whole, int64_t i) {
    floats w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(following + i * R + r * LANES);
      w[r] = some<whole()>(rows[r] + i, columns - i);
    }
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c) {
      const floats token = some<whole()>(x + c * columns + i, columns - i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[c][r] += w[r] * token;
    }
  };
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) add(std::true_type{}, i);
  if (i < columns) add(std::false_type{}, i);
  for (int c = 0; c < C; ++c) {
    float found[R];
    sums_of_four(total[c], found);
    std::memcpy(out + c * job.rows + n, found, sizeof(float) * std::min<int64_t>(R, job.rows - n));
  }
}

// The tokens from `t` on, C at a time, and the rest fewer at a time.
template <int C, typename T>
static void multiply_floats_from(const Product<T>& job, int64_t t, int64_t n) {
  for (; t + C <= job.tokens; t += C) multiply_floats_together<C>(job, job.x + t * job.columns, n, job.out + t * job.rows);
  if constexpr (C > 1) multiply_floats_from<C - 1>(job, t, n);
}

template <typename T>
static void multiply_floats(ffi::ThreadPool& threads, const Product<T>& job) {
  const int64_t fitting = std::min<int64_t>(64, (int64_t{1} << 18) / (job.columns * std::max<int64_t>(job.tokens, 1)));
  const int64_t at_once = std::max<int64_t>(TOGETHER, fitting / TOGETHER * TOGETHER);
  share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
    const int64_t end = std::min(job.rows, (part + 1) * at_once);
    for (int64_t n = part * at_once; n < end; n += TOGETHER) multiply_floats_from<TOKENS_TOGETHER>(job, 0, n);
  });
}
