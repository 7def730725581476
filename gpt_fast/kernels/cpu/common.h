// What every kernel shares: the team of threads that runs it (team.h), scratch memory, and the vector helpers.
//
// The vector code below is AVX2 + FMA + F16C. Another instruction set gets its own set of these helpers and micro
// kernels, chosen by compile flags here; nothing above the micro kernels knows about vectors.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "team.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include <initializer_list>
#else
#error "only AVX2 with FMA and F16C is implemented"
#endif

namespace gpt_fast {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint8_t;

// Memory that is kept for the next call: grows, never shrinks, aligned to a cache line.
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
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- vectors ----

// Keeps a running integer sum where it is. gcc otherwise reorders an unrolled chain of integer additions so that all
// the products are alive at once, and spills most of them.
inline void pin(__m256i& sum) { asm("" : "+x"(sum)); }

// Sum of the 8 lanes, always in this order.
inline float lane_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float lane_max(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

// bfloat16 is the upper half of a float32.
inline __m256 load8(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline float to_float(float x) { return x; }

inline float to_float(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline void store_as(float x, float* p) { *p = x; }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline void store_as(float x, uint16_t* p) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *p = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x, relative error below 2e-7. By Cody and Waite: x = n ln 2 + r, a polynomial for e^r, n into the exponent.
// -infinity gives 0; NaN stays NaN.
inline __m256 exp8(__m256 x) {
    const __m256 low = _mm256_set1_ps(-87.33f), high = _mm256_set1_ps(88.37f);
    const __m256 zero_below = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256 clamped = _mm256_max_ps(_mm256_min_ps(x, high), low);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504088896f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clamped);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    // Taylor's coefficients to degree 7 suffice for |r| <= ln 2 / 2.
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 result = _mm256_andnot_ps(zero_below, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
    return _mm256_blendv_ps(result, x, is_nan);
}

}  // namespace gpt_fast
