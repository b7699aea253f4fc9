// Vectors as wide as the processor's, and the instructions that multiply bytes where it has them.
//
// They are the vector extensions of GCC and Clang, so that AVX2, AVX-512 and NEON come from one source.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>  // and std::min: <algorithm>, <cmath>, <memory> and <thread> take 0.2 s more to compile

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef EXACT
#define EXACT false  // the sums of a token, or a query, do not depend on how many there are
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI 1
constexpr int W = 64;  // bytes of a vector
#else
#define VNNI 0
constexpr int W = 32;
#endif
constexpr int LANES = W / 4;
#if VNNI && defined(__AVX512BF16__)
#define PAIRS 1  // of bfloat16, which are multiplied by one instruction and added to a float
#else
#define PAIRS 0
#endif

typedef uint8_t u8s __attribute__((vector_size(W)));
typedef int8_t i8s __attribute__((vector_size(W)));
typedef uint32_t words __attribute__((vector_size(W)));
typedef int32_t ints __attribute__((vector_size(W)));
typedef float floats __attribute__((vector_size(W)));
typedef int8_t narrow __attribute__((vector_size(LANES)));  // as many bytes as there are lanes
typedef uint8_t bytes_of_lanes __attribute__((vector_size(LANES)));
typedef uint64_t eights __attribute__((vector_size(LANES)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints4 __attribute__((vector_size(16)));
typedef _Float16 half;
struct brain {  // bfloat16, the upper half of a float
  uint16_t bits;
};

template <typename V>
static inline V load(const void* from) {
  V found;
  std::memcpy(&found, from, sizeof(V));
  return found;
}

template <typename V>
static inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

// Compilers load a vector again for every product with it.
template <typename V>
static inline V in_register(V v) {
#if defined(__AVX2__)
  asm("" : "+v"(v));
#endif
  return v;
}

static inline floats wide(ints v) { return __builtin_convertvector(v, floats); }

template <typename T>
static inline T sum_of_lanes(const T* all) {
  T pairs[LANES];
  std::memcpy(pairs, all, sizeof(pairs));
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) pairs[i] += pairs[i + n];
  return pairs[0];
}

// Lane i of `spread_from<each>(first)` is first + i / each: with `taken`, so many lanes of each number from `first` on.
template <int each>
static inline ints spread_from(int32_t first) {
  ints places;
  for (int i = 0; i < LANES; ++i) places[i] = i / each;
  return places + first;
}

// total + a * b. Where kernels must agree, it is rounded once if there is an instruction: compilers decide by the code around.
static inline floats plus_product(floats total, floats a, floats b) {
#if EXACT && VNNI
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif EXACT && defined(__FMA__) && defined(__AVX2__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#else
  return total + a * b;
#endif
}
static inline floats4 plus_product(floats4 total, floats4 a, floats4 b) {
#if defined(__FMA__) && defined(__AVX2__)
  return (floats4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)total);
#else
  return total + a * b;
#endif
}

// --- what processors have instructions for -------------------------------------------------------------------------------

#if VNNI

// Where an array may end before the vector does: zeros after `count` bytes.
template <bool whole, typename V>
static inline V load(const void* from, int64_t count) {
  if (whole) return load<V>(from);
  const int64_t bytes = std::min<int64_t>(count, sizeof(V));
  const __m512i found = _mm512_maskz_loadu_epi8(bytes > 63 ? ~0ull : (1ull << bytes) - 1, from);
  V v;
  std::memcpy(&v, &found, sizeof(V));
  return v;
}

// GCC converts to and from bytes one by one.
static inline ints longer(narrow v) { return (ints)_mm512_cvtepi8_epi32((__m128i)v); }
static inline ints longer(bytes_of_lanes v) { return (ints)_mm512_cvtepu8_epi32((__m128i)v); }
static inline narrow shorter(ints v) { return (narrow)_mm512_cvtepi32_epi8((__m512i)v); }

static inline float sum(floats v) { return _mm512_reduce_add_ps((__m512)v); }
static inline int32_t sum(ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
static inline uint32_t largest(words v) { return _mm512_reduce_max_epu32((__m512i)v); }
static inline float largest_lane(floats v) { return _mm512_reduce_max_ps((__m512)v); }

// The sums of four vectors.
static inline void sums_of_four(const floats* v, float* to) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

// Four vectors: of every four lanes the i-th of each goes into the i-th.
static inline void transpose_fours(floats* v) {
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
  const __m512 ab2 = _mm512_unpackhi_ps(a, b), cd2 = _mm512_unpackhi_ps(c, d);
  v[0] = (floats)_mm512_shuffle_ps(ab, cd, 0x44), v[1] = (floats)_mm512_shuffle_ps(ab, cd, 0xee);
  v[2] = (floats)_mm512_shuffle_ps(ab2, cd2, 0x44), v[3] = (floats)_mm512_shuffle_ps(ab2, cd2, 0xee);
}

// LANES vectors: the i-th lane of each goes into the i-th.
static inline void transpose(floats* v) {
  const __m512i lanes = (__m512i)spread_from<1>(0);
#pragma GCC unroll 4
  for (int h = LANES / 2; h > 0; h /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(h));
    const __m512i low = _mm512_mask_add_epi32(lanes, upper, lanes, _mm512_set1_epi32(LANES - h));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(h));
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      if (i & h) continue;
      const __m512 a = (__m512)v[i], b = (__m512)v[i + h];
      v[i] = (floats)_mm512_permutex2var_ps(a, low, b), v[i + h] = (floats)_mm512_permutex2var_ps(a, high, b);
    }
  }
}

#if PAIRS
// Neighbouring numbers of two vectors as pairs.
static inline floats as_pairs(floats first, floats second) {
  return (floats)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Adds to each lane the product of two numbers of bfloat16 with its own two; of the first alone where that is the last.
template <bool whole>
static inline floats plus_product(floats total, const brain* w, floats x) {
  uint32_t pair = 0;
  std::memcpy(&pair, w, whole ? 4 : 2);
  return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)(words{} + pair), (__m512bh)x);
}
#endif

// Adds to each lane the sum of four neighbouring products.
static inline ints dot(ints total, u8s w, i8s x) {
  return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)w, (__m512i)x);
}

// A vector of numbers of 16 bits.
template <bool whole>
static inline floats halves(const half* from, int64_t count) {
  typedef half h16s __attribute__((vector_size(32)));
  return (floats)_mm512_cvtph_ps((__m256i)load<whole, h16s>(from, 2 * count));
}
template <bool whole>
static inline floats halves(const brain* from, int64_t count) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  const __m512i bits = _mm512_cvtepu16_epi32((__m256i)load<whole, u16x16>(from, 2 * count));
  return (floats)_mm512_slli_epi32(bits, 16);
}

static inline floats taken(floats from, ints places) {
  return (floats)_mm512_permutexvar_ps((__m512i)places, (__m512)from);
}

// 16 bytes, the same again, the next 16, those again; `count` of them are there.
template <bool whole>
static inline u8s twice16(const uint8_t* from, int64_t count) {
  typedef uint8_t u8x32 __attribute__((vector_size(32)));
  const __m512i bytes = _mm512_castsi256_si512((__m256i)load<whole, u8x32>(from, count));
  return (u8s)_mm512_shuffle_i64x2(bytes, bytes, 0x50);
}

// `value` where there is a bit, else 0.
static inline u8s spread(uint64_t bits, uint8_t value) { return (u8s)_mm512_maskz_set1_epi8(bits, value); }

// The first 16 bits of every 32, and the others.
static inline void split16(const uint64_t* bits, uint64_t* first, uint64_t* second) {
  const __m128i places = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m128i found = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits)), places);
  *first = _mm_cvtsi128_si64(found), *second = _mm_extract_epi64(found, 1);
}

// For each byte, 0 to 15, the entry of a table.
static inline u8s looked_up(const int8_t* table, u8s places) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (u8s)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)places);
}

static inline u8s all32(const uint8_t* from) {
  return (u8s)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The instruction takes unsigned weights: 128 is added to them, and subtracted in the initial sums.
typedef u8s Signed;
constexpr int MORE = 128;
static inline Signed with_sign(i8s w) { return (u8s)w ^ 128; }

#else

template <bool whole, typename V>
static inline V load(const void* from, int64_t count) {
  if (whole) return load<V>(from);
  V found{};
  std::memcpy(&found, from, std::min<int64_t>(count, sizeof(V)));
  return found;
}

#if defined(__AVX2__)
static inline ints longer(narrow v) { return (ints)_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (int64_t)v)); }
static inline ints longer(bytes_of_lanes v) { return (ints)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)v)); }
#else
static inline ints longer(narrow v) { return __builtin_convertvector(v, ints); }
static inline ints longer(bytes_of_lanes v) { return __builtin_convertvector(v, ints); }
#endif
static inline narrow shorter(ints v) { return __builtin_convertvector(v, narrow); }

static inline float sum(floats v) { return sum_of_lanes(reinterpret_cast<float*>(&v)); }
static inline int32_t sum(ints v) { return sum_of_lanes(reinterpret_cast<int32_t*>(&v)); }

static inline uint32_t largest(words v) {
  uint32_t found = v[0];
  for (int lane = 1; lane < LANES; ++lane) found = std::max(found, v[lane]);
  return found;
}

static inline float largest_lane(floats v) {
  float found = v[0];
  for (int lane = 1; lane < LANES; ++lane) found = v[lane] > found ? v[lane] : found;
  return found;
}

static inline void sums_of_four(const floats* v, float* to) {
  for (int i = 0; i < 4; ++i) to[i] = sum(v[i]);
}

static inline void transpose_fours(floats* v) {
  float from[4][LANES];
  std::memcpy(from, v, sizeof(from));
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < LANES; ++j) v[i][j] = from[j % 4][j / 4 * 4 + i];
}

static inline void transpose(floats* v) {
  float from[LANES][LANES];
  std::memcpy(from, v, sizeof(from));
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) v[i][j] = from[j][i];
}

template <bool whole>
static inline floats halves(const half* from, int64_t count) {
#if defined(__F16C__) && defined(__AVX2__)
  typedef half h8s __attribute__((vector_size(16)));
  return (floats)_mm256_cvtph_ps((__m128i)load<whole, h8s>(from, 2 * count));
#else
  floats found{};
  for (int i = 0; i < LANES && (whole || i < count); ++i) found[i] = from[i];
  return found;
#endif
}
template <bool whole>
static inline floats halves(const brain* from, int64_t count) {
#if defined(__AVX2__)
  typedef uint16_t u16x8 __attribute__((vector_size(16)));
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)load<whole, u16x8>(from, 2 * count)), 16);
#else
  words bits{};
  for (int i = 0; i < LANES && (whole || i < count); ++i) bits[i] = uint32_t{from[i].bits} << 16;
  return (floats)bits;
#endif
}

static inline floats taken(floats from, ints places) {
#if defined(__AVX2__)
  return (floats)_mm256_permutevar8x32_ps((__m256)from, (__m256i)places);
#else
  floats found;
  for (int i = 0; i < LANES; ++i) found[i] = from[places[i]];
  return found;
#endif
}

template <bool whole>
static inline u8s twice16(const uint8_t* from, int64_t) {
  u8s found;
  for (int i = 0; i < 2; ++i) std::memcpy(reinterpret_cast<char*>(&found) + 16 * i, from, 16);
  return found;
}

static inline u8s spread(uint64_t bits, uint8_t value) {
  u8s found, bit;
  for (int i = 0; i < W; ++i) bit[i] = 1 << i % 8;
#if defined(__AVX2__)
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  found = (u8s)_mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), places);
#else
  for (int i = 0; i < W; ++i) found[i] = bits >> i / 8 * 8;
#endif
  return (u8s)((found & bit) != 0) & value;
}

static inline void split16(const uint64_t* bits, uint64_t* first, uint64_t* second) {
  *first = (bits[0] & 0xffff) | (bits[0] >> 16 & 0xffff0000);
  *second = (bits[0] >> 16 & 0xffff) | (bits[0] >> 32 & 0xffff0000);
}

static inline u8s looked_up(const int8_t* table, u8s places) {
#if defined(__AVX2__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (u8s)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)places);
#else
  u8s found;
  for (int i = 0; i < W; ++i) found[i] = table[places[i]];
  return found;
#endif
}

static inline u8s all32(const uint8_t* from) { return load<u8s>(from); }

typedef i8s Signed;
constexpr int MORE = 0;
static inline Signed with_sign(i8s w) { return w; }

#if defined(__AVX2__)
static inline ints dot(ints total, u8s w, i8s x) {  // w up to 128: pairs are added in 16 bits
  return total + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
}
static inline ints dot(ints total, i8s w, i8s x) {
  return dot(total, (u8s)_mm256_sign_epi8((__m256i)w, (__m256i)w), (i8s)_mm256_sign_epi8((__m256i)x, (__m256i)w));
}
#else
template <typename V>
static inline ints dot(ints total, V w, i8s x) {
  typedef int16_t shorts __attribute__((vector_size(2 * W)));
  const shorts products = __builtin_convertvector(w, shorts) * __builtin_convertvector(x, shorts);
  int16_t all[W];
  std::memcpy(all, &products, sizeof(all));
  for (int i = 0; i < LANES; ++i) total[i] += all[4 * i] + all[4 * i + 1] + all[4 * i + 2] + all[4 * i + 3];
  return total;
}
#endif
#endif

// A vector of `count` floats or of all, whatever their type.
template <bool whole>
static inline floats some(const float* from, int64_t count) {
  return whole || count >= LANES ? load<floats>(from) : load<false, floats>(from, 4 * count);
}
template <bool whole>
static inline floats some(const brain* from, int64_t count) {
  return whole || count >= LANES ? halves<true>(from, count) : halves<false>(from, count);
}
template <bool whole>
static inline floats some(const int8_t* from, int64_t count) {
  narrow found{};
  std::memcpy(&found, from, whole ? LANES : std::min<int64_t>(count, LANES));
  return wide(longer(found));
}

// For numbers that are not positive (Cephes, expf); NaN for NaN. Below -87 the result is 1e-38, practically zero.
static inline floats exponential(floats x) {
  x = x < -87.0f ? floats{} - 87.0f : x;
  const floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // the nearest integer
  const floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  floats p = floats{} + 1.9875691500e-4f;
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  return (floats)((ints)p + (__builtin_convertvector(n, ints) << 23));
}
