// Attention of new tokens to keys and values in pages: pages are read where they lie, each once for several queries.

#pragma once

#include <type_traits>

#include "attention.h"

constexpr int64_t BLOCK = 64;          // keys whose scores are made together
constexpr int64_t PART = 512;          // keys that one thread reads for a few queries
constexpr int64_t FEW = 12;            // queries of a head up to which keys are not packed
constexpr int64_t QUERIES_TOGETHER = 96;
constexpr int ROWS_TOGETHER = 6, VECTORS_TOGETHER = VNNI ? 4 : 2;  // sums that stay in registers
constexpr float LOWEST = -1e30f;       // finite, so that no difference of two is NaN

// Queries [T, K, G, H] and the pages of a layer [P, page, 2K, H], in float32, bfloat16 or int8 with factors [P, page, 2K].
// A `window` or `chunk` of 0 is none.
template <typename T>
struct PagedAttention {
  const float* queries;
  const T* pages;
  const float* factors;
  const int32_t *table, *lengths, *starts;
  float* out;
  int64_t tokens, heads, groups, width, rows, entries, count, page, window, sinks, chunk;
  float scale;

  int64_t of_chunk(int64_t position) const { return chunk ? position / chunk * chunk : 0; }
  // The first position that a query sees, but for sinks.
  int64_t first_seen(int64_t position) const {
    return std::max(of_chunk(position), window ? position - window + 1 : 0);
  }
};

// `count` new tokens of a row from flat token `first` on, at `position`; a head; the keys from `begin` to `end`. Where the
// keys are in several parts, `found` is the place of this part's sums.
struct PagedPart {
  int64_t row, first, count, position, head, begin, end, found;
};

static inline float number(float x) { return x; }
static inline float number(int8_t x) { return x; }
static inline float number(brain x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

// out[c] (+)= a[c] times the matrix b [inner, columns], for C rows and V vectors of columns.
template <int C, int V>
static inline void multiply_block(const float* const* a, int64_t inner, const float* b, int64_t columns, float* out,
                                  int64_t row, bool add) {
  floats sums[C][V];
#pragma GCC unroll 6
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[c][v] = add ? load<floats>(out + c * row + v * LANES) : floats{};
  for (int64_t i = 0; i < inner; ++i) {
    floats from[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) from[v] = load<floats>(b + i * columns + v * LANES);
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[c][v] += from[v] * a[c][i];
  }
#pragma GCC unroll 6
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(out + c * row + v * LANES, sums[c][v]);
}

template <int C>
static void multiply_rows(const float* const* a, int64_t rows, int64_t inner, const float* b, int64_t columns, float* out,
                          bool add) {
  for (; rows >= C; rows -= C, a += C, out += C * columns) {
    int64_t v = 0;
    for (; v + VECTORS_TOGETHER * LANES <= columns; v += VECTORS_TOGETHER * LANES)
      multiply_block<C, VECTORS_TOGETHER>(a, inner, b + v, columns, out + v, columns, add);
    for (; v < columns; v += LANES) multiply_block<C, 1>(a, inner, b + v, columns, out + v, columns, add);
  }
  if constexpr (C > 1)
    if (rows) multiply_rows<C - 1>(a, rows, inner, b, columns, out, add);
}

// A block of keys and values of one head, each token where it lies.
template <typename T>
struct PagedBlock {
  const T* keys[BLOCK + 8];  // a value follows its key; the last ones again
  float key_factors[BLOCK], value_factors[BLOCK];
  int64_t count;

  PagedBlock(const PagedAttention<T>& job, int64_t row, int64_t head, int64_t begin, int64_t end)
      : count(std::min(BLOCK, end - begin)) {
    const int64_t after = std::min(BLOCK + 8, end - begin);
    const int32_t* table = job.table + row * job.entries;
    int64_t entry = begin / job.page, place = begin % job.page;
    for (int64_t s = 0; s < after; ++s) {
      const int64_t page = std::clamp<int64_t>(table[entry], 0, job.count - 1);
      const int64_t at = (page * job.page + place) * 2 * job.heads + 2 * head;
      keys[s] = job.pages + at * job.width;
      if constexpr (std::is_same_v<T, int8_t>)
        if (s < BLOCK) key_factors[s] = job.factors[at], value_factors[s] = job.factors[at + 1];
      if (++place == job.page) place = 0, ++entry;
    }
    for (int64_t s = after; s < BLOCK + 8; ++s) keys[s] = keys[after - 1];
  }
};

// Scores of C queries, 4 / C keys at a time.
template <int C, bool whole, typename T>
static void score_few(const PagedBlock<T>& block, const float* const* queries, int64_t width, float* scores) {
  constexpr int R = C == 1 ? 4 : C == 2 ? 2 : 1;
  for (int64_t s = 0; s < block.count; s += R) {
    const T* from[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      from[r] = block.keys[s + r];
      const char* following = reinterpret_cast<const char*>(block.keys[s + r + 8 - R + 1]);
      for (int64_t i = 0; i < 2 * width * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(following + i);
    }
    floats sums[4] = {};
    for (int64_t h = 0; h < width; h += LANES) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const floats key = some<whole>(from[r] + h, width - h);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c * R + r] += key * some<whole>(queries[c] + h, width - h);
      }
    }
    float found[4];
    sums_of_four(sums, found);
    for (int c = 0; c < C; ++c)
      for (int r = 0; r < R; ++r) scores[c * BLOCK + s + r] = found[c * R + r];
  }
}

// Adds to C mixtures, V vectors of each.
template <int C, int V, bool whole, typename T>
static void mix_few(const PagedBlock<T>& block, const float* weights, int64_t width, int64_t h, float* out, int64_t row) {
  constexpr int R = C == 1 ? 4 : C == 2 ? 2 : 1;
  floats sums[4][V] = {};
  for (int64_t s = 0; s < block.count; s += R)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (s + r >= block.count) break;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int64_t at = h + v * LANES;
        const floats value = some<whole>(block.keys[s + r] + width + at, width - at);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c * R + r][v] += value * weights[c * BLOCK + s + r];
      }
    }
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < V; ++v) {
      floats total = load<floats>(out + c * row + h + v * LANES);
      for (int r = 0; r < R; ++r) total += sums[c * R + r][v];
      store(out + c * row + h + v * LANES, total);
    }
}

// Runs `step` with 4 of `count` at a time as a compile-time number, and the rest.
template <typename Step>
static inline void by_fours(int64_t count, Step step) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4) step(std::integral_constant<int, 4>{}, c);
  switch (count - c) {
    case 3: return step(std::integral_constant<int, 3>{}, c);
    case 2: return step(std::integral_constant<int, 2>{}, c);
    case 1: return step(std::integral_constant<int, 1>{}, c);
  }
}

// What one thread needs beside the pages.
struct PagedScratch {
  std::vector<float> numbers;
  std::vector<const float*> rows;
  float *scores, *keys, *values, *mixed, *most, *total;  // [C, BLOCK], [H, BLOCK], [BLOCK, row], [C, row], [C], [C]
  int64_t row;

  void fit(int64_t queries, int64_t width) {
    row = (width + LANES - 1) / LANES * LANES;
    const int64_t sizes[] = {queries * BLOCK, width * BLOCK, BLOCK * row, queries * row, queries, queries};
    int64_t needed = LANES;
    for (const int64_t size : sizes) needed += size;
    if (static_cast<int64_t>(numbers.size()) < needed) numbers.resize(needed);
    if (static_cast<int64_t>(rows.size()) < 2 * queries) rows.resize(2 * queries);
    float* next = numbers.data() + (64 - reinterpret_cast<uintptr_t>(numbers.data()) % 64) % 64 / 4;
    float** const all[] = {&scores, &keys, &values, &mixed, &most, &total};
    for (int i = 0; i < 6; ++i) *all[i] = next, next += sizes[i];
  }
};

// Makes weights of the scores of a query at `position` for the keys from `begin` on; what came before shrinks.
template <typename T>
static void weigh(const PagedAttention<T>& job, int64_t position, int64_t begin, int64_t count, float* scores, float* most,
                  float* total, float* mixed, int64_t row) {
  const int64_t low = job.first_seen(position), sink = job.of_chunk(position), padded = (count + LANES - 1) / LANES * LANES;
  floats largest = floats{} + *most;
  const bool all = begin >= low && begin + padded - 1 <= position && padded == count;
  for (int64_t s = 0; s < padded; s += LANES) {
    floats v = load<floats>(scores + s) * job.scale;
    if (!all) {
      ints at;
      for (int lane = 0; lane < LANES; ++lane) at[lane] = static_cast<int32_t>(begin + s) + lane;
      const ints seen = (at <= static_cast<int32_t>(std::min(position, begin + count - 1))) &
                        ((at >= static_cast<int32_t>(low)) |
                         ((at < static_cast<int32_t>(job.sinks)) & (at >= static_cast<int32_t>(sink))));
      v = seen ? v : floats{} - std::numeric_limits<float>::infinity();
    }
    store(scores + s, v);
    largest = v > largest ? v : largest;
  }
  float larger = largest[0];
  for (int lane = 1; lane < LANES; ++lane) larger = std::max(larger, largest[lane]);
  floats sums{};
  for (int64_t s = 0; s < padded; s += LANES) {
    const floats v = load<floats>(scores + s);
    const floats weights = v < LOWEST ? floats{} : exponential(v - larger);
    store(scores + s, weights), sums += weights;
  }
  const float shrink = *most == larger ? 1 : exponential(floats{} + (*most - larger))[0];
  *total = *total * shrink + sum(sums), *most = larger;
  if (shrink != 1)
    for (int64_t h = 0; h < row; h += LANES) store(mixed + h, load<floats>(mixed + h) * shrink);
}

template <bool whole, typename T>
static void attend_part(const PagedAttention<T>& job, const PagedPart& part, PagedScratch& scratch, float* found) {
  const int64_t queries = part.count * job.groups, width = job.width;
  scratch.fit(queries, width);
  const int64_t row = scratch.row, last = part.position + part.count - 1, low = job.first_seen(part.position);
  const bool few = queries <= FEW;
  const float** const rows = scratch.rows.data();
  for (int64_t c = 0; c < queries; ++c) {
    const int64_t token = part.first + c / job.groups;
    rows[c] = job.queries + ((token * job.heads + part.head) * job.groups + c % job.groups) * width;
    rows[queries + c] = scratch.scores + c * BLOCK;
    scratch.most[c] = LOWEST, scratch.total[c] = 0;
  }
  std::memset(scratch.mixed, 0, 4 * queries * row);
  const int64_t end = std::min(part.end, last + 1);
  for (int64_t begin = part.begin; begin < end; begin += BLOCK) {
    if (begin >= job.sinks && begin + BLOCK <= low) continue;
    const PagedBlock<T> block(job, part.row, part.head, begin, end);
    constexpr bool factors = std::is_same_v<T, int8_t>;
    if (few) {
      by_fours(queries, [&](auto C, int64_t c) {
        score_few<C(), whole>(block, rows + c, width, scratch.scores + c * BLOCK);
      });
    } else {
      for (int64_t s = 0; s < BLOCK; ++s) {
        const T* key = block.keys[s];
        const bool there = s < block.count;
        const float factor = factors && there ? block.key_factors[s] : 1;
        for (int64_t h = 0; h < width; ++h) scratch.keys[h * BLOCK + s] = there ? number(key[h]) * factor : 0;
      }
      multiply_rows<ROWS_TOGETHER>(rows, queries, width, scratch.keys, BLOCK, scratch.scores, false);
    }
    for (int64_t c = 0; c < queries; ++c) {
      float* const scores = scratch.scores + c * BLOCK;
      if (factors && few)
        for (int64_t s = 0; s < block.count; ++s) scores[s] *= block.key_factors[s];
      weigh(job, part.position + c / job.groups, begin, block.count, scores, scratch.most + c, scratch.total + c,
            scratch.mixed + c * row, row);
      if (factors && few)
        for (int64_t s = 0; s < block.count; ++s) scores[s] *= block.value_factors[s];
    }
    if (few) {
      by_fours(queries, [&](auto C, int64_t c) {
        float* const out = scratch.mixed + c * row;
        int64_t h = 0;
        for (; h + 4 * LANES <= width; h += 4 * LANES)
          mix_few<C(), 4, whole>(block, scratch.scores + c * BLOCK, width, h, out, row);
        for (; h < width; h += LANES) mix_few<C(), 1, whole>(block, scratch.scores + c * BLOCK, width, h, out, row);
      });
    } else {
      for (int64_t s = 0; s < block.count; ++s) {
        float* const value = scratch.values + s * row;
        for (int64_t h = 0; h < row; h += LANES) {
          const floats v = h < width ? some<whole>(block.keys[s] + width + h, width - h) : floats{};
          store(value + h, factors ? v * block.value_factors[s] : v);
        }
      }
      multiply_rows<ROWS_TOGETHER>(rows + queries, queries, block.count, scratch.values, row, scratch.mixed, true);
    }
  }
  for (int64_t c = 0; c < queries; ++c) {
    const int64_t token = part.first + c / job.groups;
    float* const out = job.out + ((token * job.heads + part.head) * job.groups + c % job.groups) * width;
    if (part.found >= 0) {
      float* const sums = found + (part.found * FEW + c) * (row + 2);
      sums[0] = scratch.most[c], sums[1] = scratch.total[c];
      std::memcpy(sums + 2, scratch.mixed + c * row, 4 * row);
      continue;
    }
    const float inverse = scratch.total[c] == 0 ? 0 : 1 / scratch.total[c];
    for (int64_t h = 0; h < width; ++h) out[h] = scratch.mixed[c * row + h] * inverse;
  }
}

// The sums of all parts of some queries, of which `part` is the first.
template <typename T>
static void join_parts(const PagedAttention<T>& job, const PagedPart& part, int64_t parts, const float* found) {
  const int64_t row = (job.width + LANES - 1) / LANES * LANES, size = row + 2;
  for (int64_t c = 0; c < part.count * job.groups; ++c) {
    const float* const own = found + (part.found * FEW + c) * size;
    float* const out = job.out + (((part.first + c / job.groups) * job.heads + part.head) * job.groups + c % job.groups) * job.width;
    float most = LOWEST, total = 0;
    for (int64_t p = 0; p < parts; ++p) most = std::max(most, own[p * FEW * size]);
    std::fill(out, out + job.width, 0.0f);
    for (int64_t p = 0; p < parts; ++p) {
      const float* const sums = own + p * FEW * size;
      const float weight = std::exp(sums[0] - most);
      total += sums[1] * weight;
      for (int64_t h = 0; h < job.width; ++h) out[h] += sums[2 + h] * weight;
    }
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t h = 0; h < job.width; ++h) out[h] *= inverse;
  }
}

template <bool whole, typename T>
static void attend_paged(ffi::ThreadPool& threads, const PagedAttention<T>& job) {
  constexpr int64_t LITTLE = 1 << 15;  // key elements up to which another thread would start too late
  const int64_t together = std::max<int64_t>(1, QUERIES_TOGETHER / job.groups);
  std::vector<PagedPart> parts;
  std::vector<std::pair<int64_t, int64_t>> joined;  // the first of several parts, and how many they are
  int64_t work = 0, pieces = 0;
  for (int64_t r = 0; r < job.rows; ++r) {
    const int64_t after = std::min<int64_t>(job.starts[r + 1], job.tokens);
    const int64_t length = std::min<int64_t>(job.lengths[r], job.entries * job.page);
    for (int64_t first = job.starts[r]; first < after; first += together) {
      const int64_t count = std::min(together, after - first), position = length - (after - first);
      const int64_t begin = job.sinks ? 0 : std::max<int64_t>(0, job.first_seen(position)) / BLOCK * BLOCK;
      const int64_t end = position + count, queries = count * job.groups;
      const int64_t each = queries <= FEW ? PART : end - begin;
      work += (end - begin) * queries * job.heads * job.width;
      for (int64_t head = 0; head < job.heads; ++head) {
        const bool several = end - begin > each;
        if (several) joined.emplace_back(parts.size(), (end - begin + each - 1) / each);
        for (int64_t from = begin; from < end; from += each)
          parts.push_back({r, first, count, position, head, from, std::min(end, from + each), several ? pieces++ : -1});
      }
    }
  }
  std::fill(job.out, job.out + job.tokens * job.heads * job.groups * job.width, 0.0f);  // padding stays so
  std::vector<float> found(pieces * FEW * ((job.width + LANES - 1) / LANES * LANES + 2));
  const auto run = [&](int64_t count, auto step) {
    if (work < LITTLE) {
      for (int64_t i = 0; i < count; ++i) step(i);
    } else {
      share(threads, count, step);
    }
  };
  run(parts.size(), [&](int64_t i) {
    thread_local PagedScratch scratch;
    attend_part<whole>(job, parts[i], scratch, found.data());
  });
  if (!joined.empty())
    run(joined.size(), [&](int64_t i) { join_parts(job, parts[joined[i].first], joined[i].second, found.data()); });
}
