// The operands: tokens [T, D] and a weight [N, D].

#pragma once

#include "thread_pool.h"
#include "activations.h"
#include "weights.h"

struct Job {
  const float* x;
  Planes planes;
  float* out;
  int64_t tokens, rows, columns;
};

template <typename Kind>
constexpr int rows_per_token = Kind::group ? 1 : 2;

// `step(i, integers)` for each W numbers of a row.
template <typename Kind, typename Step>
static inline void for_each_vector(const Kind& weight, Step step) {
  int64_t i = 0;
  for (; i + W <= weight.columns; i += W) {
    __builtin_prefetch(weight.values + i * Kind::bits / 8 + AHEAD);  // the processor's own prefetching ends with a page
    step(i, weight.template at<true>(i));
  }
  if (i < weight.columns) step(i, weight.template at<false>(i));
}
