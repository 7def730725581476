// Sixteen lanes of simd.h in one register of AVX-512, products of bytes by its VNNI. simd_avx2.h has the reasons.
#pragma once

#include <immintrin.h>

namespace gpt_fast {

using F16 = __m512;
using I16 = __m512i;

constexpr int kRegisters = 32;  // of 16 lanes

inline F16 splat16(float x) { return _mm512_set1_ps(x); }
inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline void store16(float* p, F16 v) { _mm512_storeu_ps(p, v); }
inline F16 plus_product(F16 sum, F16 a, F16 b) { return _mm512_fmadd_ps(a, b, sum); }
inline F16 minus_product(F16 sum, F16 a, F16 b) { return _mm512_fnmadd_ps(a, b, sum); }
inline F16 to_floats(I16 v) { return _mm512_cvtepi32_ps(v); }
inline F16 load16_uint8(const uint8_t* p) {
    return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline I16 splat16(int32_t x) { return _mm512_set1_epi32(x); }
inline I16 load64(const uint8_t* p) { return _mm512_loadu_si512(p); }

// bfloat16 is the upper half of a float32; two stand side by side.
inline F16 low_bfloat16(I16 pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline F16 high_bfloat16(I16 pairs) { return _mm512_castsi512_ps(pairs & _mm512_set1_epi32(-65536)); }

#ifdef __AVX512BF16__
#define GPT_FAST_BFLOAT16_DOTS
inline F16 bfloat16_dot(F16 sum, I16 w, I16 x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}
#endif

inline void pin(I16& sum) { asm("" : "+v"(sum)); }
inline I16 begin_dots16(int32_t offset) { return splat16(offset); }
inline I16 dot(I16 sum, I16 w, I16 x) {
    sum = _mm512_dpbusd_epi32(sum, w ^ _mm512_set1_epi8(-128), x);
    pin(sum);
    return sum;
}

inline I16 low_nibbles(I16 v) { return v & _mm512_set1_epi8(15); }
inline I16 high_nibbles(I16 v) { return _mm512_srli_epi16(v, 4) & _mm512_set1_epi8(15); }
inline I16 add_nibbles(I16 sums, I16 nibbles, I16 x) {
    sums = _mm512_dpbusd_epi32(sums, nibbles, x);
    pin(sums);
    return sums;
}
inline I16 nibble_sums(I16 sums) { return sums; }

}  // namespace gpt_fast
