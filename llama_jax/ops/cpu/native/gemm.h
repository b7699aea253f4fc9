// Matmuls of many tokens, LANES rows of integers at a time.

#pragma once

#include <type_traits>

#include "job.h"

// LANES rows of integers: one vector for every four numbers of each row.
struct Panel {
  i8s* q;
  floats* factor;
  ints* total;
};

// This many of them in one block of memory, which is not initialized.
class Panels {
 public:
  Panels(int64_t count, int64_t vectors, int64_t groups)
      : vectors_(vectors), groups_(groups), memory_(new i8s[count * (vectors + 2 * groups)]) {}
  ~Panels() { delete[] memory_; }
  Panels(const Panels&) = delete;

  Panel operator[](int64_t p) const {
    i8s* q = memory_ + p * (vectors_ + 2 * groups_);
    return {q, reinterpret_cast<floats*>(q + vectors_), reinterpret_cast<ints*>(q + vectors_ + groups_)};
  }

  void clear(int64_t p) { std::memset((*this)[p].q, 0, (vectors_ + 2 * groups_) * W); }

 private:
  const int64_t vectors_, groups_;
  i8s* const memory_;
};

// The factor and the minimum of each group of a row, and zeros up to whole vectors.
template <typename Kind>
static void put_factors(const Kind& weight, int64_t groups, float* scale, float* min) {
  const auto put = [&](auto whole, int64_t g) {
    store(scale + g, weight.template scales<whole()>(g));
    if constexpr (Kind::has_mins) store(min + g, weight.template mins<whole()>(g));
  };
  int64_t g = 0;
  for (; g + LANES <= groups; g += LANES) put(std::true_type{}, g);
  if (g < groups) put(std::false_type{}, g);
}

// Many tokens: R rows of the weight at a time, as integers, by C panels.
template <typename Kind, int R, int C>
static void multiply_tile(const int8_t* weights, const float* scale, const float* min, const Panel* panels, int64_t columns,
                          const void* next, floats (*total)[C]) {
  const int64_t group = Kind::group ? Kind::group : columns, padded = up_to(columns, W);
  const int64_t groups = columns / group, held = up_to(groups, LANES);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) total[r][c] = floats{};
  for (int64_t g = 0; g < groups; ++g) {
    ints found[R][C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) found[r][c] = panels[c].total[g] * -Kind::more;
    for (int64_t i = g * group; i < (g + 1) * group; i += 4) {
      if (C == 1) __builtin_prefetch(static_cast<const char*>(next) + i * R * Kind::bits / 8);
      i8s x[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) x[c] = in_register(panels[c].q[i / 4]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        uint32_t four;
        std::memcpy(&four, weights + r * padded + i, 4);
        const auto w = (typename Kind::Integers)(words{} + four);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) found[r][c] = dot(found[r][c], w, x[c]);
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const floats factor = panels[c].factor[g];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        total[r][c] = plus_product(total[r][c], wide(found[r][c]), Kind::group ? factor * scale[r * held + g] : factor);
        if (Kind::has_mins)
          total[r][c] = plus_product(total[r][c], -wide(panels[c].total[g]), factor * min[r * held + g]);
      }
    }
  }
}

template <typename Kind>
static void put_panels(const ThreadPool& threads, const Job& job, int64_t count, int64_t groups, Panels& panels) {
  constexpr int each = rows_per_token<Kind>, held = LANES / each;  // tokens of a panel
  const int64_t columns = job.columns, padded = up_to(columns, W);
  share(threads, count, [&](int64_t p) {
    if ((p + 1) * held > job.tokens) panels.clear(p);
    const Panel panel = panels[p];
    Row rows[2];
    for (int64_t t = p * held; t < std::min(job.tokens, (p + 1) * held); ++t) {
      read<Kind>(job.x + t * columns, columns, rows);
      for (int j = 0; j < each; ++j) {
        const int64_t lane = t - p * held + j * held;
        int32_t* to = reinterpret_cast<int32_t*>(panel.q) + lane;
        for (int64_t i = 0; i < padded / 4; ++i) std::memcpy(to + LANES * i, rows[j].at(4 * i), 4);
        for (int64_t g = 0; g < groups; ++g)
          panel.factor[g][lane] = rows[j].factor[g], panel.total[g][lane] = rows[j].total[g];
      }
    }
  });
}

template <typename Kind, int R, int C>
static void multiply_panels(const ThreadPool& threads, const Job& job) {
  constexpr int held = LANES / rows_per_token<Kind>;
  const int64_t columns = job.columns, padded = up_to(columns, W);
  const int64_t groups = Kind::group ? columns / Kind::group : 1, factors = up_to(groups, LANES);
  const int64_t count = up_to((job.tokens + held - 1) / held, C);
  Panels panels(count, padded / 4, groups);
  put_panels<Kind>(threads, job, count, groups, panels);
  // The panels that each tile of weights is multiplied with stay in the L2 cache of a core.
  const int64_t fitting = std::max<int64_t>(1, (int64_t{1} << 20) / (padded * LANES * C)) * C;
  constexpr int64_t at_once = 4 * R;
  for (int64_t first = 0; first < count; first += fitting)
    share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
      std::vector<int8_t> weights(R * padded);
      std::vector<float> scale(R * factors), min(R * factors);
      float of_row[R] = {};
      const int64_t end = std::min(job.rows, (part + 1) * at_once);
      for (int64_t at = part * at_once; at < end; at += R) {
        const int64_t there = std::min<int64_t>(R, end - at);
        for (int64_t r = 0; r < there; ++r) {
          const Kind weight(job.planes, at + r, columns);
          for_each_vector(weight, [&](int64_t i, auto w) { store(&weights[r * padded + i], w); });
          if constexpr (Kind::group == 0) {
            of_row[r] = weight.scale;
          } else {
            put_factors(weight, groups, &scale[r * factors], &min[r * factors]);
          }
        }
        const void* next = Kind(job.planes, at + R, columns).values;
        for (int64_t p = first; p < std::min(count, first + fitting); p += C) {
          floats total[R][C];
          Panel some[C];
          for (int c = 0; c < C; ++c) some[c] = panels[p + c];
          multiply_tile<Kind, R, C>(weights.data(), scale.data(), min.data(), some, columns, next, total);
          for (int c = 0; c < C; ++c) {
            float all[R][LANES];  // a token in a lane, or of `int8` its second row in a lane of the upper half
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
              if constexpr (Kind::group == 0)
                total[r][c] = (total[r][c] + taken(total[r][c], spread_from<1>(0) ^ held)) * of_row[r];
              store(all[r], total[r][c]);
            }
            for (int64_t t = (p + c) * held; t < std::min(job.tokens, (p + c + 1) * held); ++t) {
              float* to = job.out + t * job.rows + at;
              if (there == R) {
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) to[r] = all[r][t % held];
              } else {
                for (int64_t r = 0; r < there; ++r) to[r] = all[r][t % held];
              }
            }
          }
        }
      }
    });
}
