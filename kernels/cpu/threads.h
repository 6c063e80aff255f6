// Threads that do one call together.
//
// Helpers sleep between calls: a worker process shares its machine with others, and a spinning
// helper would take the core of a neighbour. Within a call they meet every few microseconds, so
// there they spin for a moment before they sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace isthmus {

constexpr int kSpins = 200;  // some microseconds
// Whoever is waited for may need this very core, when other processes have the rest.
constexpr int kYields = 100;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The threads of one call. Every member runs the same loops in the same order; each loop's pieces
// go to whoever is free, and none leaves a loop before all its pieces are done.
class Team {
 public:
  explicit Team(int size) : size_(size) {}

  int size() const { return size_; }

  // Calls work(i) once for every i in [0, count).
  template <typename Work>
  void loop(int64_t count, const Work& work) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    meet();
  }

  // The same for work(i, j), where j is the piece that this member does after i, `count` for none.
  template <typename Work>
  void loop_knowing_next(int64_t count, const Work& work) {
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    while (i < count) {
      int64_t after = next_.fetch_add(1, std::memory_order_relaxed);
      work(i, after < count ? after : count);
      i = after;
    }
    meet();
  }

  // The same for work(first, last), over shares of neighbours: large ones first, and small ones at
  // the end, so that the members end together (Polychronopoulos and Kuck 1987, guided
  // self-scheduling).
  template <typename Work>
  void loop_in_shares(int64_t count, const Work& work) {
    int64_t first = next_.load(std::memory_order_relaxed);
    while (first < count) {
      int64_t left = count - first, share = size_ == 1 ? left : left / (2 * size_);
      int64_t last = first + std::max<int64_t>(1, share);
      if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      work(first, last);
      first = next_.load(std::memory_order_relaxed);
    }
    meet();
  }

 private:
  void meet() {
    uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      if (size_ > 1) open_next_round(round + 1);
      return;
    }
    for (int i = 0; i < kSpins + kYields; i++) {
      if (round_.load(std::memory_order_acquire) != round) return;
      i < kSpins ? relax() : std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != round; });
  }

  void open_next_round(uint32_t round) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.store(round, std::memory_order_release);
    }
    opened_.notify_all();
  }

  const int size_;
  std::atomic<int64_t> next_{0};  // piece of the present loop
  std::atomic<int> arrived_{0};   // members that found no more of them
  std::atomic<uint32_t> round_{0};
  std::mutex mutex_;
  std::condition_variable opened_;
};

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

// Calls body(team) on num_threads threads. The pool is never destroyed: its threads may outlive
// static destructors.
template <typename Body>
void run_team(int num_threads, const Body& body) {
  Team team(num_threads);
  if (num_threads == 1) return body(team);
  static ThreadPool& pool = *new ThreadPool;
  pool.run(num_threads - 1, [&] { body(team); });
}

}  // namespace isthmus
