// The threads that run a kernel.
//
// Kernels are functions that all threads of a Team call together. They hand out work by a shared counter; which thread
// computes an output never changes its value. Two kernels that follow each other must be separated by team.barrier().
//
// The helpers are threads of our own, not OpenMP's. Those of libgomp spin for milliseconds after a region, on the very
// core that a server beside the model wants, unless the environment said otherwise before the process began; and a
// region ends only when each of them has run, even if another process had its core and the work was long done.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gpt_fast {

// The most threads of one team, whoever asks for more: a process that starts them by the ten thousand takes the whole
// machine's.
constexpr int kMaxThreads = 512;

// Threads of a team for which `asked` were asked.
inline int team_size(int asked) { return asked < kMaxThreads ? asked : kMaxThreads; }

// Turns to look before giving the core away: some tens of microseconds.
constexpr int64_t kSpins = 2000;

// Turns to look, the core offered to others at each, before a helper falls asleep: some tenths of a millisecond, more
// than what a server does between two steps. Waking a helper takes longer than a small model's step.
constexpr int64_t kYields = 1000;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    asm volatile("yield");
#endif
}

// For what other threads are about to bring about.
template <class Done>
inline void wait_until(Done done) {
    for (int64_t spins = 0; !done(); ++spins) {
        if (spins < kSpins)
            relax();
        else
            sched_yield();  // the thread that is waited for may want this core
    }
}

// One piece of shared work: how many items have been taken, and how many are done.
struct Phase {
    alignas(64) std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
};

// The threads inside one parallel region, seen from one of them.
//
// A thread waits for work, not for threads: one that the system has put aside is missed only if it holds an item, or
// has not counted those that it did. When it comes back it runs through what was done without it. So no two phases
// share counters.
class Team {
public:
    Team(int threads, Phase* phases) : size(threads), phases_(phases) {}

    const int size;

    // Calls body(begin, end) for pieces of [0, count), `step` long, until all are taken. All threads give the same
    // count. What comes next may use the results only after barrier().
    template <class Body>
    void share(int64_t count, int64_t step, Body body) {
        if (size == 1) {
            for (int64_t begin = 0; begin < count; begin += step)
                body(begin, begin + step < count ? begin + step : count);
            return;
        }
        Phase& phase = phases_[used_++];
        count_ = count;
        int64_t done = 0;
        for (int64_t begin; (begin = phase.taken.fetch_add(step, std::memory_order_relaxed)) < count;) {
            const int64_t end = begin + step < count ? begin + step : count;
            body(begin, end);
            done += end - begin;
        }
        if (done > 0) phase.done.fetch_add(done, std::memory_order_release);
    }

    // Waits until all of the last share() is done.
    void barrier() const {
        if (size == 1) return;
        const std::atomic<int64_t>& done = phases_[used_ - 1].done;
        wait_until([&] { return done.load(std::memory_order_acquire) >= count_; });
    }

private:
    Phase* phases_;
    int64_t used_ = 0, count_ = 0;
};

// The one T of this process: after a fork its threads are gone, and a new one takes the old one's place. Never destroyed,
// because threads may outlive main(). A fork waits for who holds the guard: nobody in the child would give it back.
template <class T>
T& of_process() {
    static std::mutex guard;
    static T* one = nullptr;
    static pid_t owner = 0;
    [[maybe_unused]] static const int told =
        pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] { guard.unlock(); });
    const std::lock_guard<std::mutex> lock(guard);
    if (owner != getpid()) one = new T, owner = getpid();
    return *one;
}

// Helping threads, asleep between jobs. A job has a number of places; whoever comes in time takes one, and the caller
// waits for those alone: a helper that is still asleep when the work is done is not missed.
class Pool {
public:
    static Pool& instance() { return of_process<Pool>(); }

    // Calls job(context) here and in up to `helpers` other threads. False, and nothing has run: another thread's job is
    // in progress.
    bool run(int helpers, void (*job)(void*), void* context) {
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn) return false;
        hire(helpers);
        job_ = job, context_ = context;
        left_.store(0, std::memory_order_relaxed);
        const uint64_t number = ++number_ << 16;
        gate_.store(number |
                    static_cast<uint64_t>(helpers));  // seq_cst, as is asleep_: one of the two sides sees the other
        if (asleep_.load() > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            opened_.notify_all();
        }
        job(context);
        const int64_t entered = helpers - static_cast<int64_t>(gate_.exchange(number) & kPlaces);
        wait_until([&] { return left_.load(std::memory_order_acquire) >= entered; });
        return true;
    }

private:
    static constexpr uint64_t kPlaces = 0xffff;

    void hire(int helpers) {
        for (; hired_ < helpers; ++hired_) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                hired_ = helpers;  // no more threads are allowed; the work is done all the same
            }
        }
    }

    void help() {
        uint64_t done = 0;  // the last job that this thread took part in
        for (int64_t spins = 0;;) {
            uint64_t gate = gate_.load(std::memory_order_acquire);
            if (open(gate, done)) {
                if (!gate_.compare_exchange_weak(gate, gate - 1, std::memory_order_acq_rel)) continue;
                done = gate >> 16;
                job_(context_);
                left_.fetch_add(1, std::memory_order_release);
                spins = 0;
            } else if (++spins < kSpins) {
                relax();
            } else if (spins < kSpins + kYields) {
                sched_yield();
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                ++asleep_;
                opened_.wait(lock, [&] { return open(gate_.load(), done); });
                --asleep_;
            }
        }
    }

    static bool open(uint64_t gate, uint64_t done) { return (gate & kPlaces) != 0 && gate >> 16 != done; }

    std::mutex turn_;   // whose job it is
    std::mutex mutex_;  // for sleeping
    std::condition_variable opened_;
    std::atomic<int> asleep_{0};
    alignas(64) std::atomic<uint64_t> gate_{0};  // number of the job, and in the lowest 16 bits its free places
    alignas(64) std::atomic<int64_t> left_{0};   // helpers that entered and are done
    void (*job_)(void*) = nullptr;
    void* context_ = nullptr;
    uint64_t number_ = 0;
    int hired_ = 0;
};

// Runs body(team) in `threads` threads, in this one alone while the others serve another caller; body calls share() at
// most `phases` times.
template <class Body>
void run_team(int threads, int64_t phases, Body body) {
    threads = team_size(threads);
    if (threads > 1) {
        std::vector<Phase> counters(static_cast<size_t>(phases));
        struct Job {
            int threads;
            Phase* phases;
            Body& body;
        } job{threads, counters.data(), body};
        auto enter = [](void* context) {
            const Job& j = *static_cast<Job*>(context);
            Team team(j.threads, j.phases);
            j.body(team);
        };
        if (Pool::instance().run(threads - 1, enter, &job)) return;
    }
    Team team(1, nullptr);
    body(team);
}

}  // namespace gpt_fast
