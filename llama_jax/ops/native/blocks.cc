// Matmuls of float32 tokens [T, D] with quantised weights [N, D] for CPUs: float32[T, N].
//
// XLA for CPU has no matmul with fewer than 8 bits a number, and its matmul of 8 bits is slower than memory. Here the
// numbers of a token become integers of 8 bits times factors, and those of a weight are multiplied with them as they are:
//
// - for the blocks of GGUF every 32 numbers of a token have a factor, as in ggml-org/ggml (ggml-quants.c);
// - for `int8`, which has a factor for each row, a token is the sum of two rows of integers, see `cpu.in_integers`.
//
// A few tokens are multiplied one by one with each row of the weight. More are put into panels, where a vector holds four
// neighbouring numbers of LANES rows of integers, so that a vector of sums need not be added up in the end.
//
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int AHEAD = 4096;  // bytes
constexpr int FEW = 4;  // rows of integers, more of which are faster in panels

// --- tokens --------------------------------------------------------------------------------------------------------------

static inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Without its sign; NaN where there is a NaN or an infinity.
static float largest_of(const float* x, int64_t count) {
  floats most{}, bad{};
  for (int64_t i = 0; i < count; i += LANES) {
    floats v{};
    std::memcpy(&v, x + i, 4 * std::min<int64_t>(count - i, LANES));
    const floats size = (floats)((words)v & 0x7fffffff);
    most = size > most ? size : most, bad += v * 0;
  }
  float found = 0;
  for (int lane = 0; lane < LANES; ++lane) found = std::max(found, most[lane]);
  return found + sum(bad);
}

static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: such are integers

// A row of integers that stand for a token, with zeros up to whole vectors: factors and sums of each group.
struct Row {
  std::vector<int8_t> q;
  std::vector<float> factor;
  std::vector<int32_t> total;
};

// The integers of a token: for `int8` two rows, the second of which counts 1 / 254 of the first.
template <typename Kind>
static void read(const float* x, int64_t columns, Row* rows) {
  constexpr bool whole = Kind::group == 0;
  const int64_t block = whole ? columns : 32, group = whole ? columns : Kind::group;
  for (int i = 0; i < (whole ? 2 : 1); ++i) {
    rows[i].q.assign(up_to(columns, W), 0);
    rows[i].factor.resize(up_to(columns / group, LANES));
    rows[i].total.resize(up_to(columns / group, LANES));
  }
  for (int64_t b = 0; b < columns / block; ++b) {
    const float* from = x + block * b;
    const float largest = largest_of(from, block), inverse = largest > 0 ? 127 / largest : 0;
    int8_t *coarse = rows[0].q.data() + block * b, *fine = whole ? rows[1].q.data() : nullptr;
    if (largest == largest) {
      for (int64_t i = 0; i < block; ++i) {
        const float scaled = from[i] * inverse, rounded = nearest(scaled);
        coarse[i] = static_cast<int8_t>(static_cast<int32_t>(rounded));
        if (whole) fine[i] = static_cast<int8_t>(static_cast<int32_t>(nearest((scaled - rounded) * 254)));
      }
    }
    for (int64_t g = b * block / group; g < (b + 1) * block / group; ++g)
      for (int i = 0; i < (whole ? 2 : 1); ++i) {
        const int8_t* q = rows[i].q.data() + g * group;
        int32_t total = 0;
        for (int64_t j = 0; j < group; ++j) total += q[j];
        rows[i].total[g] = total, rows[i].factor[g] = largest / 127 / (i ? 254 : 1);
      }
  }
}

// --- the work ------------------------------------------------------------------------------------------------------------

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

// A row of the weight by a token. `begin` are sums without what the integers are more than they stand for.
template <typename Kind>
static float multiply_row(const Kind& weight, const float* scale, const float* min, const Row& x, const ints* begin,
                          float* both) {
  floats total{};
  for (int64_t g = 0; g < weight.columns / Kind::group; g += LANES) {
    store(both + g, load<floats>(scale + g) * load<floats>(&x.factor[g]));
    if (Kind::mins) total -= load<floats>(min + g) * load<floats>(&x.factor[g]) * wide(load<ints>(&x.total[g]));
  }
  const int8_t* q = x.q.data();
  for_each_vector(weight, [&](int64_t i, auto w) {
    total += wide(dot(begin[i / W], w, load<i8s>(q + i))) * spread<Kind::group / 4>(both + i / Kind::group);
  });
  return sum(total);
}

static float multiply_row(const Int8& weight, const Row* x) {
  ints sums[2] = {};
  const int8_t *coarse = x[0].q.data(), *fine = x[1].q.data();
  for_each_vector(weight, [&](int64_t i, auto w) {
    sums[0] = dot(sums[0], w, load<i8s>(coarse + i)), sums[1] = dot(sums[1], w, load<i8s>(fine + i));
  });
  float total = 0;
  for (int j = 0; j < 2; ++j) total += (sum(sums[j]) - Int8::more * x[j].total[0]) * x[j].factor[0];
  return total * weight.scale;
}

// A few tokens, by each row of the weight in turn.
template <typename Kind>
static void multiply_rows(ffi::ThreadPool& threads, const Job& job) {
  constexpr int each = rows_per_token<Kind>;
  const int64_t columns = job.columns, vectors = up_to(columns, W) / W;
  const int64_t groups = up_to(columns / (Kind::group ? Kind::group : columns), LANES);
  std::vector<Row> tokens(each * job.tokens);
  std::vector<ints> begin(Kind::group ? job.tokens * vectors : 0);
  for (int64_t t = 0; t < job.tokens; ++t) {
    read<Kind>(job.x + t * columns, columns, &tokens[each * t]);
    for (int64_t i = 0; Kind::group && i < vectors; ++i)
      begin[t * vectors + i] = -dot(ints{}, u8s{} + static_cast<uint8_t>(Kind::more), load<i8s>(&tokens[t].q[i * W]));
  }
  const int64_t numbers = columns * std::max<int64_t>(job.tokens, 1);
  const int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(64, (int64_t{1} << 18) / numbers));
  share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
    std::vector<float> scale(groups), min(groups), both(groups + LANES);
    const int64_t end = std::min(job.rows, (part + 1) * at_once);
    for (int64_t n = part * at_once; n < end; ++n) {
      const Kind weight(job.planes, n, columns);
      weight.factors(scale.data(), min.data());
      for (int64_t t = 0; t < job.tokens; ++t) {
        float& out = job.out[t * job.rows + n];
        if constexpr (Kind::group == 0) {
          out = multiply_row(weight, &tokens[each * t]);
        } else {
          out = multiply_row(weight, scale.data(), min.data(), tokens[t], &begin[t * vectors], both.data());
        }
      }
    }
  });
}

// LANES rows of integers: of each four numbers a vector.
struct Panel {
  std::vector<i8s> q;
  std::vector<floats> factor;
  std::vector<ints> total;
};

// Many tokens: R rows of the weight at a time, as integers, by C panels.
template <typename Kind, int R, int C>
static void multiply_tile(const int8_t* weights, const float* scale, const float* min, const Panel* panels, int64_t columns,
                          const void* next, floats (*total)[C]) {
  const int64_t group = Kind::group ? Kind::group : columns, padded = up_to(columns, W), groups = columns / group;
  for (int r = 0; r < R; ++r)
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
      for (int c = 0; c < C; ++c) x[c] = panels[c].q[i / 4];
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
        total[r][c] += wide(found[r][c]) * (Kind::group ? factor * scale[r * groups + g] : factor);
        if (Kind::mins) total[r][c] -= wide(panels[c].total[g]) * (factor * min[r * groups + g]);
      }
    }
  }
}

template <typename Kind, int R, int C>
static void multiply_panels(ffi::ThreadPool& threads, const Job& job) {
  constexpr int each = rows_per_token<Kind>, held = LANES / each;  // tokens of a panel
  const int64_t columns = job.columns, padded = up_to(columns, W);
  const int64_t group = Kind::group ? Kind::group : columns, groups = columns / group;
  const int64_t count = up_to((job.tokens + held - 1) / held, C);
  std::vector<Panel> panels(count);
  share(threads, count, [&](int64_t p) {
    Panel& panel = panels[p];
    panel.q.resize(padded / 4), panel.factor.resize(groups), panel.total.resize(groups);
    Row rows[2];
    for (int64_t t = p * held; t < std::min(job.tokens, (p + 1) * held); ++t) {
      read<Kind>(job.x + t * columns, columns, rows);
      for (int j = 0; j < each; ++j) {
        const int64_t lane = t - p * held + j * held;
        int32_t* to = reinterpret_cast<int32_t*>(panel.q.data()) + lane;
        for (int64_t i = 0; i < padded / 4; ++i) std::memcpy(to + LANES * i, &rows[j].q[4 * i], 4);
        for (int64_t g = 0; g < groups; ++g)
          panel.factor[g][lane] = rows[j].factor[g], panel.total[g][lane] = rows[j].total[g];
      }
    }
  });
  // The panels that are gone through for each tile of weights stay in the second cache of a core.
  const int64_t fitting = std::max<int64_t>(1, (int64_t{1} << 20) / (padded * LANES * C)) * C;
  constexpr int64_t at_once = 4 * R;
  for (int64_t first = 0; first < count; first += fitting)
    share(threads, (job.rows + at_once - 1) / at_once, [&](int64_t part) {
      std::vector<int8_t> weights(R * padded);
      std::vector<float> scale(R * groups), min(R * groups);
      float of_row[R] = {};
      const int64_t end = std::min(job.rows, (part + 1) * at_once);
      for (int64_t at = part * at_once; at < end; at += R) {
        const int64_t there = std::min<int64_t>(R, end - at);
        for (int64_t r = 0; r < there; ++r) {
          const Kind weight(job.planes, at + r, columns);
          for_each_vector(weight, [&](int64_t i, auto w) { store(&weights[r * padded + i], w); });
          weight.factors(&scale[r * groups], &min[r * groups]);
          if constexpr (Kind::group == 0) of_row[r] = weight.scale;
        }
        const void* next = Kind(job.planes, at + R, columns).values;
        for (int64_t p = first; p < std::min(count, first + fitting); p += C) {
          floats total[R][C];
          multiply_tile<Kind, R, C>(weights.data(), scale.data(), min.data(), &panels[p], columns, next, total);
          for (int c = 0; c < C; ++c) {
            float all[R][LANES];  // a token in a lane, or of `int8` its second row in a lane of the upper half
            for (int r = 0; r < R; ++r) {
              store(all[r], total[r][c]);
              if constexpr (Kind::group == 0)
                for (int lane = 0; lane < held; ++lane) all[r][lane] = (all[r][lane] + all[r][lane + held]) * of_row[r];
            }
            for (int64_t t = (p + c) * held; t < std::min(job.tokens, (p + c + 1) * held); ++t)
              for (int64_t r = 0; r < there; ++r) job.out[t * job.rows + at + r] = all[r][t % held];
          }
        }
      }
    });
}

template <typename Kind>
static void multiply(ffi::ThreadPool& threads, const Job& job) {
  const int64_t rows = job.tokens * rows_per_token<Kind>;
  if (rows <= FEW) return multiply_rows<Kind>(threads, job);
  if (rows <= LANES) return multiply_panels<Kind, 12, 1>(threads, job);
  multiply_panels<Kind, VNNI ? 12 : 4, 2>(threads, job);  // sums stay in registers, of which AVX2 has 16 and AVX-512 32
}

static ffi::Error Multiply(ffi::ThreadPool threads, int64_t kind, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs planes,
                           ffi::ResultBuffer<ffi::F32> out) {
  Job job{x.typed_data(), {}, out->typed_data(), x.dimensions()[0], out->dimensions()[1], x.dimensions()[1]};
  for (size_t i = 0; i < planes.size(); ++i) {
    auto plane = planes.get<ffi::AnyBuffer>(i);
    if (!plane.has_value()) return plane.error();
    job.planes.at[i] = static_cast<const uint8_t*>(plane->untyped_data());
  }
  switch (kind) {  // as `native.KINDS` has them
    case 0: multiply<Q8_0>(threads, job); break;
    case 1: multiply<Q4_0>(threads, job); break;
    case 2: multiply<QK<false>>(threads, job); break;
    case 3: multiply<QK<true>>(threads, job); break;
    case 4: multiply<Q6_K>(threads, job); break;
    case 5: multiply<Int8>(threads, job); break;
    default: return ffi::Error::InvalidArgument("no such kind");
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_multiply, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kind")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
