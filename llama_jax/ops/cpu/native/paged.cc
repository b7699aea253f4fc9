// Attention of new tokens to pages of TYPE: float, brain, or int8_t, of which there are factors; of others those are empty.

#include "paged.h"

static void run(const Call& call) {  // queries, pages, factors, layer, table, lengths, starts
  const int64_t *q = call.sizes(0), *p = call.sizes(1), *table = call.sizes(4);
  const int64_t before = std::max<int64_t>(0, std::min<int64_t>(*call.data<int32_t>(3), p[0] - 1)) * p[1] * p[2] * p[3];
  const auto limit = [&](const char* name) { return call.attribute<int64_t>(name); };
  const PagedAttention<TYPE> job{
      call.data<float>(0), call.data<TYPE>(1) + before * p[4],
      call.data<float>(2) + (std::is_same_v<TYPE, int8_t> ? before : 0),
      call.data<int32_t>(4), call.data<int32_t>(5), call.data<int32_t>(6), call.out<float>(), q[0], q[1], q[2], q[3],
      table[0], table[1], p[1], p[2], limit("window"), limit("chunk"), call.attribute<float>("scale")};
  attend_paged<WHOLE>(ThreadPool(call), job);
}
