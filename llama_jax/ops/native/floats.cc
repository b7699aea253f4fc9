// Matmuls of float32 tokens [T, D] with a weight [N, D] of TYPE, float or brain: float32[T, N].
//
// XLA for CPU takes two to three times as long for two to sixteen rows as for one, and twice as long for one by a small
// weight; these read each number of a weight once. For more it is as fast, but copies a matrix that lies in a stack before it
// multiplies with it.

#include "floats.h"

static void run(const Call& call) {
  const int64_t first = call.first(), *sizes = call.sizes(first), rows = call.result().dims[1];
  const TYPE* weight = call.data<TYPE>(first + 1) + call.group() * rows * sizes[1];
  multiply_floats(ThreadPool(call), Product<TYPE>{call.data<float>(first), weight, call.out<float>(), sizes[0], rows, sizes[1]});
}
