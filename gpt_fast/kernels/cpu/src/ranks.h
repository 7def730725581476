// What processes that share one model do together: sums and rows of all of them, by memory that they share.
//
// Each rank has its place in the memory, twice, in turns: a rank that is ahead writes into the other one while a slow
// one still reads. A rank announces by a counter what it has written, and waits for the counters of the others. Sums
// are added as a tree over the ranks, like the parts that one rank adds alone (linear.h): the same bits for any number.
#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <chrono>

#include "common.h"

namespace gpt_fast {

// Where there is no shared memory `gather` collects, by other means, `count` floats of each rank.
struct Ranks {
    int64_t rank, count;
    uint8_t* memory;   // kAnnounced bytes for each rank, then [2, ranks, capacity] floats; or null
    int64_t capacity;  // floats
    void* gather;      // void (*)(int64_t count): places [ranks, capacity] are filled from each rank's own
    float* gathered;   // those places, where there is no shared memory
    int64_t round;     // exchanges so far
    int64_t missing;   // the rank that is lost, and from then on nothing is exchanged; or -1. Another thread may write it
};

constexpr int64_t kAnnounced = 64;  // bytes: a cache line
constexpr int64_t kMostRanks = 64;
constexpr std::chrono::seconds kPatience{8};  // for a rank that is in the same step

inline std::atomic<int64_t>& announced(const Ranks& r, int64_t rank) {
    return *reinterpret_cast<std::atomic<int64_t>*>(r.memory + rank * kAnnounced);
}

inline bool is_lost(const Ranks& r) { return __atomic_load_n(&r.missing, __ATOMIC_RELAXED) >= 0; }

// The place of `rank` in exchange `round`.
inline float* place_of(const Ranks& r, int64_t round, int64_t rank) {
    if (!r.memory) return r.gathered + rank * r.capacity;
    float* data = reinterpret_cast<float*>(r.memory + r.count * kAnnounced);
    return data + ((round & 1) * r.count + rank) * r.capacity;
}

// Exchanges of `count` floats.
inline int64_t num_exchanges(const Ranks& r, int64_t count) { return ceil_div(count, r.capacity); }

// Waits until the places of all ranks are filled, as this rank's is. By one thread.
inline void exchange(Ranks& r, int64_t round, int64_t count) {
    if (!r.memory) {
        if (!is_lost(r)) reinterpret_cast<void (*)(int64_t)>(r.gather)(count);
        return;
    }
    announced(r, r.rank).store(round, std::memory_order_release);
    for (int64_t rank = 0; rank < r.count && !is_lost(r); ++rank) {
        auto here = [&] { return announced(r, rank).load(std::memory_order_acquire) >= round || is_lost(r); };
        int64_t looks = 0;
        std::chrono::steady_clock::time_point until;
        wait_until([&] {
            if (++looks < 2 * kSpins) return here();
            const auto now = std::chrono::steady_clock::now();
            if (looks == 2 * kSpins) until = now + kPatience;
            return here() || now > until;
        });
        if (!here()) r.missing = rank;
    }
}

#if defined(__linux__)
inline void futex(std::atomic<int64_t>& word, int operation, int64_t value) {
    // Of the eight bytes the kernel looks at the four that count.
    auto* low = reinterpret_cast<uint32_t*>(&word) + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 1);
    syscall(SYS_futex, low, operation, static_cast<uint32_t>(value), nullptr, nullptr, 0);
}
#endif

// Rank 0 tells the others `count` numbers, which hear() them; between two of them all ranks exchange something.
inline void tell(Ranks& r, const int64_t* numbers, int64_t count) {
    ++r.round;
    auto* place = reinterpret_cast<int64_t*>(place_of(r, r.round, 0));
    place[0] = count;
    std::memcpy(place + 1, numbers, static_cast<size_t>(count) * sizeof(int64_t));
    announced(r, 0).store(r.round, std::memory_order_release);
#if defined(__linux__)
    futex(announced(r, 0), FUTEX_WAKE, INT32_MAX);
#endif
}

// The numbers that rank 0 tells next, and before them how many; sleeps until it does.
inline const int64_t* hear(Ranks& r) {
    ++r.round;
    int64_t looks = 0;
    for (;;) {
        const int64_t last = announced(r, 0).load(std::memory_order_acquire);
        if (last >= r.round) return reinterpret_cast<const int64_t*>(place_of(r, r.round, 0));
        ++looks;
        if (looks < kSpins)
            relax();
        else if (looks < kSpins + kYields)
            sched_yield();
        else
#if defined(__linux__)
            futex(announced(r, 0), FUTEX_WAIT, last);
#else
            usleep(1000);
#endif
    }
}

// Shows `in` [count] to the other ranks and calls body(first, begin, end, round) for pieces of what all ranks show, by
// the whole team: place_of(round, any rank)[begin ... end) is what that rank has at first + begin. `round`: exchanges so
// far, and behind this.
template <class Body>
void with_ranks(Team& team, Ranks& r, int64_t& round, const float* in, int64_t count, Body body) {
    constexpr int64_t kPieceOfRanks = 4096;
    for (int64_t first = 0; first < count; first += r.capacity) {
        const int64_t size = count - first < r.capacity ? count - first : r.capacity;
        ++round;
        team.share(size, kPieceOfRanks, [&](int64_t begin, int64_t end) {
            std::memcpy(place_of(r, round, r.rank) + begin, in + first + begin,
                        static_cast<size_t>(end - begin) * sizeof(float));
        });
        team.barrier();
        team.share(1, 1, [&](int64_t, int64_t) { exchange(r, round, size); });
        team.barrier();
        team.share(size, kPieceOfRanks, [&](int64_t begin, int64_t end) { body(first, begin, end); });
        team.barrier();
    }
}

// out[i] = end(i, the sum over the ranks of in[i]); in and out may be the same.
template <class End>
void sum_of_ranks(Team& team, Ranks& r, int64_t& round, const float* in, int64_t count, float* out, End end) {
    with_ranks(team, r, round, in, count, [&](int64_t first, int64_t begin, int64_t stop) {
        constexpr int64_t at_once = 64;
        float sum[kMostRanks][at_once];
        for (int64_t i = begin; i < stop; i += at_once) {
            const int64_t size = stop - i < at_once ? stop - i : at_once;
            for (int64_t k = 0; k < r.count; ++k)
                std::memcpy(sum[k], place_of(r, round, k) + i, static_cast<size_t>(size) * sizeof(float));
            for (int64_t step = 1; step < r.count; step *= 2)
                for (int64_t k = 0; k + step < r.count; k += 2 * step)
                    for (int64_t j = 0; j < at_once; ++j) sum[k][j] += sum[k + step][j];
            for (int64_t j = 0; j < size; ++j) out[first + i + j] = end(first + i + j, sum[0][j]);
        }
    });
}

// out [rows, total] of each rank's in [rows, width], side by side. Where that is more than `total`, the last ranks begin
// earlier (VocabShare), and only the first one's columns count.
inline void rows_of_ranks(Team& team, Ranks& r, int64_t& round, const float* in, int64_t rows, int64_t width,
                          float* out, int64_t total) {
    with_ranks(team, r, round, in, rows * width, [&](int64_t first, int64_t begin, int64_t end) {
        for (int64_t k = 0; k < r.count; ++k) {
            const int64_t own = k * width, start = std::min(own, total - width);
            for (int64_t i = begin; i < end; ++i) {
                const int64_t at = first + i, row = at / width, column = start + at % width;
                if (column >= own) out[row * total + column] = place_of(r, round, k)[i];
            }
        }
    });
}

}  // namespace gpt_fast
