// Matmuls of float32 tokens [T, D] with quantised weights [N, D] for CPUs: float32[T, N].
//
// XLA for CPU has no matmul with fewer than 8 bits a number, and its matmul of 8 bits is slower than memory. Here the
// numbers of a token become integers of 8 bits times factors, and those of a weight are multiplied with them as they are:
//
// - for the blocks of GGUF every 32 numbers of a token have a factor, as in ggml-org/ggml (ggml-quants.c);
// - for `int8`, which has a factor for each row, a token is the sum of two rows of integers, see `cpu.in_integers`.
//
// A few tokens are multiplied with each row of the weight, as fast as memory is read (few.h). More are put into panels,
// where a vector holds four neighbouring numbers of LANES rows of integers, so that lanes need not be summed in the end
// (panels.h).

#include "few.h"
#include "panels.h"

constexpr int FEW = 4;  // rows of integers; more are faster in panels

template <typename Kind>
static void multiply(ffi::ThreadPool& threads, const Job& job) {
  const int64_t rows = job.tokens * rows_per_token<Kind>;
  if (rows <= FEW) return multiply_rows<Kind>(threads, job);
  if (rows <= LANES) return multiply_panels<Kind, 12, 1>(threads, job);
  multiply_panels<Kind, VNNI ? 12 : 4, 2>(threads, job);  // sums stay in registers, of which AVX2 has 16 and AVX-512 32
}

// With a group's matrix, where each plane begins with the axis of groups; with the only one where `group` is negative.
static ffi::Error multiply_one(ffi::ThreadPool threads, int64_t kind, int64_t group, ffi::Buffer<ffi::F32> x,
                               ffi::RemainingArgs planes, ffi::ResultBuffer<ffi::F32> out) {
  Job job{x.typed_data(), {}, out->typed_data(), x.dimensions()[0], out->dimensions()[1], x.dimensions()[1]};
  for (size_t i = 0; i < planes.size(); ++i) {
    auto plane = planes.get<ffi::AnyBuffer>(i);
    if (!plane.has_value()) return plane.error();
    job.planes.at[i] = static_cast<const uint8_t*>(plane->untyped_data());
    if (group >= 0) job.planes.at[i] += group * static_cast<int64_t>(plane->size_bytes()) / plane->dimensions()[0];
  }
  switch (kind) {  // as `native.KINDS` has them
    case 0: multiply<Int8>(threads, job); break;
    case 1: multiply<Q8_0>(threads, job); break;
    case 2: multiply<Q<false, false>>(threads, job); break;
    case 3: multiply<Q<false, true>>(threads, job); break;
    case 4: multiply<Q<true, false>>(threads, job); break;
    case 5: multiply<Q<true, true>>(threads, job); break;
    case 6: multiply<IQ4_NL>(threads, job); break;
    case 7: multiply<MXFP4>(threads, job); break;
    case 8: multiply<Pairs<false>>(threads, job); break;
    case 9: multiply<Pairs<true>>(threads, job); break;
    case 10: multiply<QK<false>>(threads, job); break;
    case 11: multiply<QK<true>>(threads, job); break;
    case 12: multiply<Q6_K>(threads, job); break;
    case 13: multiply<IQ4_XS>(threads, job); break;
    default: return ffi::Error::InvalidArgument("no such kind");
  }
  return ffi::Error::Success();
}

static ffi::Error Multiply(ffi::ThreadPool threads, int64_t kind, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs planes,
                           ffi::ResultBuffer<ffi::F32> out) {
  return multiply_one(threads, kind, -1, x, planes, out);
}

static ffi::Error MultiplyOfGroup(ffi::ThreadPool threads, int64_t kind, ffi::Buffer<ffi::S32> group,
                                  ffi::Buffer<ffi::F32> x, ffi::RemainingArgs planes, ffi::ResultBuffer<ffi::F32> out) {
  return multiply_one(threads, kind, *group.typed_data(), x, planes, out);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_multiply_of_group, MultiplyOfGroup,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kind")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(llama_jax_multiply, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("kind")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>());
