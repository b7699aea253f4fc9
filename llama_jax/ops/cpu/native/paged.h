// Attention of new tokens to keys and values in pages: pages are read where they lie, each once for several queries.

#pragma once

#include <type_traits>
#include <vector>

#include "simd.h"
#include "thread_pool.h"

constexpr int64_t BLOCK = 64;          // keys whose scores are made together
constexpr int64_t PART = 512;          // keys that one thread reads for a few queries
constexpr int64_t FEW = 12;            // queries of a head up to which keys are not packed
constexpr int64_t QUERIES_TOGETHER = 96;
constexpr int ROWS_TOGETHER = 6, VECTORS_TOGETHER = VNNI ? 4 : 2, FEW_TOGETHER = VNNI ? 4 : 2;  // sums are in registers
constexpr int SPARE = 3;               // more queries than there are, so that a matmul may have some after the last
constexpr float LOWEST = -1e30f;       // finite, so that no difference of two is NaN

// `count` new tokens of a row from flat token `first` on, at `position`; a head; the keys from `begin` to `end`. Where the
// keys are in several parts, `found` is the place of this part's sums, and the first one knows how many `parts` there are.
struct PagedPart {
  int64_t row, first, count, position, head, begin, end, found, parts;
};

// Queries [T, K, G, H] and the pages of a layer [P, page, 2K, H], in float32, bfloat16 or int8 with factors [P, page, 2K].
// A `window` or `chunk` of 0 is none.
template <typename T>
struct PagedAttention {
  const float* queries;
  const T* pages;
  const float* factors;
  const int32_t *table, *lengths, *starts;
  float* out;
  int64_t tokens, heads, groups, width, rows, entries, count, page, window, chunk;
  float scale;

  // Where the query with a number among those of a part begins.
  int64_t place(const PagedPart& part, int64_t c) const {
    return (((part.first + c / groups) * heads + part.head) * groups + c % groups) * width;
  }
  // The first position that a query sees.
  int64_t first_seen(int64_t position) const {
    return std::max<int64_t>(chunk ? position / chunk * chunk : 0, window ? position - window + 1 : 0);
  }
};

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
    for (int v = 0; v < V; ++v) from[v] = in_register(load<floats>(b + i * columns + v * LANES));
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

// So many `rows`, and up to two after them: code for every remainder would take a compiler 0.2 s.
template <int C = ROWS_TOGETHER>
static void multiply_rows(const float* const* a, int64_t rows, int64_t inner, const float* b, int64_t columns, float* out,
                          bool add) {
  constexpr int64_t left = C > SPARE ? SPARE : 0;
  for (; rows > left; rows -= C, a += C, out += C * columns) {
    int64_t v = 0;
    for (; v + VECTORS_TOGETHER * LANES <= columns; v += VECTORS_TOGETHER * LANES)
      multiply_block<C, VECTORS_TOGETHER>(a, inner, b + v, columns, out + v, columns, add);
    for (; v < columns; v += LANES) multiply_block<C, 1>(a, inner, b + v, columns, out + v, columns, add);
  }
  if constexpr (C > SPARE)
    if (rows > 0) multiply_rows<SPARE>(a, rows, inner, b, columns, out, add);
}

// A block of keys and values of one head, each token where it lies.
template <typename T>
struct PagedBlock {
  const T* keys[BLOCK + 3];  // a value follows its key; the last one again
  const float* factors[BLOCK + 3];
  int64_t count;

  PagedBlock(const PagedAttention<T>& job, int64_t row, int64_t head, int64_t begin, int64_t end)
      : count(std::max<int64_t>(0, std::min(end - begin, BLOCK))) {
    const int32_t* table = job.table + row * job.entries;
    int64_t entry = begin / job.page, place = begin % job.page;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t page = std::max<int64_t>(0, std::min<int64_t>(table[entry], job.count - 1));
      const int64_t at = (page * job.page + place) * 2 * job.heads + 2 * head;
      keys[s] = job.pages + at * job.width, factors[s] = job.factors + at;
      if (++place == job.page) place = 0, ++entry;
    }
    for (int64_t s = count; count && s < BLOCK + 3; ++s) keys[s] = keys[count - 1], factors[s] = factors[count - 1];
  }
};

// Fetches a block ahead, a key and its value at each step: a processor's own fetching ahead ends with a page of memory, on
// which few tokens lie.
template <typename T>
struct Ahead {
  const PagedBlock<T>* block;
  int64_t bytes, token = 0;

  void step() {
    if (token >= block->count) return;
    const char* from = reinterpret_cast<const char*>(block->keys[token++]);
    for (int64_t i = 0; i < bytes; i += 256)
#pragma GCC unroll 4
      for (int64_t line = 0; line < 256; line += 64) __builtin_prefetch(from + i + line, 0, 2);
  }
};

// Scores of C queries with four keys, from `s` on.
template <int C, bool whole, typename T>
static void score_few(const PagedBlock<T>& block, int64_t s, const float* const* queries, int64_t width,
                      float* scores, Ahead<T>& ahead) {
    const T* from[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) from[r] = block.keys[s + r], ahead.step();
    floats sums[C][4] = {};
    for (int64_t h = 0; h < width; h += LANES) {
      floats key[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) key[r] = in_register(some<whole>(from[r] + h, width - h));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const floats query = some<whole>(queries[c] + h, width - h);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) sums[c][r] += key[r] * query;
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums_of_four(sums[c], scores + c * BLOCK + s);
}

// Adds to C mixtures, V vectors of each.
template <int C, int V, bool whole, typename T>
static void mix_few(const PagedBlock<T>& block, int64_t begin, int64_t end, const float* weights,
                    int64_t width, int64_t h, float* out, int64_t row) {
  constexpr int R = EXACT ? 1 : C == 1 ? 4 : C == 2 ? 2 : 1;
  floats sums[4][V] = {};
  for (int64_t s = begin; s < end; s += R)  // of keys after the end the weight is zero
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int64_t at = h + v * LANES;
        const floats value = in_register(some<whole>(block.keys[s + r] + width + at, width - at));
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c * R + r][v] += value * weights[c * BLOCK + s + r];
      }
    }
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      floats total = load<floats>(out + c * row + h + v * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total += sums[c * R + r][v];
      store(out + c * row + h + v * LANES, total);
    }
}

// Runs `step` with so many of `count` at a time, a compile-time number, and with the rest.
template <typename Step>
static inline void some_at_once(int64_t count, Step step) {
  int64_t c = 0;
  for (; c + FEW_TOGETHER <= count; c += FEW_TOGETHER) step(std::integral_constant<int, FEW_TOGETHER>{}, c);
  if (count - c == 3) return step(std::integral_constant<int, 3>{}, c);
  if (count - c == 2) return step(std::integral_constant<int, 2>{}, c);
  if (count - c == 1) return step(std::integral_constant<int, 1>{}, c);
}

// What one thread needs beside the pages.
struct PagedScratch {
  std::vector<float> numbers;
  std::vector<const float*> rows;
  float *scores, *keys, *values, *mixed, *most, *total;  // [C, BLOCK], [H, BLOCK], [BLOCK, row], [C, row], [C], [C]
  int64_t row;

  void fit(int64_t queries, int64_t width) {
    queries += SPARE;
    row = (width + LANES - 1) / LANES * LANES;
    const int64_t sizes[] = {queries * BLOCK, row * BLOCK, BLOCK * row, queries * row, queries, queries};
    int64_t needed = 64 / 4;  // to begin at a multiple of 64 bytes, whatever the processor's vectors are
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
__attribute__((noinline)) static void weigh(const PagedAttention<T>& job, int64_t position, int64_t begin, int64_t count,
                                            float* scores, float* most, float* total, float* mixed, int64_t row) {
  const int64_t low = job.first_seen(position), padded = (count + LANES - 1) / LANES * LANES;
  floats largest = floats{} + *most;
  const bool all = begin >= low && begin + padded - 1 <= position && padded == count;
  for (int64_t s = 0; s < padded; s += LANES) {
    floats v = load<floats>(scores + s) * job.scale;
    if (!all) {
      ints at;
      for (int lane = 0; lane < LANES; ++lane) at[lane] = static_cast<int32_t>(begin + s) + lane;
      const ints seen = (at <= static_cast<int32_t>(std::min(position, begin + count - 1))) &
                        (at >= static_cast<int32_t>(low));
      v = seen ? v : floats{} - __builtin_inff();
    }
    store(scores + s, v);
    largest = v > largest ? v : largest;
  }
  const float larger = largest_lane(largest);
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

// Few queries: keys and values are read from where they lie.
template <bool whole, typename T>
static void attend_block_few(const PagedAttention<T>& job, const PagedPart& part, int64_t begin, const PagedBlock<T>& block,
                             PagedScratch& scratch, Ahead<T>& ahead) {
  const int64_t queries = part.count * job.groups, width = job.width, row = scratch.row;
  const int64_t together = EXACT || queries > FEW_TOGETHER ? 16 : BLOCK;  // keys that stay in the first cache for all queries
  for (int64_t from = 0; from < block.count; from += together)
    some_at_once(queries, [&](auto C, int64_t c) {
      for (int64_t s = from; s < std::min(from + together, block.count); s += 4)
        score_few<C(), whole>(block, s, &scratch.rows[c], width, scratch.scores + c * BLOCK, ahead);
    });
  for (int64_t c = 0; c < queries; ++c) {
    float* const scores = scratch.scores + c * BLOCK;
    const auto times = [&](int64_t which) {  // the factors of keys or values
      if constexpr (std::is_same_v<T, int8_t>)
        for (int64_t s = 0; s < block.count; ++s) scores[s] *= block.factors[s][which];
    };
    times(0);
    weigh(job, part.position + c / job.groups, begin, block.count, scores, scratch.most + c, scratch.total + c,
          scratch.mixed + c * row, row);
    times(1);
  }
  for (int64_t from = 0; from < block.count; from += together)
    some_at_once(queries, [&](auto C, int64_t c) {
      const auto mix = [&](auto V, int64_t h) {
        mix_few<C(), V(), whole>(block, from, std::min(from + together, block.count), scratch.scores + c * BLOCK, width, h,
                                 scratch.mixed + c * row, row);
      };
      int64_t h = 0;
      for (; h + VECTORS_TOGETHER * LANES <= width; h += VECTORS_TOGETHER * LANES)
        mix(std::integral_constant<int, VECTORS_TOGETHER>{}, h);
      for (; h < width; h += LANES) mix(std::integral_constant<int, 1>{}, h);
    });
}

// Many queries: keys and values are packed as float32 matrices, keys transposed.
template <bool whole, typename T>
static void attend_block_many(const PagedAttention<T>& job, const PagedPart& part, int64_t begin, const PagedBlock<T>& block,
                              PagedScratch& scratch) {
  const int64_t queries = part.count * job.groups, width = job.width, row = scratch.row;
  constexpr bool factors = std::is_same_v<T, int8_t>;
  for (int64_t s = 0; s < BLOCK; s += LANES)
    for (int64_t h = 0; h < row; h += LANES) {
      floats keys[LANES];
      for (int i = 0; i < LANES; ++i)
        keys[i] = some<whole>(block.keys[s + i] + h, width - h) * (factors ? block.factors[s + i][0] : 1.0f);
      transpose(keys);
      for (int i = 0; i < LANES; ++i) store(scratch.keys + (h + i) * BLOCK + s, keys[i]);
    }
  for (int64_t s = 0; s < block.count; ++s)
    for (int64_t h = 0; h < row; h += LANES) {
      const floats value = some<whole>(block.keys[s] + width + h, width - h);
      store(scratch.values + s * row + h, value * (factors ? block.factors[s][1] : 1.0f));
    }
  multiply_rows(scratch.rows.data(), queries, width, scratch.keys, BLOCK, scratch.scores, false);
  for (int64_t c = 0; c < queries; ++c)
    weigh(job, part.position + c / job.groups, begin, block.count, scratch.scores + c * BLOCK, scratch.most + c,
          scratch.total + c, scratch.mixed + c * row, row);
  const float* const* weights = scratch.rows.data() + queries + SPARE;
  multiply_rows(weights, queries, block.count, scratch.values, row, scratch.mixed, true);
}

template <bool whole, typename T>
static void attend_part(const PagedAttention<T>& job, const PagedPart& part, PagedScratch& scratch, float* found) {
  const int64_t queries = part.count * job.groups, width = job.width;
  scratch.fit(queries, width);
  const int64_t row = scratch.row;
  for (int64_t c = 0; c < queries + SPARE; ++c) {
    scratch.rows[c] = job.queries + job.place(part, std::min(c, queries - 1));
    scratch.rows[queries + SPARE + c] = scratch.scores + c * BLOCK;
    scratch.most[c] = LOWEST, scratch.total[c] = 0;
  }
  std::memset(scratch.mixed, 0, 4 * (queries + SPARE) * row);
  const int64_t end = part.end;
  int64_t begin = part.begin;
  PagedBlock<T> block(job, part.row, part.head, begin, end);
  Ahead<T> first{&block, 2 * width * static_cast<int64_t>(sizeof(T))};
  for (int64_t i = 0; i < block.count; ++i) first.step();
  while (begin < end) {
    const int64_t next_begin = begin + BLOCK;
    const PagedBlock<T> next(job, part.row, part.head, next_begin, end);
    Ahead<T> ahead{&next, first.bytes};
    EXACT || queries <= FEW ? attend_block_few<whole>(job, part, begin, block, scratch, ahead)
                            : attend_block_many<whole>(job, part, begin, block, scratch);
    block = next, begin = next_begin;
  }
  for (int64_t c = 0; c < queries; ++c) {
    if (part.found >= 0) {
      float* const sums = found + (part.found + c) * (row + 2);
      sums[0] = scratch.most[c], sums[1] = scratch.total[c];
      std::memcpy(sums + 2, scratch.mixed + c * row, 4 * row);
      continue;
    }
    const float inverse = scratch.total[c] == 0 ? 0 : 1 / scratch.total[c];
    float* const out = job.out + job.place(part, c);
    for (int64_t h = 0; h < width; ++h) out[h] = scratch.mixed[c * row + h] * inverse;
  }
}

// The sums of all parts of some queries, of which `part` is the first.
template <typename T>
static void join_parts(const PagedAttention<T>& job, const PagedPart& part, const float* found) {
  const int64_t row = (job.width + LANES - 1) / LANES * LANES, size = row + 2, queries = part.count * job.groups;
  for (int64_t c = 0; c < queries; ++c) {
    float* const out = job.out + job.place(part, c);
    const auto of_part = [&](int64_t p) { return found + (part.found + p * queries + c) * size; };
    float most = LOWEST, total = 0;
    for (int64_t p = 0; p < part.parts; ++p) most = std::max(most, of_part(p)[0]);
    for (int64_t p = 0; p < part.parts; ++p) {
      const float* const sums = of_part(p);
      const float weight = __builtin_expf(sums[0] - most);
      total += sums[1] * weight;
      for (int64_t h = 0; h < job.width; ++h) out[h] += sums[2 + h] * weight;
    }
    const float inverse = total == 0 ? 0 : 1 / total;
    for (int64_t h = 0; h < job.width; ++h) out[h] *= inverse;
  }
}

template <bool whole, typename T>
static void attend_paged(const ThreadPool& threads, const PagedAttention<T>& job) {
  constexpr int64_t LITTLE = 1 << 15;  // key elements up to which another thread would start too late
  const int64_t together = std::max<int64_t>(1, QUERIES_TOGETHER / job.groups);
  std::vector<PagedPart> parts;
  int64_t work = 0, sums = 0;
  for (int64_t r = 0; r < job.rows; ++r) {
    const int64_t after = std::min<int64_t>(job.starts[r + 1], job.tokens);
    for (int64_t first = job.starts[r]; first < after; first += together) {
      const int64_t count = std::min(together, after - first), position = job.lengths[r] - (after - first);
      const int64_t end = std::min(position + count, job.entries * job.page);  // what is beyond the table is nowhere
      const int64_t begin = std::min(end, job.first_seen(position) / BLOCK * BLOCK), queries = count * job.groups;
      const int64_t each = EXACT || queries <= FEW ? PART : end - begin;
      const int64_t offset = EXACT ? begin % PART : 0;  // each part begins at a multiple of PART
      const bool several = EXACT || end - begin > each;
      work += (end - begin) * (queries + 7) / 8 * job.heads * job.width;
      for (int64_t head = 0; head < job.heads; ++head) {
        int64_t those = several ? (end - begin + offset + each - 1) / each : 0;
        for (int64_t from = begin - offset; from < end; from += each, those = 0, sums += several ? queries : 0)
          parts.push_back({r, first, count, position, head, std::max(begin, from), std::min(end, from + each),
                           several ? sums : -1, those});
      }
    }
  }
  std::fill(job.out, job.out + job.tokens * job.heads * job.groups * job.width, 0.0f);  // padding stays so
  std::vector<float> found(sums * ((job.width + LANES - 1) / LANES * LANES + 2));
  const bool alone = work < LITTLE;
  share(threads, parts.size(), [&](int64_t i) {
    thread_local PagedScratch scratch;
    attend_part<whole>(job, parts[i], scratch, found.data());
  }, alone);
  if (sums)
    share(threads, parts.size(), [&](int64_t i) { if (parts[i].parts) join_parts(job, parts[i], found.data()); }, alone);
}
