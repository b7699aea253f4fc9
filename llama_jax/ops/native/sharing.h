// Work that is shared between the caller and XLA's own threads.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int TOGETHER = 4;  // rows of a weight that a few tokens are multiplied with at once
constexpr int AHEAD = 4096;  // bytes that are prefetched before they are read, at least

// Parts of the work, for the caller and threads of XLA's: each has a stretch of them, one after the other in memory, and
// then takes what others have left. Nobody waits for a thread that has not begun.
class Parts {
 public:
  Parts(int64_t count, int64_t takers, std::function<void(int64_t)> work)
      : count_(count), stretches_(takers), work_(std::move(work)) {
    for (int64_t i = 0; i < takers; ++i) {
      stretches_[i].next = i * count / takers;
      stretches_[i].end = (i + 1) * count / takers;
    }
  }

  void take(int64_t who) {
    const int64_t takers = stretches_.size();
    for (int64_t i = 0; i < takers; ++i) {
      Stretch& stretch = stretches_[(who + i) % takers];
      int64_t done = 0;
      for (int64_t part; (part = stretch.next.fetch_add(1)) < stretch.end; ++done) work_(part);
      if (done) done_.fetch_add(done, std::memory_order_release);
    }
  }

  void wait() {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  const int64_t count_;
  std::vector<Stretch> stretches_;
  const std::function<void(int64_t)> work_;
  std::atomic<int64_t> done_{0};
};

static void share(ffi::ThreadPool& threads, int64_t count, std::function<void(int64_t)> work) {
  const int64_t takers = std::max<int64_t>(1, std::min<int64_t>(threads.num_threads(), count));
  auto parts = std::make_shared<Parts>(count, takers, std::move(work));
  for (int64_t i = 1; i < takers; ++i) threads.Schedule([parts, i] { parts->take(i); });
  parts->take(0);
  parts->wait();
}
