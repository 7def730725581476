// simd.h in 64-bit NEON: two registers for each vector; products of bytes by the dot product instructions of Armv8.2
// where the compiler may use them.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace gpt_fast {

struct F8 {
    float32x4_t a, b;
};
struct I8 {
    int32x4_t a, b;
};

// ---- float32 ----

inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }

inline F8 splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store8(float* p, F8 v) { vst1q_f32(p, v.a), vst1q_f32(p + 4, v.b); }
inline F8 plus_product(F8 sum, F8 x, F8 y) { return {vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b)}; }
inline F8 minus_product(F8 sum, F8 x, F8 y) { return {vfmsq_f32(sum.a, x.a, y.a), vfmsq_f32(sum.b, x.b, y.b)}; }
inline F8 magnitude(F8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F8 negative(F8 x) { return {vnegq_f32(x.a), vnegq_f32(x.b)}; }

// Masks: all bits of a lane, or none.
inline F8 of_masks(uint32x4_t a, uint32x4_t b) { return {vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b)}; }
inline F8 less(F8 x, F8 y) { return of_masks(vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b)); }
inline F8 is_nan(F8 x) { return of_masks(vmvnq_u32(vceqq_f32(x.a, x.a)), vmvnq_u32(vceqq_f32(x.b, x.b))); }
inline F8 choose(F8 mask, F8 yes, F8 no) {
    return {vbslq_f32(vreinterpretq_u32_f32(mask.a), yes.a, no.a),
            vbslq_f32(vreinterpretq_u32_f32(mask.b), yes.b, no.b)};
}
// As AVX: the second where either is NaN.
inline F8 larger(F8 x, F8 y) { return choose(less(y, x), x, y); }
inline F8 smaller(F8 x, F8 y) { return choose(less(x, y), x, y); }

inline float first_lane(F8 v) { return vgetq_lane_f32(v.a, 0); }

inline float lane_sum(F8 v) {
    const float32x4_t s = vaddq_f32(v.a, v.b);
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}

inline float lane_max(F8 v) {
    const float32x4_t s = vmaxq_f32(v.a, v.b);
    const float32x2_t t = vmax_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(vpmax_f32(t, t), 0);
}

// All lanes of each of eight joined by `by`.
template <class By>
inline F8 join_lanes(const F8 (&v)[8], By by) {
    F8 four[2];
    for (int i = 0; i < 2; ++i) {
        const F8* w = v + 4 * i;
        auto zip = [](F8 x, F8 y) { return F8{vzip1q_f32(x.a, y.a), vzip1q_f32(x.b, y.b)}; };
        auto zip_upper = [](F8 x, F8 y) { return F8{vzip2q_f32(x.a, y.a), vzip2q_f32(x.b, y.b)}; };
        const F8 s = by(zip(w[0], w[1]), zip_upper(w[0], w[1])), t = by(zip(w[2], w[3]), zip_upper(w[2], w[3]));
        auto lower = [](float32x4_t x, float32x4_t y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); };
        auto upper = [](float32x4_t x, float32x4_t y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); };
        four[i] = by(F8{lower(s.a, t.a), lower(s.b, t.b)}, F8{upper(s.a, t.a), upper(s.b, t.b)});
    }
    return by(F8{four[0].a, four[1].a}, F8{four[0].b, four[1].b});
}

// ---- conversions ----

inline F8 as_floats(I8 bits) { return {vreinterpretq_f32_s32(bits.a), vreinterpretq_f32_s32(bits.b)}; }
inline I8 as_ints(F8 bits) { return {vreinterpretq_s32_f32(bits.a), vreinterpretq_s32_f32(bits.b)}; }
inline F8 to_floats(I8 v) { return {vcvtq_f32_s32(v.a), vcvtq_f32_s32(v.b)}; }
inline I8 nearest(F8 v) { return {vcvtnq_s32_f32(v.a), vcvtnq_s32_f32(v.b)}; }  // ties to even; NaN: 0

inline F8 load8_bfloat16(const uint16_t* p) {
    const uint16x8_t v = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
}

inline F8 load8_uint8(const uint8_t* p) {
    const uint16x8_t v = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(v))), vcvtq_f32_u32(vmovl_high_u16(v))};
}

// 32 values of at most 127 in magnitude.
inline void store_int8(int8_t* p, const I8* q) {
    for (int i = 0; i < 4; ++i) vst1_s8(p + 8 * i, vmovn_s16(vcombine_s16(vmovn_s32(q[i].a), vmovn_s32(q[i].b))));
}

// ---- integers ----

inline I8 operator&(I8 x, I8 y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
inline I8 operator|(I8 x, I8 y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)}; }
inline I8 splat(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline I8 load32(const uint8_t* p) {
    return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
}
inline void store32(uint8_t* p, I8 v) {
    vst1q_u8(p, vreinterpretq_u8_s32(v.a)), vst1q_u8(p + 16, vreinterpretq_u8_s32(v.b));
}
inline I8 add(I8 x, I8 y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
inline I8 larger(I8 x, I8 y) { return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b)}; }
template <int N>
inline I8 shift_left(I8 v) {
    return {vshlq_n_s32(v.a, N), vshlq_n_s32(v.b, N)};
}
template <int N>
inline I8 shift_right(I8 v) {  // zeros come in
    return {vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v.a), N)),
            vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v.b), N))};
}
inline I8 exclusive_or(I8 x, I8 y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b)}; }
inline I8 multiply(I8 x, I8 y) { return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b)}; }  // the lower 32 bits
inline bool any(I8 v) { return vmaxvq_u32(vreinterpretq_u32_s32(vorrq_s32(v.a, v.b))) != 0; }

inline int32_t lane_sum(I8 v) { return vaddvq_s32(vaddq_s32(v.a, v.b)); }
inline int32_t lane_max(I8 v) { return vmaxvq_s32(vmaxq_s32(v.a, v.b)); }

// ---- products of pairs of 16 bits ----

// Eight pairs: a has the first of each, b the second.
inline I8 of_words(int16x8_t a, int16x8_t b) { return {vreinterpretq_s32_s16(a), vreinterpretq_s32_s16(b)}; }

// The same pair in every lane.
inline I8 splat_words8(const int16_t* pair) { return of_words(vdupq_n_s16(pair[0]), vdupq_n_s16(pair[1])); }

// sum + the products of pairs.
inline I8 dot_words(I8 sum, I8 w, I8 x) {
    const int16x8_t w0 = vreinterpretq_s16_s32(w.a), w1 = vreinterpretq_s16_s32(w.b);
    const int16x8_t x0 = vreinterpretq_s16_s32(x.a), x1 = vreinterpretq_s16_s32(x.b);
    sum.a = vmlal_s16(vmlal_s16(sum.a, vget_low_s16(w0), vget_low_s16(x0)), vget_low_s16(w1), vget_low_s16(x1));
    sum.b = vmlal_high_s16(vmlal_high_s16(sum.b, w0, x0), w1, x1);
    return sum;
}

// The first two and the last two of each four bytes, as pairs of 16 bits.
inline I8 first_words(I8 bytes) {
    const int8x16_t even = vuzp1q_s8(vreinterpretq_s8_s32(bytes.a), vreinterpretq_s8_s32(bytes.b));
    const int8x16_t odd = vuzp2q_s8(vreinterpretq_s8_s32(bytes.a), vreinterpretq_s8_s32(bytes.b));
    return of_words(vmovl_s8(vget_low_s8(vuzp1q_s8(even, even))), vmovl_s8(vget_low_s8(vuzp1q_s8(odd, odd))));
}
inline I8 last_words(I8 bytes) {
    const int8x16_t even = vuzp1q_s8(vreinterpretq_s8_s32(bytes.a), vreinterpretq_s8_s32(bytes.b));
    const int8x16_t odd = vuzp2q_s8(vreinterpretq_s8_s32(bytes.a), vreinterpretq_s8_s32(bytes.b));
    return of_words(vmovl_s8(vget_low_s8(vuzp2q_s8(even, even))), vmovl_s8(vget_low_s8(vuzp2q_s8(odd, odd))));
}

// Fetches, as assembly for the reason that simd_avx2.h has.
inline void prefetch(const void* at) { asm volatile("prfm pldl1keep, %0" : : "Q"(*static_cast<const char*>(at))); }
inline void prefetch_to_level2(const void* at) {
    asm volatile("prfm pldl2keep, %0" : : "Q"(*static_cast<const char*>(at)));
}

// The nearest whole numbers, at most 32,767 in magnitude.
inline void store16_words(int16_t* to, F8 x, F8 y) {
    const I8 first = nearest(x), second = nearest(y);
    vst1q_s16(to, vcombine_s16(vqmovn_s32(first.a), vqmovn_s32(first.b)));
    vst1q_s16(to + 8, vcombine_s16(vqmovn_s32(second.a), vqmovn_s32(second.b)));
}

// ---- products of bytes ----

inline int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, x);
#else
    const int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(x)), second = vmull_high_s8(w, x);
    return vpadalq_s16(sum, vpaddq_s16(first, second));  // two products of at most 127 * 127 fit 16 bits
#endif
}

// Sums of products of four neighbours, int8 each and at most 127 in magnitude: begun, added to with dot(), then read.
constexpr int32_t kRaisedTotal = 0;
inline I8 begin_dots(int32_t) { return splat(0); }
inline I8 dot(I8 sum, I8 w, I8 x) {
    return {dot(sum.a, vreinterpretq_s8_s32(w.a), vreinterpretq_s8_s32(x.a)),
            dot(sum.b, vreinterpretq_s8_s32(w.b), vreinterpretq_s8_s32(x.b))};
}
inline I8 raise(I8 w) { return exclusive_or(w, splat(static_cast<int32_t>(0x80808080u))); }
inline I8 dot_raised(I8 sum, I8 raised, I8 x) { return dot(sum, raise(raised), x); }

inline I8 low_nibbles(I8 v) { return v & splat(0x0f0f0f0f); }
inline I8 high_nibbles(I8 v) {
    return {vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(v.a), 4)),
            vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(v.b), 4))};
}

// Sums of products of nibbles (0 to 15) with int8: added to at most eight times, then read.
inline I8 add_nibbles(I8 sums, I8 nibbles, I8 x) { return dot(sums, nibbles, x); }

}  // namespace gpt_fast
