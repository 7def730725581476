// Sixteen lanes of simd.h in one register of AVX-512, products of bytes by its VNNI. simd_avx2.h has the reasons.
#pragma once

#include <cpuid.h>
#include <immintrin.h>

namespace gpt_fast {

// Of AMD's CPUs the family, else 0.
inline unsigned amd_family() {
    static const unsigned family = [] {
        unsigned a, b, c, d;
        if (!__get_cpuid(0, &a, &b, &c, &d) || c != signature_AMD_ecx || !__get_cpuid(1, &a, &b, &c, &d)) return 0u;
        return (a >> 8 & 15) + (a >> 20 & 255);
    }();
    return family;
}

// Whether the CPU takes two turns for 512 bits, as AMD's family 25 does (Zen 4).
inline bool half_wide() { return amd_family() == 25; }

// Whether it adds and shifts 512 bits by other units than those that multiply, as family 26 does (Zen 5).
inline bool adds_beside() { return amd_family() == 26; }

// Whether memory is read fastest from one place, as Zen 4 and 5 do it; Intel's CPUs read two faster.
inline bool one_stream() { return amd_family() != 0; }

using F16 = __m512;
using I16 = __m512i;

constexpr int kRegisters = 32;  // of 16 lanes

inline F16 splat16(float x) { return _mm512_set1_ps(x); }
inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline void store16(float* p, F16 v) { _mm512_storeu_ps(p, v); }
inline F16 plus_product(F16 sum, F16 a, F16 b) { return _mm512_fmadd_ps(a, b, sum); }
inline F16 minus_product(F16 sum, F16 a, F16 b) { return _mm512_fnmadd_ps(a, b, sum); }
inline F16 to_floats(I16 v) { return _mm512_cvtepi32_ps(v); }
inline F16 as_floats(I16 bits) { return _mm512_castsi512_ps(bits); }
inline I16 as_ints(F16 bits) { return _mm512_castps_si512(bits); }
inline F16 larger(F16 x, F16 y) { return _mm512_max_ps(x, y); }
inline F16 smaller(F16 x, F16 y) { return _mm512_min_ps(x, y); }
inline __mmask16 less(F16 x, F16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
inline F16 choose(__mmask16 mask, F16 yes, F16 no) { return _mm512_mask_blend_ps(mask, no, yes); }
inline F16 power_of_low_bits(F16 v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23)); }

// x to the nearest whole number n, which is returned, and the rest in x. Then 2^n x.
inline F16 take_whole(F16& x) {
    const F16 whole = _mm512_roundscale_ps(x, 0);
    x = x - whole;
    return whole;
}
// Of -infinity the rest is NaN; the instruction makes 0 of such an x and n.
inline F16 times_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }

inline F8 lower(F16 v) { return _mm512_castps512_ps256(v); }
inline F8 upper(F16 v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
inline F16 join(F8 x, F8 y) {
    const __m512d lower_half = _mm512_castps_pd(_mm512_castps256_ps512(x));
    return _mm512_castpd_ps(_mm512_insertf64x4(lower_half, _mm256_castps_pd(y), 1));
}
inline float lane_sum(F16 v) { return lane_sum(lower(v) + upper(v)); }
inline I16 load16_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F16 load16_uint8(const uint8_t* p) { return to_floats(load16_bytes(p)); }

inline I16 splat16(int32_t x) { return _mm512_set1_epi32(x); }
inline I16 load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store64(uint8_t* p, I16 v) { _mm512_storeu_si512(p, v); }
inline I16 raise(I16 w) { return w ^ _mm512_set1_epi8(-128); }

// bfloat16 is the upper half of a float32; two stand side by side.
inline F16 low_bfloat16(I16 pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline F16 high_bfloat16(I16 pairs) { return _mm512_castsi512_ps(pairs & _mm512_set1_epi32(-65536)); }

inline bool any_bit(I16 v, int32_t bits) { return _mm512_test_epi32_mask(v, splat16(bits)) != 0; }
#ifdef __AVX512VBMI__
// The formula of simd.h.
inline I16 powers(F16 x, F16 y) {
    const I16 begin = _mm512_set1_epi32(kWholeBits), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const I16 first = _mm512_sub_epi32(as_ints(x), begin), last = _mm512_sub_epi32(as_ints(y), begin);
    const I16 steps = _mm512_permutexvar_epi64(order, _mm512_packus_epi32(first, last));
    const I16 low = _mm512_load_si512(kBelowLine.all), high = _mm512_load_si512(kBelowLine.all + 64);
    return _mm512_sub_epi16(steps, _mm512_maskz_permutex2var_epi8(0x5555555555555555, low, steps, high));
}
#endif

#ifdef __AVX512BF16__
#define GPT_FAST_BFLOAT16_DOTS
inline F16 bfloat16_dot(F16 sum, I16 w, I16 x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

inline void store16_bfloat16(uint16_t* to, F16 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
}

// kBesideByte and a byte of each lane.
inline F16 beside_byte(I16 fours, int number) {
    const I16 order = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x400, 0x800, 0xc00));
    const I16 from = _mm512_add_epi32(order, splat16(number << 8)), to = as_ints(splat16(kBesideByte));
    return as_floats(_mm512_mask_shuffle_epi8(to, 0x2222222222222222, fours, from));
}
// Four bytes, 128 raised, of each of sixteen lanes as pairs of bfloat16: the first two, and the last two.
inline void pairs_of_raised_bytes(const uint8_t* from, uint16_t* first, uint16_t* second) {
    const I16 fours = load64(from);
    auto widen = [&](int number) { return as_ints(beside_byte(fours, number) - splat16(kBesideByte + 128)); };
    auto pair = [&](I16 low, I16 high) { return _mm512_srli_epi32(low, 16) | high; };
    _mm512_storeu_si512(first, pair(widen(0), widen(1)));
    _mm512_storeu_si512(second, pair(widen(2), widen(3)));
}
// The same with bytes that are not raised, each times its scale, rounded to nearest.
class ScaledBytes {
public:
    explicit ScaledBytes(const float* scales) {
        for (int i = 0; i < 4; ++i) {
            const float scale = short_scale(scales[i]);
            scale_[i] = splat16(scale), zero_[i] = splat16(scale * -(kBesideByte + 128));
        }
    }

    void to_pairs(const uint8_t* from, uint16_t* first, uint16_t* second) const {
        const I16 fours = raise(load64(from));
        auto scaled = [&](int number) {
            const F16 x = plus_product(zero_[number], beside_byte(fours, number), scale_[number]);
            return _mm512_add_epi32(as_ints(x), splat16(0x8000));
        };
        auto pair = [&](I16 low, I16 high) {
            return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
        };
        _mm512_storeu_si512(first, pair(scaled(0), scaled(1)));
        _mm512_storeu_si512(second, pair(scaled(2), scaled(3)));
    }

private:
    F16 scale_[4], zero_[4];
};
#endif

inline void pin(I16& sum) { asm("" : "+v"(sum)); }
inline I16 splat_words(const int16_t* pair) { return splat16(load_four(pair)); }
inline I16 dot_words(I16 sum, I16 w, I16 x) {
    sum = _mm512_dpwssd_epi32(sum, w, x);
    pin(sum);
    return sum;
}
inline void store16_words(int16_t* to, F16 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
}
// Whole numbers of 0 to 255, the nearest; NaN and what is too large: any.
inline void store_bytes(uint8_t* to, const F16 (&v)[4]) {
    const I16 first = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
    const I16 last = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
    // The packs leave four of each vector, four times.
    const I16 order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, last)));
}
inline I16 begin_dots16(int32_t offset) { return splat16(offset); }
inline I16 dot_raised(I16 sum, I16 raised, I16 x) {
    sum = _mm512_dpbusd_epi32(sum, raised, x);
    pin(sum);
    return sum;
}
// With four bytes of x for all lanes, which the instruction reads itself; gcc 12 takes another one for that.
inline I16 dot_raised_four(I16 sum, I16 raised, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(raised), "m"(*reinterpret_cast<const int8_t(*)[4]>(x)));
    return sum;
}
inline I16 dot(I16 sum, I16 w, I16 x) { return dot_raised(sum, raise(w), x); }

inline I16 low_nibbles(I16 v) { return v & _mm512_set1_epi8(15); }
// By a matrix of bits. Less 8, as int8: the upper five bits are the nibble's highest, turned.
#ifdef __GFNI__
inline I16 high_nibbles(I16 v) { return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x1020408000000000), 0); }
inline I16 low_nibbles_less8(I16 v) {
    return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x0102040808080808), 0xf8);
}
inline I16 high_nibbles_less8(I16 v) {
    return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x1020408080808080), 0xf8);
}
#else
inline I16 high_nibbles(I16 v) { return _mm512_srli_epi16(v, 4) & _mm512_set1_epi8(15); }
inline I16 low_nibbles_less8(I16 v) { return _mm512_sub_epi8(low_nibbles(v), _mm512_set1_epi8(8)); }
inline I16 high_nibbles_less8(I16 v) { return _mm512_sub_epi8(high_nibbles(v), _mm512_set1_epi8(8)); }
#endif
inline I16 lower_words(I16 v) { return v & splat16(0xffff); }
inline I16 add_nibbles(I16 sums, I16 nibbles, I16 x) { return dot_raised(sums, nibbles, x); }

inline I16 larger(I16 x, I16 y) { return _mm512_max_epi32(x, y); }
inline bool any_above(I16 v, int32_t most) { return _mm512_cmpgt_epi32_mask(v, splat16(most)) != 0; }
inline I16 plus(I16 x, I16 y) { return _mm512_add_epi32(x, y); }
inline I16 minus(I16 x, I16 y) { return _mm512_sub_epi32(x, y); }
inline I16 times(I16 x, I16 y) { return _mm512_mullo_epi32(x, y); }
template <int bits>
inline I16 shift_left(I16 x) {
    return _mm512_slli_epi32(x, bits);
}

// Of the sixteen groups of int4 that a tile has at one k.
class Int4Grid {
public:
    // Zeros of at most 128, so that 16 bits hold everything.
    Int4Grid(const uint8_t* scales, const uint8_t* zeros) {
        const I16 scale = load16_bytes(scales), both = _mm512_or_si512(scale, _mm512_slli_epi32(scale, 16));
        const I16 zero = load16_bytes(zeros), shift = _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16));
        step_ = _mm512_slli_epi16(both, 3);
        begin_ = _mm512_sub_epi16(_mm512_set1_epi16(128), _mm512_mullo_epi16(both, shift));
    }

    // (8 q - zero) * scale = 256 * high + low, both int8, of four codes for each group.
    void split(I16 q, uint8_t* high, uint8_t* low) const {
        const I16 bytes = _mm512_set1_epi16(255);
        const I16 even = _mm512_add_epi16(_mm512_mullo_epi16(q & bytes, step_), begin_);  // and 128 more
        const I16 odd = _mm512_add_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(q, 8), step_), begin_);
        _mm512_storeu_si512(high, _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srli_epi16(even, 8), odd));
        const I16 rest = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, _mm512_slli_epi16(odd, 8));
        _mm512_storeu_si512(low, rest ^ _mm512_set1_epi8(-128));
    }

private:
    I16 step_, begin_;
};

}  // namespace gpt_fast
