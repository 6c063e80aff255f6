// A pool of threads that sleep between calls: a worker process shares its machine with others, and
// a spinning helper would take the core of a neighbour.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace isthmus {

class ThreadPool {
 public:
  // Runs `body` on the caller and on `helpers` other threads; returns when all are done.
  void run(int helpers, const std::function<void()>& body) {
    std::lock_guard<std::mutex> one_call_at_a_time(call_mutex_);
    while (num_threads_ < helpers) {
      std::thread(&ThreadPool::help, this, num_threads_++, call_number_).detach();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      helpers_ = unfinished_ = helpers;
      call_number_++;
    }
    started_.notify_all();
    body();
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return unfinished_ == 0; });
  }

 private:
  void help(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      started_.wait(lock, [&] { return call_number_ != seen; });
      seen = call_number_;
      if (index >= helpers_) continue;
      const std::function<void()>& body = *body_;
      lock.unlock();
      body();
      lock.lock();
      if (--unfinished_ == 0) finished_.notify_one();
    }
  }

  std::mutex call_mutex_;
  int num_threads_ = 0;  // guarded by call_mutex_

  std::mutex mutex_;  // guards what follows
  std::condition_variable started_, finished_;
  const std::function<void()>* body_ = nullptr;
  int helpers_ = 0, unfinished_ = 0;
  uint64_t call_number_ = 0;
};

// Calls work(i) once for every i in [0, count), on up to num_threads threads. The pool is never
// destroyed: its threads may outlive static destructors.
template <typename Work>
void parallel_for(int num_threads, int64_t count, const Work& work) {
  if (num_threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  static ThreadPool& pool = *new ThreadPool;
  std::atomic<int64_t> next{0};
  pool.run(int(count < num_threads ? count : num_threads) - 1, [&] {
    for (int64_t i; (i = next.fetch_add(1)) < count;) work(i);
  });
}

}  // namespace isthmus
