// Matmuls of float32 tokens [T, D] with a weight [N, D] of TYPE, float or brain: float32[T, N].
//
// XLA for CPU takes two to three times as long for two to sixteen rows as for one, and twice as long for one by a small
// weight; these read each number of a weight once. For more it is as fast, but copies a matrix that lies in a stack before it
// multiplies with it.

#include <memory>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

constexpr int TOKENS_TOGETHER = VNNI ? 6 : 2;  // by four rows: sums stay in registers, of which AVX-512 has 32 and AVX2 16

// Tokens [T, D] and a weight [N, D].
template <typename T, typename X = float>
struct Product {
  const X* x;
  const T* weight;
  float* out;
  int64_t tokens, rows, columns;
};

// Numbers of a token or a weight, LANES of them or as many pairs, and what their products add to sums.
template <bool pairs, bool whole, typename T>
static inline floats numbers(const T* from, int64_t count) {
  if constexpr (pairs) return load<whole, floats>(from, 2 * count);
  return some<whole>(from, count);
}
template <bool pairs>
static inline floats plus_products(floats total, floats w, floats x) {
#if PAIRS
  if (pairs) return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)x);
#endif
  return plus_product(total, w, x);
}

// C tokens from the `t`-th on, with four rows of the weight from `n` on.
template <int C, typename T, typename X>
static void multiply_floats_together(const Product<T, X>& job, int64_t t, int64_t n) {
  constexpr int R = TOGETHER;
  constexpr bool pairs = std::is_same_v<X, brain>;
  constexpr int64_t step = pairs ? 2 * LANES : LANES;
  const int64_t columns = job.columns;
  const X* const x = job.x + t * columns;
  const T* rows[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rows[r] = job.weight + std::min(n + r, job.rows - 1) * columns;
  const T* following = rows[0] + std::max<int64_t>(R * columns, AHEAD / sizeof(T));  // as in `multiply_together`
  floats total[C][R] = {};
  const auto add = [&](auto whole, int64_t i) {
    floats w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(following + i * R + r * step);
      w[r] = numbers<pairs, whole()>(rows[r] + i, columns - i);
    }
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c) {
      const floats token = in_register(numbers<pairs, whole()>(x + c * columns + i, columns - i));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[c][r] = plus_products<pairs>(total[c][r], w[r], token);
    }
  };
  int64_t i = 0;
  for (; i + step <= columns; i += step) add(std::true_type{}, i);
  if (i < columns) add(std::false_type{}, i);
#pragma GCC unroll 6
  for (int c = 0; c < C; ++c) {
    float found[R];
    sums_of_four(total[c], found);
    std::memcpy(job.out + (t + c) * job.rows + n, found, sizeof(float) * std::min<int64_t>(R, job.rows - n));
  }
}

// The tokens from `t` on, C at a time, and the rest fewer at a time, with the rows from `begin` to `end`.
template <int C, typename T, typename X>
static void multiply_floats_from(const Product<T, X>& job, int64_t t, int64_t begin, int64_t end) {
  for (; t + C <= job.tokens; t += C)
    for (int64_t n = begin; n < end; n += TOGETHER) multiply_floats_together<C>(job, t, n);
  if constexpr (C > 1) multiply_floats_from<C - 1>(job, t, begin, end);
}

#if defined(__AVX2__)
constexpr int64_t FEW_TOKENS = 6;
#else
constexpr int64_t FEW_TOKENS = INT64_MAX;  // a tile of more would not stay in registers
#endif

template <typename T, typename X>
static void multiply_few_floats(const ThreadPool& threads, const Product<T, X>& job) {
  const bool few = job.tokens <= FEW_TOKENS;
  int64_t fitting = std::min<int64_t>(64, (int64_t{1} << 18) / (job.columns * std::max<int64_t>(job.tokens, 1)));
  // EXACT: of many a few at a time stay in the first cache, while rows pass by that stay in the second.
  if (!few) fitting = std::min<int64_t>((int64_t{1} << 19) / (job.columns * sizeof(T)), job.rows / (4 * threads.num_threads()));
  const int64_t at_once = std::max<int64_t>(TOGETHER, fitting / TOGETHER * TOGETHER);
  share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
    const int64_t end = std::min(job.rows, (part + 1) * at_once);
    const int64_t held = few ? TOGETHER : at_once;
    for (int64_t n = part * at_once; n < end; n += held)
      multiply_floats_from<TOKENS_TOGETHER>(job, 0, n, std::min(end, n + held));
  });
}

// --- many tokens: a vector has a number of each of LANES of them, a panel, or two of bfloat16 where PAIRS are multiplied ------

constexpr int TILE_ROWS = VNNI ? 12 : 6, TILE_PANELS = 2;  // of so many rows by so many panels all sums stay in registers

template <typename T>
constexpr int NUMBERS = PAIRS && std::is_same_v<T, brain> ? 2 : 1;  // of each token in a vector

template <bool whole>
static inline floats plus_product(floats total, const float* w, floats x) {
  return total + *w * x;
}

// Numbers of a weight as they are multiplied.
static const float* as_multiplied(const float* from, int64_t, std::vector<float>*) { return from; }
#if PAIRS
static const brain* as_multiplied(const brain* from, int64_t, std::vector<float>*) { return from; }
#else
static const float* as_multiplied(const brain* from, int64_t count, std::vector<float>* room) {
  room->resize(count + LANES);
  for (int64_t i = 0; i < count; i += LANES) store(room->data() + i, some<false>(from + i, count - i));
  return room->data();
}
#endif

// The tokens from `first` on; after the last come others that are not used.
template <typename T>
static void put_panel(const Product<T>& job, int64_t first, floats* panel) {
  constexpr int each = NUMBERS<T>;
  for (int64_t i = 0; i < job.columns; i += each * LANES) {
    floats* to = panel + i / each;
    for (int t = 0; t < LANES; ++t) {
      const float* from = job.x + std::min(first + t, job.tokens - 1) * job.columns + i;
      const int64_t count = job.columns - i, more = std::max<int64_t>(0, count - LANES);
      to[t] = some<false>(from, count);
#if PAIRS
      if (each == 2) to[t] = as_pairs(to[t], some<false>(more ? from + LANES : from, more));
#endif
    }
    transpose(to);
  }
}

// R rows of a weight by C panels: every sum in the order of the columns.
template <int R, int C, typename T>
static inline void multiply_tile(const T* w, const floats* panels, int64_t length, int64_t columns, floats (*total)[LANES]) {
  constexpr int each = NUMBERS<T>;
  floats sums[R][C] = {};
  const auto add = [&](auto whole, int64_t i) {
    __builtin_prefetch(w + R * (columns + i * each));  // the next rows
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        sums[r][c] = plus_product<whole()>(sums[r][c], w + r * columns + i * each, panels[c * length + i]);
  };
  int64_t i = 0;
  for (; (i + 1) * each <= columns; ++i) add(std::true_type{}, i);
  if (i * each < columns) add(std::false_type{}, i);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[c][r] = sums[r][c];
}

#if PAIRS && EXACT
// A few tokens are multiplied in pairs, too.
static void multiply_pairs(const ThreadPool& threads, const Product<brain>& job) {
  const std::unique_ptr<brain[]> x(new brain[job.tokens * job.columns]);
  share(threads, job.tokens, [&](int64_t t) {
    for (int64_t i = 0; i < job.columns; i += 2 * LANES) {
      const float* const from = job.x + t * job.columns + i;
      const int64_t count = job.columns - i, more = std::max<int64_t>(0, count - LANES);
      const floats pairs = as_pairs(some<false>(from, count), some<false>(more ? from + LANES : from, more));
      std::memcpy(&x[t * job.columns + i], &pairs, sizeof(brain) * std::min<int64_t>(count, 2 * LANES));
    }
  });
  multiply_few_floats(threads, Product<brain, brain>{x.get(), job.weight, job.out, job.tokens, job.rows, job.columns});
}
#endif

template <typename T>
static void multiply_floats(const ThreadPool& threads, const Product<T>& job) {
  constexpr int R = TILE_ROWS, C = TILE_PANELS;
  if constexpr (EXACT && NUMBERS<T> == 2) return multiply_pairs(threads, job);
  if (EXACT || job.tokens <= FEW_TOKENS || job.rows < R) return multiply_few_floats(threads, job);
  const int64_t columns = job.columns, length = (columns + NUMBERS<T> * LANES - 1) / (NUMBERS<T> * LANES) * LANES;
  const int64_t count = (job.tokens + LANES - 1) / LANES, tiles = (job.rows + R - 1) / R;
  const std::unique_ptr<floats[]> panels(new floats[count * length]);
  share(threads, count, [&](int64_t p) { put_panel(job, p * LANES, &panels[p * length]); });
  // The rows of a part stay in the L2 cache of a core, while all panels pass by.
  const int64_t fitting = (int64_t{1} << 19) / (R * columns * sizeof(T));
  const int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(fitting, tiles / (4 * threads.num_threads())));
  share(threads, (tiles + at_once - 1) / at_once, [&](int64_t part) {
    const int64_t end = std::min(job.rows, (part + 1) * at_once * R), begin = part * at_once * R;
    const int64_t first = std::min(begin, job.rows - R);
    std::vector<float> room;
    const auto* weight = as_multiplied(job.weight + first * columns, (end - first) * columns, &room);
    floats total[C][LANES] = {};
    for (int64_t p = 0; p < count; p += C)
      for (int64_t n = begin; n < end; n += R) {
        const int64_t from = std::min(n, job.rows - R), known = n - from;  // rows of the last tile that are in another too
        const auto multiply = [&](auto c) {
          multiply_tile<R, c()>(weight + (from - first) * columns, &panels[p * length], length, columns, total);
        };
        p + C <= count ? multiply(std::integral_constant<int, C>{}) : multiply(std::integral_constant<int, 1>{});
        for (int64_t t = p * LANES; t < std::min(job.tokens, (p + C) * LANES); ++t) {
          floats* tokens = total[t / LANES - p];
          if (t % LANES == 0) transpose(tokens);
          const float* found = reinterpret_cast<const float*>(&tokens[t % LANES]);
          float* to = job.out + t * job.rows + n;
          if (__builtin_expect(known == 0, true)) {
            std::memcpy(to, found, 4 * R);
          } else {
            std::memcpy(to, found + known, 4 * (R - known));
          }
        }
      }
  });
}

static void run(const Call& call) {
  const int64_t first = call.first(), *sizes = call.sizes(first), rows = call.result().dims[1];
  const TYPE* weight = call.data<TYPE>(first + 1) + call.group() * rows * sizes[1];
  const int64_t tokens = EXACT ? call.without_zeros(first, rows) : sizes[0];
  const Product<TYPE> job{call.data<float>(first), weight, call.out<float>(), tokens, rows, sizes[1]};
  multiply_floats(ThreadPool(call), job);
}
