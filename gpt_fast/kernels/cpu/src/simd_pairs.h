// Sixteen lanes of simd.h as two vectors of eight, where registers are smaller.
#pragma once

namespace gpt_fast {

struct F16 {
    F8 a, b;
};
struct I16 {
    I8 a, b;
};

constexpr int kRegisters = 8;  // of 16 lanes
constexpr bool half_wide() { return false; }  // these are about CPUs with vectors of 512 bits (simd_avx512.h)
constexpr bool adds_beside() { return false; }
constexpr bool one_stream() { return false; }

inline F16 operator*(F16 x, F16 y) { return {x.a * y.a, x.b * y.b}; }
inline F16 operator+(F16 x, F16 y) { return {x.a + y.a, x.b + y.b}; }
inline F16 operator-(F16 x, F16 y) { return {x.a - y.a, x.b - y.b}; }
inline F16 larger(F16 x, F16 y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
inline F16 smaller(F16 x, F16 y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
inline float lane_sum(F16 v) { return lane_sum(v.a + v.b); }
inline F16 splat16(float x) { return {splat(x), splat(x)}; }
inline F16 load16(const float* p) { return {load8(p), load8(p + 8)}; }
inline void store16(float* p, F16 v) { store8(p, v.a), store8(p + 8, v.b); }
inline F16 plus_product(F16 sum, F16 x, F16 y) {
    return {plus_product(sum.a, x.a, y.a), plus_product(sum.b, x.b, y.b)};
}
inline F16 minus_product(F16 sum, F16 x, F16 y) {
    return {minus_product(sum.a, x.a, y.a), minus_product(sum.b, x.b, y.b)};
}
inline F8 lower(F16 v) { return v.a; }
inline F8 upper(F16 v) { return v.b; }
inline F16 join(F8 x, F8 y) { return {x, y}; }
inline F16 to_floats(I16 v) { return {to_floats(v.a), to_floats(v.b)}; }
inline F16 as_floats(I16 bits) { return {as_floats(bits.a), as_floats(bits.b)}; }
inline I16 as_ints(F16 bits) { return {as_ints(bits.a), as_ints(bits.b)}; }
inline I16 operator|(I16 x, I16 y) { return {x.a | y.a, x.b | y.b}; }
inline I16 plus(I16 x, I16 y) { return {add(x.a, y.a), add(x.b, y.b)}; }
inline I16 times(I16 x, I16 y) { return {multiply(x.a, y.a), multiply(x.b, y.b)}; }
template <int bits>
inline I16 shift_left(I16 v) {
    return {shift_left<bits>(v.a), shift_left<bits>(v.b)};
}
inline F16 load16_uint8(const uint8_t* p) { return {load8_uint8(p), load8_uint8(p + 8)}; }

inline I16 splat16(int32_t x) { return {splat(x), splat(x)}; }
inline I16 load64(const uint8_t* p) { return {load32(p), load32(p + 32)}; }
inline void store64(uint8_t* p, I16 v) { store32(p, v.a), store32(p + 32, v.b); }
inline I16 splat_words(const int16_t* pair) {
    const I8 both = splat_words8(pair);
    return {both, both};
}
inline I16 dot_words(I16 sum, I16 w, I16 x) { return {dot_words(sum.a, w.a, x.a), dot_words(sum.b, w.b, x.b)}; }
inline void store16_words(int16_t* to, F16 v) { store16_words(to, v.a, v.b); }
inline I16 begin_dots16(int32_t offset) { return {begin_dots(offset), begin_dots(offset)}; }
inline I16 dot_raised(I16 sum, I16 raised, I16 x) {
    return {dot_raised(sum.a, raised.a, x.a), dot_raised(sum.b, raised.b, x.b)};
}
inline I16 dot_raised_four(I16 sum, I16 raised, const int8_t* x) { return dot_raised(sum, raised, splat16(load_four(x))); }
#ifdef GPT_FAST_DPBUSD
inline void store_bytes(uint8_t* to, const F16 (&v)[2]) { store32_bytes(to, {v[0].a, v[0].b, v[1].a, v[1].b}); }
#endif
inline I16 dot(I16 sum, I16 w, I16 x) { return {dot(sum.a, w.a, x.a), dot(sum.b, w.b, x.b)}; }
inline I16 low_nibbles(I16 v) { return {low_nibbles(v.a), low_nibbles(v.b)}; }
inline I16 high_nibbles(I16 v) { return {high_nibbles(v.a), high_nibbles(v.b)}; }
inline I16 add_nibbles(I16 sums, I16 nibbles, I16 x) {
    return {add_nibbles(sums.a, nibbles.a, x.a), add_nibbles(sums.b, nibbles.b, x.b)};
}

}  // namespace gpt_fast
