// Pages with rows of some bytes at their places, counted in rows; what lies beyond the end is dropped. In place, unless XLA
// gives another buffer for the result.

#include "ffi.h"

static void run(const Call& call) {  // pages, rows, places
  const int64_t count = elements(call.argument(2)), size = count ? bytes(call.argument(1)) / count : 0;
  const int64_t end = bytes(call.argument(0));
  char* const to = call.out<char>();
  if (to != call.data<char>(0)) std::memcpy(to, call.data<char>(0), end);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = call.data<int32_t>(2)[i] * size;
    if (at >= 0 && at + size <= end) std::memcpy(to + at, call.data<char>(1) + i * size, size);
  }
}
