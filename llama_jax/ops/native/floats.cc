// Float32 and bfloat16 models on CPUs: matmuls, and the attention of a few tokens.
//
// XLA for CPU takes two to three times as long for two to sixteen rows as for one, and twice as long for one by a small
// weight; these read each number of a weight once. For more it is as fast, but copies a matrix that lies in a stack before it
// multiplies with it. They are separate from blocks.cc because they compile faster.

#include "attention.h"
#include "floats.h"
#include "paged.h"

// `run` with the numbers of a buffer as pointers of their type.
template <typename Run>
static ffi::Error by_type(const ffi::AnyBuffer& buffer, Run run) {
  switch (buffer.element_type()) {
    case ffi::F32: run(static_cast<const float*>(buffer.untyped_data())); break;
    case ffi::BF16: run(static_cast<const brain*>(buffer.untyped_data())); break;
    default: return ffi::Error::InvalidArgument("float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// With the matrix [N, D] that begins after `before` others of its size.
static ffi::Error multiply_one(ffi::ThreadPool threads, int64_t before, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                               ffi::ResultBuffer<ffi::F32> out) {
  const auto sizes = x.dimensions();
  const int64_t rows = out->dimensions()[1];
  return by_type(weight, [&](const auto* numbers) {
    using T = std::decay_t<decltype(*numbers)>;
    const T* own = numbers + before * rows * sizes[1];
    multiply_floats(threads, Product<T>{x.typed_data(), own, out->typed_data(), sizes[0], rows, sizes[1]});
  });
}

static ffi::Error MultiplyFloats(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                                 ffi::ResultBuffer<ffi::F32> out) {
  return multiply_one(threads, 0, x, weight, out);
}

static ffi::Error MultiplyFloatsOfGroup(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> group, ffi::Buffer<ffi::F32> x,
                                        ffi::AnyBuffer weight, ffi::ResultBuffer<ffi::F32> out) {
  return multiply_one(threads, *group.typed_data(), x, weight, out);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_floats, MultiplyFloats,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_floats_of_group, MultiplyFloatsOfGroup,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// `layer`: of stacked keys and values [L, B, K, S, H] the one that is read; -1 where they are of one layer.
static ffi::Error attend_one(ffi::ThreadPool threads, float scale, int64_t layer, ffi::Buffer<ffi::F32> queries,
                             ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Buffer<ffi::S32> seen,
                             ffi::ResultBuffer<ffi::F32> out) {
  const auto q = queries.dimensions();
  const int64_t slots = keys.dimensions()[layer < 0 ? 2 : 3];
  return by_type(keys, [&](const auto* numbers) {
    using T = std::decay_t<decltype(*numbers)>;
    const int64_t before = std::max<int64_t>(layer, 0) * q[0] * q[1] * slots * q[4];
    const Attention<T> job{queries.typed_data(), numbers + before, static_cast<const T*>(values.untyped_data()) + before,
                           seen.typed_data(), out->typed_data(), q[0], q[1], q[2], q[3], q[4], slots, seen.dimensions()[0],
                           scale};
    job.width % LANES ? attend<false>(threads, job) : attend<true>(threads, job);
  });
}

static ffi::Error Attend(ffi::ThreadPool threads, float scale, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer keys,
                         ffi::AnyBuffer values, ffi::Buffer<ffi::S32> seen, ffi::ResultBuffer<ffi::F32> out) {
  return attend_one(threads, scale, -1, queries, keys, values, seen, out);
}

static ffi::Error AttendOfGroup(ffi::ThreadPool threads, float scale, ffi::Buffer<ffi::S32> layer,
                                ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                                ffi::Buffer<ffi::S32> seen, ffi::ResultBuffer<ffi::F32> out) {
  return attend_one(threads, scale, *layer.typed_data(), queries, keys, values, seen, out);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_attend_of_group, AttendOfGroup,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// `factors` are those of int8 pages; of others they are empty.
static ffi::Error AttendPaged(ffi::ThreadPool threads, float scale, int64_t window, int64_t chunk,
                              ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> factors,
                              ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths,
                              ffi::Buffer<ffi::S32> starts, ffi::ResultBuffer<ffi::F32> out) {
  const auto q = queries.dimensions(), p = pages.dimensions();
  const auto run = [&](const auto* numbers) {
    using T = std::decay_t<decltype(*numbers)>;
    const int64_t before = std::min<int64_t>(std::max(*layer.typed_data(), 0), p[0] - 1) * p[1] * p[2] * p[3];
    const PagedAttention<T> job{
        queries.typed_data(), numbers + before * p[4], factors.typed_data() + (std::is_same_v<T, int8_t> ? before : 0),
        table.typed_data(), lengths.typed_data(), starts.typed_data(), out->typed_data(), q[0], q[1], q[2], q[3],
        table.dimensions()[0], table.dimensions()[1], p[1], p[2], window, chunk, scale};
    job.width % LANES ? attend_paged<false>(threads, job) : attend_paged<true>(threads, job);
  };
  if (pages.element_type() != ffi::S8) return by_type(pages, run);
  run(static_cast<const int8_t*>(pages.untyped_data()));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_attend_paged, AttendPaged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// Pages with rows of some bytes at their places, counted in rows; what lies beyond the end is dropped. In place, unless XLA
// gives another buffer for the result.
static ffi::Error PutRows(ffi::AnyBuffer pages, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> places,
                          ffi::Result<ffi::AnyBuffer> out) {
  const int64_t count = places.element_count(), size = count ? rows.size_bytes() / count : 0;
  char* const to = static_cast<char*>(out->untyped_data());
  if (to != pages.untyped_data()) std::memcpy(to, pages.untyped_data(), pages.size_bytes());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = static_cast<int64_t>(places.typed_data()[i]) * size;
    if (at >= 0 && at + size <= static_cast<int64_t>(pages.size_bytes()))
      std::memcpy(to + at, static_cast<const char*>(rows.untyped_data()) + i * size, size);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_put_rows, PutRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
