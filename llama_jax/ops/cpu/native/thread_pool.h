// Work that is shared between the caller and XLA's own threads.

#pragma once

#include <sched.h>

#include <atomic>
#include <exception>
#include <vector>

#include "ffi.h"

constexpr int TOGETHER = 4;  // rows of a weight that a few tokens are multiplied with at once
constexpr int AHEAD = 4096;  // bytes that are prefetched before they are read, at least

// The threads that XLA computes with.
class ThreadPool {
 public:
  explicit ThreadPool(const Call& call) : api_(call.frame->api), context_(call.frame->ctx) {}

  int64_t num_threads() const {
    int64_t found = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, context_, &found};
    failed(api_->XLA_FFI_ThreadPool_NumThreads(&args));
    return found;
  }

  // Calls `task(data)` in one of them, or here where there are none.
  void schedule(XLA_FFI_Task* task, void* data) const {
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, context_, task, data};
    if (failed(api_->XLA_FFI_ThreadPool_Schedule(&args))) task(data);
  }

 private:
  bool failed(XLA_FFI_Error* error) const {
    if (error == nullptr) return false;
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    api_->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  const XLA_FFI_Api* const api_;
  XLA_FFI_ExecutionContext* const context_;
};

// Parts of the work, for the caller and threads of XLA's: each has a stretch of them, one after the other in memory, and
// then takes what others have left. Nobody waits for a thread that has not begun; it finds no part, and calls no work. What
// work throws is returned by `wait`, when no other thread uses its operands any more. The last taker deletes them.
class Parts {
 public:
  typedef void Work(const void* self, int64_t part);

  Parts(int64_t count, int64_t takers, Work* work, const void* self)
      : count_(count), stretches_(takers), work_(work), self_(self), users_(takers) {
    for (int64_t i = 0; i < takers; ++i) {
      stretches_[i].next = i * count / takers;
      stretches_[i].end = (i + 1) * count / takers;
      stretches_[i].parts = this;
    }
  }

  // Begins in other threads.
  void schedule(const ThreadPool& threads) {
    const auto task = [](void* data) {
      Stretch* const own = static_cast<Stretch*>(data);
      Parts* const parts = own->parts;
      parts->take(own - parts->stretches_.data());
      parts->release();
    };
    for (size_t i = 1; i < stretches_.size(); ++i) threads.schedule(task, &stretches_[i]);
  }

  void take(int64_t who) {
    const int64_t takers = stretches_.size();
    for (int64_t i = 0; i < takers; ++i) {
      Stretch& stretch = stretches_[(who + i) % takers];
      int64_t done = 0;
      for (int64_t part; (part = stretch.next.fetch_add(1)) < stretch.end; ++done) try_work(part);
      if (done) done_.fetch_add(done, std::memory_order_release);
    }
  }

  std::exception_ptr wait() {
    while (done_.load(std::memory_order_acquire) < count_) sched_yield();
    return error_;
  }

  void release() {
    if (users_.fetch_sub(1) == 1) delete this;
  }

 private:
  void try_work(int64_t part) {
    try {
      work_(self_, part);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
    Parts* parts = nullptr;
  };
  const int64_t count_;
  std::vector<Stretch> stretches_;
  Work* const work_;
  const void* const self_;
  std::atomic<int64_t> done_{0}, users_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // the first
};

static void share_parts(const ThreadPool& threads, int64_t count, Parts::Work* work, const void* self, bool alone) {
  const int64_t takers = alone ? 1 : std::min<int64_t>(threads.num_threads(), count);
  if (takers <= 1) {
    for (int64_t part = 0; part < count; ++part) work(self, part);
    return;
  }
  Parts* const parts = new Parts(count, takers, work, self);
  parts->schedule(threads);
  parts->take(0);
  const std::exception_ptr error = parts->wait();
  parts->release();
  if (error) std::rethrow_exception(error);
}

// Calls `work(part)` for each of `count` parts, in this thread alone where another would begin too late.
template <typename Work>
static void share(const ThreadPool& threads, int64_t count, const Work& work, bool alone = false) {
  const auto call = [](const void* self, int64_t part) { (*static_cast<const Work*>(self))(part); };
  share_parts(threads, count, call, &work, alone);
}
