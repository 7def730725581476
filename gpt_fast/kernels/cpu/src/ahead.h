// Work that another thread does, one piece after the other, while the caller goes on: steps that begin before Python has
// dealt with the tokens of the step before them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "team.h"

namespace gpt_fast {

class Ahead {
public:
    static Ahead& instance() { return of_process<Ahead>(); }

    // Returns the number of `work`, which wait() takes.
    int64_t begin(std::function<void()> work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const int64_t number = begun_ + 1;
        begun_.store(number, std::memory_order_release);
        if (hire()) {
            waiting_.push_back(std::move(work));
            if (asleep_) came_.notify_one();
        } else {
            work();
            done_ = last_ = number;
        }
        return number;
    }

    // Leaves out what has begun and not started: something else has come up.
    void hold() { held_.store(begun_.load(std::memory_order_acquire), std::memory_order_release); }

    // Until the work with this number and all before it is done. What nobody has begun here was begun in the process that
    // this one is a copy of.
    void wait(int64_t number) {
        if (number > begun_.load(std::memory_order_acquire)) return;
        for (int64_t spins = 0; spins < kSpins; ++spins) {
            if (done_.load(std::memory_order_acquire) >= number) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        ended_.wait(lock, [&] { return done_.load() >= number; });
    }

private:
    // False: no thread is allowed.
    bool hire() {
        try {
            if (!hired_) std::thread([this] { run(); }).detach();
            hired_ = true;
        } catch (const std::system_error&) {
        }
        return hired_;
    }

    void run() {
        for (;;) {
            for (int64_t spins = 0; begun_.load(std::memory_order_acquire) <= done_ && spins < kSpins; ++spins) relax();
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_ = true;
            came_.wait(lock, [&] { return !waiting_.empty(); });
            asleep_ = false;
            const std::function<void()> work = std::move(waiting_.front());
            waiting_.pop_front();
            const int64_t number = ++last_;
            lock.unlock();
            if (held_.load(std::memory_order_acquire) < number) work();
            lock.lock();
            done_.store(number, std::memory_order_release);
            ended_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable came_, ended_;
    std::deque<std::function<void()>> waiting_;
    std::atomic<int64_t> begun_{0}, done_{0}, held_{0};
    int64_t last_ = 0;  // the last number that was taken up
    bool hired_ = false, asleep_ = false;
};

}  // namespace gpt_fast
