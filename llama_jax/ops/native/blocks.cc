// Matmuls of float32 tokens [T, D] with weights [N, D] in the blocks of GGUF, for CPUs: float32[T, N].
//
// XLA for CPU has no matmul with fewer than 8 bits a number. As ggml-org/ggml does (ggml-quants.c), every 32 numbers of a token
// become integers of 8 bits times a factor, and the integers of a weight's block are multiplied with them as they are. A row
// of the weight is read once for all tokens. Vectors are those of GCC and Clang, so that AVX2, AVX-512 and NEON come of one
// source; what multiplies 32 bytes has an instruction of its own where the processor has one.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef _Float16 half;

template <typename V, typename T>
static inline V load(const T* from) {
  V found;
  std::memcpy(&found, from, sizeof(V));
  return found;
}

static inline float sum(f32x8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

#if !defined(__AVX2__)
template <typename W>
static inline i32x8 plain_dot(W w, i8x32 x) {
  const i16x32 products = __builtin_convertvector(w, i16x32) * __builtin_convertvector(x, i16x32);
  int16_t all[32];
  std::memcpy(all, &products, sizeof(all));
  i32x8 found;
  for (int i = 0; i < 8; ++i) found[i] = all[4 * i] + all[4 * i + 1] + all[4 * i + 2] + all[4 * i + 3];
  return found;
}
#endif

// Sums of four neighbouring products, of integers in [0, 63] (weights) and [-127, 127] (tokens).
static inline i32x8 dot(u8x32 w, i8x32 x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (i32x8)_mm256_dpbusd_epi32(_mm256_setzero_si256(), (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
  return (i32x8)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
#else
  return plain_dot(w, x);
#endif
}

// The same of integers in [-127, 127] on both sides.
static inline i32x8 dot(i8x32 w, i8x32 x) {
#if defined(__AVX2__)
  const u8x32 size = (u8x32)_mm256_sign_epi8((__m256i)w, (__m256i)w);
  return dot(size, (i8x32)_mm256_sign_epi8((__m256i)x, (__m256i)w));
#else
  return plain_dot(w, x);
#endif
}

static inline f32x8 wide(i32x8 v) { return __builtin_convertvector(v, f32x8); }

static inline f32x8 splat(float v) { return f32x8{v, v, v, v, v, v, v, v}; }

static inline f32x8 two(float a, float b) { return f32x8{a, a, a, a, b, b, b, b}; }

// A token in integers: of 32 numbers the factor, and the factor times the sum of the integers, of each half of them.
struct Token {
  std::vector<int8_t> q;
  std::vector<float> factor, sum16;

  // With `pairs` the halves of two neighbouring blocks stand as Q4_0 has them: first halves, then second halves.
  void read(const float* x, int64_t columns, bool pairs) {
    const int64_t blocks = columns / 32;
    q.resize(columns), factor.resize(blocks), sum16.resize(2 * blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      const float* from = x + 32 * b;
      float largest = 0, bad = 0;
      for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(from[i])), bad += 0 * from[i];
      const float inverse = largest > 0 ? 127 / largest : 0;
      factor[b] = largest / 127 + bad;  // of NaN and infinity NaN, so that it is noticed
      for (int half = 0; half < 2; ++half) {
        int64_t place = 32 * b + 16 * half;
        if (pairs && (b ^ 1) < blocks) place = 32 * (b & ~int64_t{1}) + 32 * half + 16 * (b & 1);
        int total = 0;
        for (int i = 0; i < 16; ++i) {
          const int value = bad == 0 ? static_cast<int>(std::nearbyint(from[16 * half + i] * inverse)) : 0;
          q[place + i] = static_cast<int8_t>(value);
          total += value;
        }
        sum16[2 * b + half] = factor[b] * total;
      }
    }
  }
};

struct Planes {
  const uint8_t* at[5];  // in the order of `kinds.py`
};

// Each kind: a row of the weight times a token. `columns` is a multiple of its block.

struct Q8_0 {
  static constexpr bool pairs = false;
  static float row(const Planes& p, int64_t n, int64_t columns, const Token& x) {
    const int64_t blocks = columns / 32;
    const half* d = reinterpret_cast<const half*>(p.at[0]) + n * blocks;
    const uint8_t* values = p.at[1] + n * columns;
    f32x8 total = splat(0);
    for (int64_t b = 0; b < blocks; ++b) {
      const i32x8 found = dot(load<i8x32>(values + 32 * b), load<i8x32>(&x.q[32 * b]));
      total += wide(found) * splat(static_cast<float>(d[b]) * x.factor[b]);
    }
    return sum(total);
  }
};

struct Q4_0 {
  static constexpr bool pairs = true;
  static float row(const Planes& p, int64_t n, int64_t columns, const Token& x) {
    const int64_t blocks = columns / 32;
    const half* d = reinterpret_cast<const half*>(p.at[0]) + n * blocks;
    const uint8_t* values = p.at[1] + n * columns / 2;
    f32x8 total = splat(0);
    float offset = 0;
    int64_t b = 0;
    for (; b + 1 < blocks; b += 2) {
      const u8x32 bytes = load<u8x32>(values + 16 * b);
      const i32x8 found = dot(bytes & 15, load<i8x32>(&x.q[32 * b])) + dot(bytes >> 4, load<i8x32>(&x.q[32 * b + 32]));
      const float first = static_cast<float>(d[b]), second = static_cast<float>(d[b + 1]);
      total += wide(found) * two(first * x.factor[b], second * x.factor[b + 1]);
      offset += first * (x.sum16[2 * b] + x.sum16[2 * b + 1]) + second * (x.sum16[2 * b + 2] + x.sum16[2 * b + 3]);
    }
    if (b < blocks) {
      uint8_t apart[32];
      for (int i = 0; i < 16; ++i) apart[i] = values[16 * b + i] & 15, apart[16 + i] = values[16 * b + i] >> 4;
      const float only = static_cast<float>(d[b]);
      total += wide(dot(load<u8x32>(apart), load<i8x32>(&x.q[32 * b]))) * splat(only * x.factor[b]);
      offset += only * (x.sum16[2 * b] + x.sum16[2 * b + 1]);
    }
    return sum(total) - 8 * offset;
  }
};

// Eight factors and eight minima of 6 bits in 12 bytes.
static inline void unpack(const uint8_t* packed, float* scales, float* mins) {
  for (int i = 0; i < 4; ++i) {
    scales[i] = packed[i] & 63;
    mins[i] = packed[4 + i] & 63;
    scales[4 + i] = (packed[8 + i] & 15) | ((packed[i] >> 2) & 48);
    mins[4 + i] = (packed[8 + i] >> 4) | ((packed[4 + i] >> 2) & 48);
  }
}

template <bool five>
struct QK {
  static constexpr bool pairs = false;
  static float row(const Planes& p, int64_t n, int64_t columns, const Token& x) {
    const int64_t blocks = columns / 256;
    const half* d = reinterpret_cast<const half*>(p.at[0]) + n * blocks;
    const half* dmin = reinterpret_cast<const half*>(p.at[1]) + n * blocks;
    const uint8_t* packed = p.at[2] + 12 * n * blocks;
    const uint8_t* high = five ? p.at[3] + 32 * n * blocks : nullptr;
    const uint8_t* values = p.at[five ? 4 : 3] + n * columns / 2;
    f32x8 total = splat(0);
    float offset = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      float scales[8], mins[8], least = 0;
      unpack(packed + 12 * b, scales, mins);
      const float* sums = &x.sum16[16 * b];
      const float* factor = &x.factor[8 * b];
      const float of_block = static_cast<float>(d[b]);
      for (int i = 0; i < 8; ++i) least += mins[i] * (sums[2 * i] + sums[2 * i + 1]), scales[i] *= of_block * factor[i];
      offset += static_cast<float>(dmin[b]) * least;
      for (int j = 0; j < 4; ++j) {
        const u8x32 bytes = load<u8x32>(values + 128 * b + 32 * j);
        u8x32 low = bytes & 15, up = bytes >> 4;
        if (five) {
          const u8x32 fifth = load<u8x32>(high + 32 * b);
          low |= ((fifth >> (2 * j)) & 1) << 4;
          up |= ((fifth >> (2 * j + 1)) & 1) << 4;
        }
        const int8_t* q = &x.q[256 * b + 64 * j];
        total += wide(dot(low, load<i8x32>(q))) * splat(scales[2 * j]);
        total += wide(dot(up, load<i8x32>(q + 32))) * splat(scales[2 * j + 1]);
      }
    }
    return sum(total) - offset;
  }
};

struct Q6_K {
  static constexpr bool pairs = false;
  static float row(const Planes& p, int64_t n, int64_t columns, const Token& x) {
    const int64_t blocks = columns / 256;
    const uint8_t* low = p.at[0] + 128 * n * blocks;
    const uint8_t* high = p.at[1] + 64 * n * blocks;
    const int8_t* scales = reinterpret_cast<const int8_t*>(p.at[2]) + 16 * n * blocks;
    const half* d = reinterpret_cast<const half*>(p.at[3]) + n * blocks;
    f32x8 total = splat(0);
    float offset = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      f32x8 inside = splat(0);
      float least = 0;
      for (int i = 0; i < 16; ++i) least += scales[16 * b + i] * x.sum16[16 * b + i];
      for (int half_block = 0; half_block < 2; ++half_block) {
        const u8x32 first = load<u8x32>(low + 128 * b + 64 * half_block);
        const u8x32 second = load<u8x32>(low + 128 * b + 64 * half_block + 32);
        const u8x32 pairs_of_bits = load<u8x32>(high + 64 * b + 32 * half_block);
        const u8x32 parts[4] = {(first & 15) | ((pairs_of_bits & 3) << 4), (second & 15) | (((pairs_of_bits >> 2) & 3) << 4),
                                (first >> 4) | (((pairs_of_bits >> 4) & 3) << 4), (second >> 4) | ((pairs_of_bits >> 6) << 4)};
        for (int i = 0; i < 4; ++i) {
          const int64_t block32 = 8 * b + 4 * half_block + i;
          const float factor = x.factor[block32];
          const int8_t* s = scales + 2 * block32;
          inside += wide(dot(parts[i], load<i8x32>(&x.q[32 * block32]))) * two(s[0] * factor, s[1] * factor);
        }
      }
      const float of_block = static_cast<float>(d[b]);
      total += inside * splat(of_block);
      offset += of_block * least;
    }
    return sum(total) - 32 * offset;
  }
};

// Parts of the work, taken by the caller and by threads of XLA's as they come; nobody waits for a thread that has not begun.
class Parts {
 public:
  Parts(int64_t count, std::function<void(int64_t)> work) : count_(count), work_(std::move(work)) {}

  void take() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) {
      work_(i);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void wait() {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)> work_;
  std::atomic<int64_t> next_{0}, done_{0};
};

static void share(ffi::ThreadPool& threads, int64_t count, std::function<void(int64_t)> work) {
  auto parts = std::make_shared<Parts>(count, std::move(work));
  const int64_t helpers = std::min<int64_t>(threads.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([parts] { parts->take(); });
  parts->take();
  parts->wait();
}

template <typename Kind>
static void multiply(ffi::ThreadPool& threads, const float* x, const Planes& planes, float* out, int64_t tokens,
                     int64_t rows, int64_t columns) {
  std::vector<Token> read(tokens);
  for (int64_t t = 0; t < tokens; ++t) read[t].read(x + t * columns, columns, Kind::pairs);
  const int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(64, (int64_t{1} << 18) / (columns * tokens)));
  share(threads, (rows + at_once - 1) / at_once, [&](int64_t part) {
    const int64_t end = std::min(rows, (part + 1) * at_once);
    for (int64_t n = part * at_once; n < end; ++n)
      for (int64_t t = 0; t < tokens; ++t) out[t * rows + n] = Kind::row(planes, n, columns, read[t]);
  });
}

enum { kQ8_0, kQ4_0, kQ4_K, kQ5_K, kQ6_K };  // as `native.KINDS` has them

static ffi::Error Multiply(ffi::ThreadPool threads, int64_t kind, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs planes,
                           ffi::ResultBuffer<ffi::F32> out) {
  const int64_t tokens = x.dimensions()[0], columns = x.dimensions()[1], rows = out->dimensions()[1];
  Planes all{};
  for (size_t i = 0; i < planes.size(); ++i) {
    auto plane = planes.get<ffi::AnyBuffer>(i);
    if (!plane.has_value()) return plane.error();
    all.at[i] = static_cast<const uint8_t*>(plane->untyped_data());
  }
  const auto run = [&](auto of_kind) {
    multiply<decltype(of_kind)>(threads, x.typed_data(), all, out->typed_data(), tokens, rows, columns);
    return ffi::Error::Success();
  };
  switch (kind) {
    case kQ8_0: return run(Q8_0{});
    case kQ4_0: return run(Q4_0{});
    case kQ4_K: return run(QK<false>{});
    case kQ5_K: return run(QK<true>{});
    case kQ6_K: return run(Q6_K{});
  }
  return ffi::Error::InvalidArgument("no such kind");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_multiply, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kind")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
