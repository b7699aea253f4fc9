// Matmuls of float32 tokens [T, D] with quantized weights [N, D] for CPUs: float32[T, N].
//
// XLA for CPU has no matmul with fewer than 8 bits a number, and its matmul of 8 bits is slower than memory. Here the
// numbers of a token become integers of 8 bits times factors, and those of a weight are multiplied with them as they are:
//
// - for the blocks of GGUF every 32 numbers of a token have a factor, as in ggml-org/ggml (ggml-quants.c);
// - for `int8`, which has a factor for each row, a token is the sum of two rows of integers, see `cpu.in_integers`.
//
// A few tokens are multiplied with each row of the weight, as fast as memory is read (gemv.h). More are put into panels,
// where a vector holds four neighbouring numbers of LANES rows of integers, so that lanes need not be summed in the end
// (gemm.h). TYPE is the kind of the weights, see weights.h.

#include "gemv.h"
#include "gemm.h"

constexpr int FEW = 4;  // rows of integers; more are faster in panels

static void run(const Call& call) {
  const int64_t first = call.first(), group = call.group();
  const int64_t *x = call.sizes(first), *out = call.result().dims;
  const int64_t tokens = EXACT ? call.without_zeros(first, out[1]) : x[0];
  Job job{call.data<float>(first), {}, call.out<float>(), tokens, out[1], x[1]};
  for (int64_t i = first + 1; i < call.arguments(); ++i) {  // planes, of which the first axis may be that of groups
    const XLA_FFI_Buffer& plane = call.argument(i);
    job.planes.at[i - first - 1] = call.data<uint8_t>(i) + (first ? group * bytes(plane) / plane.dims[0] : 0);
  }
  const ThreadPool threads(call);
  const int64_t rows = job.tokens * rows_per_token<TYPE>;
  if (rows <= FEW) return multiply_rows<TYPE>(threads, job);
  if (rows <= LANES) return multiply_panels<TYPE, 12, 1>(threads, job);
  multiply_panels<TYPE, VNNI ? 12 : 4, 2>(threads, job);  // sums stay in registers, of which AVX2 has 16 and AVX-512 32
}
