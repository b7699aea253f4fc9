// Attention of a few queries to the keys and values of a cache: only the slots that a query sees are read. Numbers are of
// TYPE, float or brain; heads are as wide as WHOLE vectors, or not. Where a layer comes first, it is to that part of a stack.

#include <limits>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

// Queries [B, K, T, G, H], keys and values [B, K, S, H] in float32 or bfloat16, and how many slots the queries see, from the
// first on: [B | 1, T].
template <typename T>
struct Attention {
  const float* queries;
  const T *keys, *values;
  const int32_t* seen;
  float* out;
  int64_t batch, heads, tokens, groups, width, slots, batches_of_seen;
  float scale;
};

// `whole`: heads are as wide as some vectors.
// Matmuls of C queries [C, width] with `count` keys: scores [C, row], 4 / C keys at a time.
template <int C, bool whole, typename T>
static void score(const Attention<T>& job, const float* queries, const T* keys, int64_t count, int64_t row, float* scores) {
  constexpr int R = 4 / C;
  for (int64_t s = 0; s < count; s += R) {
    const T* from[R];
    for (int r = 0; r < R; ++r) from[r] = keys + std::min(s + r, count - 1) * job.width;
    floats sums[4] = {};
    for (int64_t h = 0; h < job.width; h += LANES) {
      const int64_t left = job.width - h;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const floats key = some<whole>(from[r] + h, left);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c * R + r] += key * some<whole>(queries + c * job.width + h, left);
      }
    }
    float found[4];
    sums_of_four(sums, found);
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < R; ++r) scores[c * row + s + r] = found[c * R + r] * job.scale;
  }
}

// Softmax of the scores, padded with zeros to whole vectors.
static void normalise(float* scores, int64_t count) {
  for (int64_t s = count; s % LANES; ++s) scores[s] = -std::numeric_limits<float>::infinity();
  floats most = load<floats>(scores), total{};
  for (int64_t s = LANES; s < count; s += LANES) {
    const floats v = load<floats>(scores + s);
    most = v > most ? v : most;
  }
  float largest = most[0];
  for (int lane = 1; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
  for (int64_t s = 0; s < count; s += LANES) {
    const floats weights = exponential(load<floats>(scores + s) - largest);
    store(scores + s, weights), total += weights;
  }
  const float inverse = 1 / sum(total);
  for (int64_t s = 0; s < count; s += LANES) store(scores + s, load<floats>(scores + s) * inverse);
}

// V vectors of the mixtures of `count` values by C rows of weights.
template <int C, int V, bool whole, typename T>
static void mix(const Attention<T>& job, const float* weights, int64_t row, const T* values, int64_t count, int64_t left,
                float* out) {
  constexpr int R = 4 / C;
  floats sums[4][V] = {};
  for (int64_t s = 0; s < count; s += R)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (s + r >= count) break;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const floats value = some<whole>(values + (s + r) * job.width + v * LANES, left - v * LANES);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c * R + r][v] += value * weights[c * row + s + r];
      }
    }
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < V; ++v) {
      for (int r = 1; r < R; ++r) sums[c * R][v] += sums[c * R + r][v];
      std::memcpy(out + c * job.width + v * LANES, &sums[c * R][v], 4 * std::min<int64_t>(LANES, left - v * LANES));
    }
}

template <int C, bool whole, typename T>
static void attend(const Attention<T>& job, int64_t head, int64_t query, int64_t count, std::vector<float>& scores) {
  const int64_t row = scores.size() / 4, from = head * job.slots * job.width;
  const float* queries = job.queries + query * job.width;
  float* out = job.out + query * job.width;
  score<C, whole>(job, queries, job.keys + from, count, row, scores.data());
  for (int c = 0; c < C; ++c) normalise(&scores[c * row], count);
  int64_t h = 0;
  for (; h + 4 * LANES <= job.width; h += 4 * LANES)
    mix<C, 4, whole>(job, scores.data(), row, job.values + from + h, count, job.width - h, out + h);
  for (; h < job.width; h += LANES)
    mix<C, 1, whole>(job, scores.data(), row, job.values + from + h, count, job.width - h, out + h);
}

template <bool whole, typename T>
static void attend(const ThreadPool& threads, const Attention<T>& job) {
  constexpr int64_t LITTLE = 1 << 15;  // key elements up to which another thread would start too late
  const int64_t most = (job.slots + 4 + LANES - 1) / LANES * LANES;
  const auto of_head = [&](int64_t head) {
    std::vector<float> scores(4 * most);
    const int32_t* seen = job.seen + (job.batches_of_seen > 1 ? head / job.heads * job.tokens : 0);
    for (int64_t t = 0; t < job.tokens; ++t) {
      const int64_t count = std::min<int64_t>(seen[t], job.slots), first = (head * job.tokens + t) * job.groups;
      if (count <= 0) {
        std::memset(job.out + first * job.width, 0, 4 * job.groups * job.width);
        continue;
      }
      int64_t g = 0;
      for (; g + 4 <= job.groups; g += 4) attend<4, whole>(job, head, first + g, count, scores);
      for (; g < job.groups; ++g) attend<1, whole>(job, head, first + g, count, scores);
    }
  };
  int64_t slots = 0;
  for (int64_t i = 0; i < job.batches_of_seen * job.tokens; ++i) slots += job.seen[i];
  const int64_t heads = job.batch * job.heads;
  if (slots / job.batches_of_seen * heads * job.width < LITTLE) {
    for (int64_t head = 0; head < heads; ++head) of_head(head);
  } else {
    share(threads, heads, of_head);
  }
}

static void run(const Call& call) {
  const int64_t first = call.first(), *q = call.sizes(first), slots = call.sizes(first + 1)[first + 2];
  const int64_t before = std::max<int64_t>(call.group(), 0) * q[0] * q[1] * slots * q[4];
  const TYPE *keys = call.data<TYPE>(first + 1) + before, *values = call.data<TYPE>(first + 2) + before;
  const Attention<TYPE> job{call.data<float>(first), keys, values, call.data<int32_t>(first + 3), call.out<float>(),
                            q[0], q[1], q[2], q[3], q[4], slots, call.sizes(first + 3)[0], call.attribute<float>("scale")};
  attend<WHOLE>(ThreadPool(call), job);
}
