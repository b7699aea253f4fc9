// Attention of a few tokens to keys and values of TYPE, float or brain; where a layer comes first, to its part of stacked ones.

#include "attention.h"

static void run(const Call& call) {
  const int64_t first = call.first(), *q = call.sizes(first), slots = call.sizes(first + 1)[first + 2];
  const int64_t before = std::max<int64_t>(call.group(), 0) * q[0] * q[1] * slots * q[4];
  const TYPE *keys = call.data<TYPE>(first + 1) + before, *values = call.data<TYPE>(first + 2) + before;
  const Attention<TYPE> job{call.data<float>(first), keys, values, call.data<int32_t>(first + 3), call.out<float>(),
                            q[0], q[1], q[2], q[3], q[4], slots, call.sizes(first + 3)[0], call.attribute<float>("scale")};
  attend<WHOLE>(ThreadPool(call), job);
}
