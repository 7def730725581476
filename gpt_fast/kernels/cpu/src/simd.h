// The vocabulary of vectors that the kernels are written in, in the words of the CPU that they are compiled for.
//
// F8 is eight float32, I8 is 32 bytes: eight int32, or 32 of int8, of uint8, or of 4 bits in bytes. F8 has the
// operators + - * /, I8 has & and |. F16 and I16 are twice as long, for the products; kRegisters says how many of them
// the CPU holds. Every set of instructions gives the same results: integer sums are exact, and sums of lanes are taken
// in one order. Only products differ: of bfloat16 where kBfloat16Dots, of integers where kPairedDots, and by tiles
// (tiles.h). Another set needs its own header of these functions; nothing else knows about it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace gpt_fast {

inline int32_t load_four(const void* bytes) {
    int32_t four;
    std::memcpy(&four, bytes, sizeof four);
    return four;
}

// Between 2^23 and 2^24 the unit is 1: a number plus this is rounded to a whole one, which its lowest bits then are.
constexpr float kToWhole = 12582912.0f;
constexpr int32_t kWholeBits = 0x4b400000;  // of kToWhole

// Powers of two as bfloat16, powers() below: the bits of 2^x are nearly 128 (127 + x), a line between each two whole x,
// which lies above them. By how much, for each 128th.
struct alignas(64) BelowLine {
    uint8_t all[128] = {};

    constexpr BelowLine() {
        double power = 1.0;
        for (int i = 0; i < 128; ++i, power *= 1.005429901112803)  // 2^(1/128)
            all[i] = static_cast<uint8_t>(i + 128.5 - 128 * power);
    }
};
inline constexpr BelowLine kBelowLine;
constexpr float kPowersBegin = kToWhole + 127 * 128;  // of 2^0

// A float32 whose second byte is x is 2^15 + x: no other way from bytes to floats is as short.
constexpr float kBesideByte = 32768.0f;

// A scale to 15 bits, so that its product with kBesideByte + 128 is exact.
inline float short_scale(float scale) {
    const int32_t bits = load_four(&scale) & -0x200;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

}  // namespace gpt_fast

#if defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#ifdef __AVX512VNNI__
#include "simd_avx512.h"
#else
#include "simd_pairs.h"
#endif
#elif defined(__aarch64__)
#include "simd_neon.h"
#include "simd_pairs.h"
#else
#error "only AVX2 with FMA, and 64-bit NEON, are implemented"
#endif

namespace gpt_fast {

inline void store_as(float x, float* p) { *p = x; }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline void store_as(float x, uint16_t* p) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *p = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Pairs of bfloat16, which is the upper half of a float32, widened.
inline F8 low_bfloat16(I8 pairs) { return as_floats(shift_left<16>(pairs)); }
inline F8 high_bfloat16(I8 pairs) { return as_floats(pairs & splat(static_cast<int32_t>(0xffff0000u))); }
#ifndef __AVX512VNNI__
inline F16 low_bfloat16(I16 pairs) { return {low_bfloat16(pairs.a), low_bfloat16(pairs.b)}; }
inline F16 high_bfloat16(I16 pairs) { return {high_bfloat16(pairs.a), high_bfloat16(pairs.b)}; }
#endif

// 32 bits everywhere: one weight's neighbours along k.
inline I16 splat_four(const void* bytes) { return splat16(load_four(bytes)); }

// Whether dot() wants sums of two neighbours of x to be 128 in magnitude at most.
#ifdef GPT_FAST_PAIRED_DOTS
constexpr bool kPairedDots = true;
#else
constexpr bool kPairedDots = false;
inline F8 pair_sums(F8 x) { return x; }
#endif

#ifdef GPT_FAST_PAIRED_DOTS
// Sums of nibbles times scales of at most 255, one for each lane. Exact: it fits float32.
inline I16 nibble_scales(const uint8_t* p) { return {nibble_scales8(p), nibble_scales8(p + 8)}; }
inline F16 scaled_nibbles(I16 sums, I16 scales) {
    return {scaled_nibbles(sums.a, scales.a), scaled_nibbles(sums.b, scales.b)};
}
#endif

// Whether dot_raised(), dot() with weights that have had 128 added before, is one instruction, which takes any x.
#ifdef GPT_FAST_DPBUSD
constexpr bool kRaisedDots = true;
#else
constexpr bool kRaisedDots = false;
#endif

#ifndef __AVX512VNNI__
// What only CPUs with tiles use, as formulas.
template <class Body>
inline I16 by_ints(I16 x, I16 y, Body body) {
    int32_t a[16], b[16];
    std::memcpy(a, &x, sizeof a), std::memcpy(b, &y, sizeof b);
    for (int i = 0; i < 16; ++i) a[i] = body(a[i], b[i]);
    return load64(reinterpret_cast<const uint8_t*>(a));
}
inline I16 larger(I16 x, I16 y) {
    return by_ints(x, y, [](int32_t a, int32_t b) { return a > b ? a : b; });
}
inline bool any_above(I16 v, int32_t most) {
    int32_t all[16];
    std::memcpy(all, &v, sizeof all);
    for (int32_t x : all)
        if (x > most) return true;
    return false;
}
inline bool any_bit(I16 v, int32_t bits) {
    int32_t all[16];
    std::memcpy(all, &v, sizeof all);
    for (int32_t x : all)
        if (x & bits) return true;
    return false;
}
inline I16 minus(I16 x, I16 y) { return by_ints(x, y, [](int32_t a, int32_t b) { return a - b; }); }
inline I16 less8(I16 nibbles) {
    int8_t bytes[64];
    std::memcpy(bytes, &nibbles, sizeof bytes);
    for (int8_t& x : bytes) x = static_cast<int8_t>(x - 8);
    return load64(reinterpret_cast<const uint8_t*>(bytes));
}
inline I16 low_nibbles_less8(I16 v) { return less8(low_nibbles(v)); }
inline I16 high_nibbles_less8(I16 v) { return less8(high_nibbles(v)); }
inline I16 lower_words(I16 v) { return by_ints(v, v, [](int32_t a, int32_t) { return a & 0xffff; }); }
inline I16 load16_bytes(const uint8_t* p) {
    int32_t all[16];
    for (int i = 0; i < 16; ++i) all[i] = p[i];
    return load64(reinterpret_cast<const uint8_t*>(all));
}

class Int4Grid {
public:
    Int4Grid(const uint8_t* scales, const uint8_t* zeros) : scales_(scales), zeros_(zeros) {}

    void split(I16 q, uint8_t* high, uint8_t* low) const {
        uint8_t codes[64];
        store64(codes, q);
        for (int i = 0; i < 64; ++i) {
            const int value = (8 * codes[i] - zeros_[i / 4]) * scales_[i / 4] + 128;
            high[i] = static_cast<uint8_t>(value >> 8), low[i] = static_cast<uint8_t>((value & 255) - 128);
        }
    }

private:
    const uint8_t *scales_, *zeros_;
};
#endif

// Whether products of bfloat16 take both sides in it. The definition may come from tests, for the instruction's formula.
#ifdef GPT_FAST_BFLOAT16_DOTS
constexpr bool kBfloat16Dots = true;
#else
constexpr bool kBfloat16Dots = false;
#endif

#ifndef __AVX512BF16__
// sum + the products of pairs of bfloat16.
inline F16 bfloat16_dot(F16 sum, I16 w, I16 x) {
    sum = plus_product(sum, high_bfloat16(w), high_bfloat16(x));
    return plus_product(sum, low_bfloat16(w), low_bfloat16(x));
}

// Sixteen float32 rounded to nearest, ties to even, as torch does it; NaN stays NaN.
inline void store16_bfloat16(uint16_t* to, F16 v) {
    float x[16];
    store16(x, v);
    for (int i = 0; i < 16; ++i) store_as(x[i], to + i);
}

// Four bytes, 128 raised, of each of sixteen lanes as pairs of bfloat16: the first two, and the last two.
inline void pairs_of_raised_bytes(const uint8_t* from, uint16_t* first, uint16_t* second) {
    for (int i = 0; i < 64; ++i)
        store_as(static_cast<float>(from[i] - 128), (i % 4 < 2 ? first : second) + i / 4 * 2 + i % 2);
}
// The same with bytes that are not raised, each times its scale, rounded to nearest, half a unit up.
class ScaledBytes {
public:
    explicit ScaledBytes(const float* scales) : scales_(scales) {}

    void to_pairs(const uint8_t* from, uint16_t* first, uint16_t* second) const {
        for (int i = 0; i < 64; ++i) {
            const float scale = short_scale(scales_[i % 4]), beside = kBesideByte + static_cast<float>(from[i] ^ 128);
            const float x = std::fma(beside, scale, scale * -(kBesideByte + 128));
            const auto bits = static_cast<uint32_t>(load_four(&x)) + 0x8000;
            (i % 4 < 2 ? first : second)[i / 4 * 2 + i % 2] = static_cast<uint16_t>(bits >> 16);
        }
    }

private:
    const float* scales_;
};
#endif

constexpr float kLog2E = 1.44269504f;

// 2^((x - kPowersBegin) / 128) of 32 lanes as bfloat16, to half of 2^-7 and half a unit of bfloat16: 0 below 2^-126, no
// number above 2^129. Signs are those of lanes that give something else; within_powers() gives lanes without them.
inline F16 within_powers(F16 x) {
    return larger(smaller(x, splat16(kToWhole + 0x7f80)), splat16(kToWhole));  // no number: infinity
}
#ifndef __AVX512VBMI__
inline I16 powers(F16 x, F16 y) {
    float lanes[32];
    store16(lanes, x), store16(lanes + 16, y);
    uint16_t powers[32];
    for (int i = 0; i < 32; ++i) {
        const int64_t steps = load_four(lanes + i) - int64_t{kWholeBits};
        const auto nearest = static_cast<uint16_t>(steps < 0 ? 0 : steps > 0xffff ? 0xffff : steps);
        powers[i] = static_cast<uint16_t>(nearest - kBelowLine.all[nearest % 128]);
    }
    return load64(reinterpret_cast<const uint8_t*>(powers));
}
#endif

// The eight lowest bits of each lane as the exponent of a float32: 2^(bits - 127).
inline F8 power_of_low_bits(F8 v) { return as_floats(shift_left<23>(as_ints(v))); }
#ifndef __AVX512VNNI__
inline F16 power_of_low_bits(F16 v) { return {power_of_low_bits(v.a), power_of_low_bits(v.b)}; }

// x to the nearest whole number n, at least -127, which is returned, and the rest in x. Then 2^n x, 0 where n is -127.
inline F16 take_whole(F16& x) {
    const F16 to_whole = splat16(kToWhole), bounded = larger(splat16(-127.0f), x);
    const F16 whole = (bounded + to_whole) - to_whole;
    x = bounded - whole;
    return whole;
}
inline F16 times_power(F16 x, F16 n) { return x * power_of_low_bits(n + splat16(kToWhole + 127.0f)); }
#endif

template <class V>
inline V each_lane(float x) {
    if constexpr (sizeof(V) == sizeof(F8))
        return splat(x);
    else
        return splat16(x);
}

// e^x of some vectors, relative error below 2e-7. By Cody and Waite: x = n ln 2 + r, a polynomial for e^r, n into the
// exponent. -infinity gives 0; NaN stays NaN, as larger() and smaller() return the second where one is. Each step for
// all vectors: a CPU that waits for one result has others at hand.
template <int N, class V>
[[gnu::always_inline]] inline void exp_each(V (&x)[N]) {
    constexpr auto all = each_lane<V>;
    const V low = all(-87.33f), high = all(88.37f), shift = all(kToWhole + 127.0f);  // lowest bits: n + 127
    V r[N], shifted[N], p[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) r[i] = smaller(high, x[i]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) shifted[i] = plus_product(shift, r[i], all(kLog2E));
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) r[i] = minus_product(r[i], shifted[i] - shift, all(0.693359375f));
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) r[i] = minus_product(r[i], shifted[i] - shift, all(-2.12194440e-4f));
    // The polynomial of degree 6 with the least relative error for |r| <= ln 2 / 2, which is 2e-9.
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) p[i] = all(1.3836835e-3f);
#pragma GCC unroll 6
    for (const float c : {8.374824e-3f, 4.1668225e-2f, 0.16666420f, 0.49999991f, 1.0f, 1.0f})
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) p[i] = plus_product(all(c), p[i], r[i]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = choose(less(x[i], low), all(0.0f), p[i] * power_of_low_bits(shifted[i]));
}

// The sum, and the largest, of the lanes of each of eight.
[[gnu::always_inline]] inline F8 lane_sums(const F8 (&v)[8]) {
    return join_lanes(v, [](F8 x, F8 y) { return x + y; });
}
[[gnu::always_inline]] inline F8 lane_maxes(const F8 (&v)[8]) {
    return join_lanes(v, [](F8 x, F8 y) { return larger(x, y); });
}

// Magnitudes are compared as integers, because the floating-point maximum would lose a NaN.
inline I8 larger_magnitude(I8 largest, F8 v) { return larger(largest, as_ints(v) & splat(0x7fffffff)); }

inline float largest_lane(I8 magnitudes) {
    const int32_t bits = lane_max(magnitudes);
    float most;
    std::memcpy(&most, &bits, sizeof most);
    return most;
}

inline F8 exp8(F8 x) {
    F8 one[] = {x};
    exp_each(one);
    return one[0];
}

#ifdef __AVX512VNNI__
template <int N>
[[gnu::always_inline]] inline void exp16_each(F16 (&x)[N]) {
    exp_each(x);
}
#else
template <int N>
[[gnu::always_inline]] inline void exp16_each(F16 (&x)[N]) {
    F8 halves[2 * N];
    for (int i = 0; i < N; ++i) halves[2 * i] = x[i].a, halves[2 * i + 1] = x[i].b;
    exp_each(halves);
    for (int i = 0; i < N; ++i) x[i] = {halves[2 * i], halves[2 * i + 1]};
}
#endif

// 2^x of some vectors by the polynomial with the least relative error for |rest| <= 1 / 2: 1.8e-3 of degree 2, 7.5e-5
// of degree 3, 2.7e-6 of degree 4. 0 where it is tiny and for -infinity; NaN stays NaN.
template <int kDegree, int N>
[[gnu::always_inline]] inline void power16_each(F16 (&x)[N]) {
    static_assert(2 <= kDegree && kDegree <= 4, "polynomials");
    constexpr float polynomials[][5] = {{0.238428935f, 0.703447998f, 1.0004431f},
                                        {0.0551716685f, 0.242611125f, 0.693260968f, 0.999928057f},
                                        {0.00957010221f, 0.0559178591f, 0.240247443f, 0.693121791f, 0.999999285f}};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        F16 rest = x[i], sum = splat16(polynomials[kDegree - 2][0]);
        const F16 whole = take_whole(rest);
#pragma GCC unroll 4
        for (int j = 1; j <= kDegree; ++j) sum = plus_product(splat16(polynomials[kDegree - 2][j]), sum, rest);
        x[i] = times_power(sum, whole);
    }
}

}  // namespace gpt_fast
