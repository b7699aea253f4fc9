// Matmuls of a few tokens with a few rows of the weight at a time: each number of the weight is read from memory once.

#pragma once

#include <type_traits>

#include "job.h"

// `step` integers from `i` on, as the kind unpacks them fastest.
template <bool whole, typename Kind>
static inline void unpack(const Kind& weight, int64_t i, typename Kind::Integers* w) {
  if constexpr (Kind::step > W) {
    weight.template unpack<whole>(i, w);
  } else {
    w[0] = weight.template at<whole>(i);
  }
}

// A token as rows of a weight are multiplied by it: integers in the order in which those of the weight are unpacked, factors
// of its groups and their sums, and where the sums of each step begin: less what the weight's integers are more.
struct Token {
  std::vector<i8s> q;
  std::vector<ints> begin;
  std::vector<float> factor, sum;
};

template <typename Kind>
static Token as_token(const float* x, int64_t columns) {
  constexpr int step = Kind::step;
  Row row;
  read<Kind>(x, columns, &row);
  Token token{row.q, std::vector<ints>(row.q.size() * W / step), row.factor, row.factor};
  if constexpr (step > W) {
    int8_t* to = reinterpret_cast<int8_t*>(token.q.data());
    for (int64_t i = 0; i < columns; i += 16) std::memcpy(to + i / step * step + Kind::place(i % step), row.at(i), 16);
  }
  for (size_t g = 0; g < token.sum.size(); ++g) token.sum[g] = EXACT ? row.total[g] : token.sum[g] * row.total[g];
  for (size_t i = 0; Kind::more && i < token.begin.size(); ++i) {
    ints all{};
    for (int v = 0; v < step / W; ++v) all = dot(all, u8s{} + static_cast<uint8_t>(Kind::more), token.q[i * step / W + v]);
    token.begin[i] = -all;
  }
  return token;
}

// `begin(whole, group)` for every LANES groups of a row, and `add(whole, i)` for each step of them.
template <typename Kind, typename Begin, typename Add>
static inline void for_each_step(int64_t columns, const Begin& begin, const Add& add) {
  const std::true_type whole;
  const std::false_type part;
  for (int64_t g = 0; g * Kind::group < columns; g += LANES) {
    const int64_t end = (g + LANES) * Kind::group;
    end <= columns ? begin(whole, g) : begin(part, g);
    int64_t i = g * Kind::group;
    for (; i + Kind::step <= std::min(end, columns); i += Kind::step) add(whole, i);
    if (i < std::min(end, columns)) add(part, i);
  }
}

// TOGETHER rows of a weight, from the n-th, by C tokens. Of a step each lane has the sum of four numbers, or eight, of one
// group; `each` lanes are of the same.
template <typename Kind, int C>
static void multiply_together(const Job& job, const Token* x, int64_t n, float* out) {
  constexpr int step = Kind::step, vectors = step / W, each = LANES * Kind::group / step, R = TOGETHER;
  static_assert(R == 4, "`sums_of_four`");
  const int64_t columns = job.columns;
  const auto of = [&](int r) { return Kind(job.planes, std::min(n + r, job.rows - 1), columns); };
  const Kind weights[R] = {of(0), of(1), of(2), of(3)};
  // Four rows are read side by side, but the next four are prefetched in the order of memory: on a Zen 4 that is 1.1 to 1.6
  // times as fast as four streams, which its own prefetchers do not follow within a page.
  const auto following = weights[0].values + std::max<int64_t>(R * columns * Kind::bits / 8, AHEAD);
  floats total[C][R] = {}, factor[C][R];
  ints places;
  const auto begin = [&](auto whole, int64_t g) {
    places = spread_from<each>(0);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const floats scale = weights[r].template scales<whole()>(g);
      floats min{};
      if constexpr (Kind::has_mins) min = weights[r].template mins<whole()>(g);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        factor[c][r] = scale * load<floats>(&x[c].factor[g]);
        if (Kind::has_mins) total[c][r] -= min * load<floats>(&x[c].sum[g]);
      }
    }
  };
  const auto add = [&](auto whole, int64_t i) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(following + (i / step * R + r) * (step * Kind::bits / 8));
      typename Kind::Integers w[vectors];
      unpack<whole()>(weights[r], i, w);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        ints sums{};
        if (Kind::more) sums = x[c].begin[i / step];
        for (int v = 0; v < vectors; ++v) sums = dot(sums, w[v], x[c].q[i / W + v]);
        total[c][r] += wide(sums) * taken(factor[c][r], places);
      }
    }
    places += LANES / each;
  };
  for_each_step<Kind>(columns, begin, add);
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    float found[R];
    sums_of_four(total[c], found);
    std::memcpy(out + c * job.rows + n, found, 4 * std::min<int64_t>(R, job.rows - n));
  }
}

// As `multiply_together`, but every sum is made as `multiply_tile` makes it, group after group: of four rows side by side.
template <typename Kind, int C>
static void multiply_in_order(const Job& job, const Token* x, int64_t n, float* out) {
  constexpr int step = Kind::step, vectors = step / W, each = LANES * Kind::group / step, R = TOGETHER;
  const int64_t columns = job.columns;
  const auto of = [&](int r) { return Kind(job.planes, std::min(n + r, job.rows - 1), columns); };
  const Kind weights[R] = {of(0), of(1), of(2), of(3)};
  const auto following = weights[0].values + std::max<int64_t>(R * columns * Kind::bits / 8, AHEAD);
  floats4 total[C] = {};
  floats4 scales[4][LANES / 4], mins[4][LANES / 4];  // of the rows, for LANES groups: the first is that of every fourth
  const auto begin = [&](auto whole, int64_t g) {
    floats scale[R], min[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      scale[r] = weights[r].template scales<whole()>(g);
      if constexpr (Kind::has_mins) min[r] = weights[r].template mins<whole()>(g);
    }
    transpose_fours(scale);
    std::memcpy(scales, scale, sizeof(scales));
    if constexpr (Kind::has_mins) {
      transpose_fours(min);
      std::memcpy(mins, min, sizeof(mins));
    }
  };
  const auto add = [&](auto whole, int64_t i) {
    ints sums[C][R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(following + (i / step * R + r) * (step * Kind::bits / 8));
      typename Kind::Integers w[vectors];
      unpack<whole()>(weights[r], i, w);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        sums[c][r] = Kind::more ? x[c].begin[i / step] : ints{};
        for (int v = 0; v < vectors; ++v) sums[c][r] = dot(sums[c][r], w[v], x[c].q[i / W + v]);
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      floats v[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) v[r] = (floats)sums[c][r];
      transpose_fours(v);
      const ints all = (ints)v[0] + (ints)v[1] + (ints)v[2] + (ints)v[3];
      ints4 found[LANES / 4];
      std::memcpy(found, &all, W);
#pragma GCC unroll 4
      for (int j = 0; j < LANES / each; ++j) {
        const int64_t g = i / Kind::group + j;
        if (!whole() && g * Kind::group >= columns) break;
        ints4 of_group = found[j * each / 4];
        if (each == 8) of_group += found[j * each / 4 + 1];
        const float factor = x[c].factor[g];
        total[c] = plus_product(total[c], __builtin_convertvector(of_group, floats4), factor * scales[g % 4][g % LANES / 4]);
        if constexpr (Kind::has_mins)
          total[c] = plus_product(total[c], floats4{} - x[c].sum[g], factor * mins[g % 4][g % LANES / 4]);
      }
    }
  };
  for_each_step<Kind>(columns, begin, add);
  for (int c = 0; c < C; ++c) std::memcpy(out + c * job.rows + n, &total[c], 4 * std::min<int64_t>(R, job.rows - n));
}

static float multiply_row(const int8& weight, const Row* x) {
  ints sums[2] = {};
  const i8s *coarse = x[0].q.data(), *fine = x[1].q.data();
  for_each_vector(weight, [&](int64_t i, auto w) {
    sums[0] = dot(sums[0], w, coarse[i / W]), sums[1] = dot(sums[1], w, fine[i / W]);
  });
  float total[2] = {};  // EXACT: products are rounded before they are added, as in `multiply_panels`
  for (int j = 0; j < 2; ++j) total[EXACT ? j : 0] += (sum(sums[j]) - int8::more * x[j].total[0]) * x[j].factor[0];
  return (total[0] + total[1]) * weight.scale;
}

// A few tokens, with a few rows of the weight at a time.
template <typename Kind>
static void multiply_rows(const ThreadPool& threads, const Job& job) {
  constexpr int each = rows_per_token<Kind>;
  const int64_t columns = job.columns, numbers = columns * std::max<int64_t>(job.tokens, 1);
  const int64_t fitting = std::min<int64_t>(64, (int64_t{1} << 18) / numbers);
  const int64_t at_once = std::max<int64_t>(TOGETHER, fitting / TOGETHER * TOGETHER);
  const auto run = [&](auto tokens, auto multiply) {
    share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
      const int64_t end = std::min(job.rows, (part + 1) * at_once);
      for (int64_t n = part * at_once; n < end; n += TOGETHER) multiply(tokens.data(), n);
    });
  };
  if constexpr (Kind::group == 0) {
    std::vector<Row> rows(each * job.tokens);
    for (int64_t t = 0; t < job.tokens; ++t) read<Kind>(job.x + t * columns, columns, &rows[each * t]);
    run(std::move(rows), [&](const Row* rows, int64_t first) {
      for (int64_t n = first; n < std::min(job.rows, first + TOGETHER); ++n) {
        const Kind weight(job.planes, n, columns);
        for (int64_t t = 0; t < job.tokens; ++t) job.out[t * job.rows + n] = multiply_row(weight, &rows[each * t]);
      }
    });
  } else {
    std::vector<Token> tokens(job.tokens);
    for (int64_t t = 0; t < job.tokens; ++t) tokens[t] = as_token<Kind>(job.x + t * columns, columns);
    run(std::move(tokens), [&](const Token* tokens, int64_t n) {
      int64_t t = 0;
      const auto multiply = [&](auto C) {
        float* const out = job.out + t * job.rows;
        if constexpr (EXACT) {
          multiply_in_order<Kind, C()>(job, tokens + t, n, out);
        } else {
          multiply_together<Kind, C()>(job, tokens + t, n, out);
        }
      };
      for (; t + 2 <= job.tokens; t += 2) multiply(std::integral_constant<int, 2>{});
      if (t < job.tokens) multiply(std::integral_constant<int, 1>{});
    });
  }
}
