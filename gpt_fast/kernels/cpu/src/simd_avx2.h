// Eight lanes of simd.h in AVX2 and FMA; where the compiler may use AVX's own VNNI, products of bytes in that.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace gpt_fast {

using F8 = __m256;
using I8 = __m256i;

// ---- float32 ----

inline F8 splat(float x) { return _mm256_set1_ps(x); }
inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, F8 v) { _mm256_storeu_ps(p, v); }
inline F8 plus_product(F8 sum, F8 a, F8 b) { return _mm256_fmadd_ps(a, b, sum); }  // sum + a * b, rounded once
inline F8 minus_product(F8 sum, F8 a, F8 b) { return _mm256_fnmadd_ps(a, b, sum); }
inline F8 larger(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline F8 smaller(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 magnitude(F8 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline F8 negative(F8 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

// Masks: all bits of a lane, or none.
inline F8 less(F8 a, F8 b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline F8 is_nan(F8 x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
inline F8 choose(F8 mask, F8 yes, F8 no) { return _mm256_blendv_ps(no, yes, mask); }

inline float first_lane(F8 v) { return _mm256_cvtss_f32(v); }

inline float lane_sum(F8 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float lane_max(F8 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// All lanes of each of eight joined by `by`.
template <class By>
[[gnu::always_inline]] inline F8 join_lanes(const F8 (&v)[8], By by) {
    F8 four[2];
    for (int i = 0; i < 2; ++i) {
        const F8* w = v + 4 * i;
        const F8 s = by(_mm256_unpacklo_ps(w[0], w[1]), _mm256_unpackhi_ps(w[0], w[1]));
        const F8 t = by(_mm256_unpacklo_ps(w[2], w[3]), _mm256_unpackhi_ps(w[2], w[3]));
        four[i] = by(_mm256_shuffle_ps(s, t, 0x44), _mm256_shuffle_ps(s, t, 0xee));
    }
    return by(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

// ---- conversions ----

inline F8 as_floats(I8 bits) { return _mm256_castsi256_ps(bits); }
inline I8 as_ints(F8 bits) { return _mm256_castps_si256(bits); }
inline F8 to_floats(I8 v) { return _mm256_cvtepi32_ps(v); }
inline I8 nearest(F8 v) { return _mm256_cvtps_epi32(v); }  // ties to even; NaN and what is too large: -2^31

inline F8 load8_bfloat16(const uint16_t* p) {
    return as_floats(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}

inline F8 load8_uint8(const uint8_t* p) {
    return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// 32 values of at most 127 in magnitude.
inline void store_int8(int8_t* p, const I8* q) {
    // The two packs leave groups of four in the order 0 2 4 6 1 3 5 7.
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ordered);
}

// ---- integers ----

inline I8 splat(int32_t x) { return _mm256_set1_epi32(x); }
inline I8 load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store32(uint8_t* p, I8 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline I8 add(I8 a, I8 b) { return _mm256_add_epi32(a, b); }
inline I8 larger(I8 a, I8 b) { return _mm256_max_epi32(a, b); }
template <int N>
inline I8 shift_left(I8 v) {
    return _mm256_slli_epi32(v, N);
}
template <int N>
inline I8 shift_right(I8 v) {  // zeros come in
    return _mm256_srli_epi32(v, N);
}
inline I8 exclusive_or(I8 a, I8 b) { return _mm256_xor_si256(a, b); }
inline I8 multiply(I8 a, I8 b) { return _mm256_mullo_epi32(a, b); }  // the lower 32 bits
inline bool any(I8 v) { return !_mm256_testz_si256(v, v); }

inline int32_t lane_sum(I8 v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

inline int32_t lane_max(I8 v) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// Keeps a running sum where it is. gcc otherwise reorders an unrolled chain of integer additions so that all the
// products are alive at once, and spills most of them.
inline void pin(I8& sum) { asm("" : "+x"(sum)); }

// ---- products of pairs of 16 bits ----

// The same pair in every lane.
inline I8 splat_words8(const int16_t* pair) { return splat(load_four(pair)); }

// sum + the products of pairs. As pin(): with intrinsics alone gcc copies the sums from register to register, and some
// to memory.
inline I8 dot_words(I8 sum, I8 w, I8 x) {
#ifdef __AVXVNNI__
    sum = _mm256_dpwssd_avx_epi32(sum, w, x);
#elif defined(__AVX512VNNI__)
    sum = _mm256_dpwssd_epi32(sum, w, x);
#else
    const I8 products = _mm256_madd_epi16(w, x);
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
#endif
    return sum;
}

// The first two and the last two of each four bytes, as pairs of 16 bits.
inline I8 first_words(I8 bytes) {
    const __m128i order = _mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
    return _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)), 8);
}
inline I8 last_words(I8 bytes) {
    const __m128i order = _mm_setr_epi8(2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    return _mm256_srai_epi16(_mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(order)), 8);
}

// The nearest whole numbers, at most 32,767 in magnitude.
inline void store16_words(int16_t* to, F8 a, F8 b) {
    const __m256i packed = _mm256_packs_epi32(nearest(a), nearest(b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Whole numbers of 0 to 255, the nearest; NaN and what is too large: any.
inline void store32_bytes(uint8_t* to, const F8 (&v)[4]) {
    const __m256i first = _mm256_packs_epi32(nearest(v[0]), nearest(v[1]));
    const __m256i last = _mm256_packs_epi32(nearest(v[2]), nearest(v[3]));
    // The packs leave four of each vector, twice.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store32(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, last), order));
}

// As assembly, since compilers take loops of fetches away, and functions that do nothing else.
inline void prefetch(const void* at) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(at))); }
inline void prefetch_to_level2(const void* at) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(at))); }

// ---- products of bytes ----

#ifdef __AVXVNNI__
#define GPT_FAST_DPBUSD _mm256_dpbusd_avx_epi32
#elif defined(__AVX512VNNI__)
#define GPT_FAST_DPBUSD _mm256_dpbusd_epi32
#elif !defined(GPT_FAST_DPBUSD)  // tests may define it, as a formula
#define GPT_FAST_PAIRED_DOTS
#endif

// Sums of products of four neighbours, int8 each and at most 127 in magnitude: begun, added to with dot(), then read.
// One side of the instructions is unsigned: 128 is added to each weight, and `offset`, -128 times the sum of all x to
// come, takes that off. VNNI adds up in 32 bits. Without it two products are added in 16 bits, so with weights up to 255
// x[2 i] + x[2 i + 1] may be 128 in magnitude at most. (Any x would do with signs that are moved from the weights to x
// first; but that instruction, too, runs on the two units that multiply, which then take half as long again.)
constexpr int32_t kRaisedTotal = -128;
inline I8 begin_dots(int32_t offset) { return splat(offset); }
inline I8 raise(I8 w) { return w ^ _mm256_set1_epi8(-128); }
inline I8 dot_raised(I8 sum, I8 raised, I8 x) {
#ifdef GPT_FAST_DPBUSD
    sum = GPT_FAST_DPBUSD(sum, raised, x);
#else
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(raised, x), _mm256_set1_epi16(1)));
#endif
    pin(sum);
    return sum;
}
inline I8 dot(I8 sum, I8 w, I8 x) { return dot_raised(sum, raise(w), x); }

#ifdef GPT_FAST_PAIRED_DOTS
// x[2 i] + x[2 i + 1] in both their places.
inline F8 pair_sums(F8 x) { return x + _mm256_permute_ps(x, 0xb1); }
#endif

inline I8 low_nibbles(I8 v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline I8 high_nibbles(I8 v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }

// Sums of products of nibbles (0 to 15) with int8: added to at most eight times, then read.
inline I8 add_nibbles(I8 sums, I8 nibbles, I8 x) {
#ifdef GPT_FAST_DPBUSD
    sums = GPT_FAST_DPBUSD(sums, nibbles, x);
#else
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, x));  // 16 products of 15 * 127 fit 16 bits
#endif
    pin(sums);
    return sums;
}

#ifdef GPT_FAST_PAIRED_DOTS
// The instruction that joins both halves of a sum multiplies them as well, by scales that stand in both halves.
inline I8 nibble_scales8(const uint8_t* p) {
    const I8 scales = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return scales | shift_left<16>(scales);
}
inline F8 scaled_nibbles(I8 sums, I8 scales) { return to_floats(_mm256_madd_epi16(sums, scales)); }
#endif

}  // namespace gpt_fast
