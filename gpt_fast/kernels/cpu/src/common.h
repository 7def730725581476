// What every kernel shares: the team of threads that runs it, vectors, scratch memory.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace gpt_fast {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint8_t;

constexpr int64_t kLine = 64;  // bytes of a line of the CPU's caches

// Memory that is kept for the next call: grows, never shrinks, aligned to a cache line. The process ends where the system
// refuses it.
class Scratch {
public:
    ~Scratch() { std::free(data_); }
    template <class T>
    T* get(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            size_ = bytes;
            if (!data_) std::fprintf(stderr, "gpt_fast: no memory for %zu bytes\n", bytes), std::abort();
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline F8 load8(const uint16_t* bfloat16) { return load8_bfloat16(bfloat16); }

inline float to_float(float x) { return x; }

inline float to_float(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// What numbers of magnitude `most` at most are multiplied by to be rounded to 127 steps. 0 where that does not fit
// float32: such numbers, below 4e-37, all count as zeros.
inline float steps_of(float most) {
    const float steps = 127.0f / most;
    return steps == INFINITY ? 0.0f : steps;
}

}  // namespace gpt_fast
