// What products ask memory for before they read it, since a core that waits for memory does nothing else.
#pragma once

#include <unistd.h>

#include "common.h"
#include "tiles.h"

namespace gpt_fast {

// The size of the first-level cache for data of a core; 0 or less where the system does not say.
#ifdef _SC_LEVEL1_DCACHE_SIZE
inline const int64_t kLevel1Bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
inline const int64_t kLevel1Bytes = 0;
#endif
// Whether what is computed needs all of it: where it is small, and with tiles, whose blocks are longer.
inline const bool kFullLevel1 = kTiles || kLevel1Bytes <= 32 << 10;

constexpr int kStreams = 4;       // tiles at once for which the hardware fetches ahead by itself, and better
constexpr int64_t kAhead = 4096;  // bytes

// Whether micro kernels that use the same weights one after the other share out what they ask memory for. Where
// products take longer than memory, the question whose turn it is costs more.
constexpr bool kSharedFetches = kRegisters >= 32;
constexpr int kSharingRows = 4;  // the least that such a kernel has

// What a micro kernel asks memory for meanwhile, a line at a time: many at once fill the queue of lines that a core
// waits for, and it stands still.
struct Fetch {
    int64_t distance = kAhead;   // bytes from what is read now to what is asked for
    int64_t tiles = 0;           // from a tile that ends to the one that is read next; 0: T, and nothing is shared
    int64_t mask = 0, turn = 0;  // the kernel asks for line i if i & mask is turn

    // For one of some kernels with the same weights.
    Fetch part(int64_t kernel, int64_t kernels) const {
        if (tiles == 0) return *this;
        Fetch f = *this;
        while (2 * (f.mask + 1) <= kernels) f.mask = 2 * f.mask + 1;
        f.turn = kernel;
        return f;
    }

    // What is `distance` bytes after `at` of the first of T tiles. Where nothing is shared these are constants.
    template <int T>
    const uint8_t* after(const uint8_t* from, int64_t tile_bytes, int64_t at) const {
        const int64_t far = at + (kSharedFetches ? distance : kAhead);
        return from + (far < tile_bytes ? far : far + ((kSharedFetches && tiles ? tiles : T) - 1) * tile_bytes);
    }

    // For R rows the line at `next` of T tiles, if number `i` is asked for.
    template <int R, int T>
    [[gnu::always_inline]] void line(const uint8_t* next, int64_t tile_bytes, int64_t i) const {
        if (T == kStreams || (kSharedFetches && R >= kSharingRows && (i & mask) != turn)) return;
        // Products of five rows and more, of one kernel or of several, hide the way from the second level.
        const bool far = kRegisters >= 32 && (R > 4 || (R == kSharingRows && tiles)) && kFullLevel1;
#pragma GCC unroll 4
        for (int64_t t = 0; t < T; ++t)
            if (far)
                prefetch_to_level2(next + t * tile_bytes);
            else
                prefetch(next + t * tile_bytes);
    }

    // The same for line `i` of `count` between the instructions of a block; where few registers are left for addresses
    // all of them before its first instruction.
    template <int R, int T, int count>
    [[gnu::always_inline]] void line_of(const uint8_t* next, int64_t tile_bytes, int64_t i) const {
        if (kRegisters >= 32) return line<R, T>(next + i * kLine, tile_bytes, i);
#pragma GCC unroll 8
        for (int64_t l = 0; i == 0 && l < count; ++l) line<R, T>(next + l * kLine, tile_bytes, l);
    }
};

// An even step for what reads memory faster than it comes. A core that runs ahead asks for many lines at once, and the
// hardware, which looks further ahead than it, finds no room for its own questions. A chain of products, each of which
// waits for the one before, lets a line go by every nine cycles; memory takes eleven and more (measured).
class Pace {
public:
    [[gnu::always_inline]] void line() {
        for (int i = 0; i < 3; ++i) {
            chain_ *= 0x9e3779b1u;
            asm volatile("" : "+r"(chain_));  // else three products are one
        }
    }

private:
    uint64_t chain_ = 1;
};

// What is kAhead bytes after [at, at + count) of T tiles, at once.
template <int T>
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* tiles, int64_t tile_bytes, int64_t at, int64_t count) {
    const Fetch fetch;
    const uint8_t* next = fetch.after<T>(tiles, tile_bytes, at);
#pragma GCC unroll 16
    for (int64_t i = 0; i < count; i += kLine) fetch.line<1, T>(next + i, tile_bytes, 0);
}

// Brings what other threads may have written into the second level of the cache: `count` of what is at `from`. Else each
// of its lines would be waited for by itself.
template <class T>
inline void fetch_written(const T* from, int64_t count) {
    const auto* at = reinterpret_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += kLine) prefetch_to_level2(at + i);
}

// Brings what follows [k, k_end) of some tiles of weights into the second level of the cache, a part after each of some
// groups of rows: so that memory is read while products are made.
class FetchPieces {
public:
    // More k of these tiles, or the first k of the next ones.
    template <class Format>
    FetchPieces(const Format& w, int64_t tile, int64_t tiles, int64_t k, int64_t k_end, int64_t rows)
        : at_(k_end < w.depth() ? w.at(tile, k_end) : w.at(tile + tiles, 0)),
          lines_((w.at(0, k_end) - w.at(0, k)) / kLine),
          skip_(w.tile_bytes() - lines_ * kLine),
          all_(tiles * lines_),
          rows_(rows) {}

    void after(int64_t rows) {
        for (const int64_t due = all_ * rows / rows_; done_ < due; ++done_) {
            prefetch_to_level2(at_);
            at_ += kLine;
            if (++line_ == lines_) line_ = 0, at_ += skip_;
        }
    }

private:
    const uint8_t* at_;
    int64_t lines_, skip_, all_, rows_, done_ = 0, line_ = 0;
};

}  // namespace gpt_fast
