// Functions of single numbers, eight at a time: activations and caps. All float32.
#pragma once

#include "common.h"

namespace gpt_fast {

enum ActivationId : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kClampedSwiglu };

// tanh by e^2x; for |x| above 9 it is 1 to float32.
inline F8 tanh8(F8 x) {
    const F8 bounded = larger(smaller(x, splat(9.0f)), splat(-9.0f));
    const F8 e = exp8(bounded + bounded);
    return choose(is_nan(x), x, (e - splat(1.0f)) / (e + splat(1.0f)));
}

inline F8 sigmoid8(F8 x) { return splat(1.0f) / (splat(1.0f) + exp8(negative(x))); }

// Abramowitz and Stegun 1964, 7.1.26: within 1.5e-7.
inline F8 erf8(F8 x) {
    const F8 size = magnitude(x), t = splat(1.0f) / plus_product(splat(1.0f), splat(0.3275911f), size);
    F8 sum = splat(1.061405429f);
    sum = plus_product(splat(-1.453152027f), sum, t);
    sum = plus_product(splat(1.421413741f), sum, t);
    sum = plus_product(splat(-0.284496736f), sum, t);
    sum = plus_product(splat(0.254829592f), sum, t);
    const F8 value = splat(1.0f) - sum * t * exp8(negative(size * size));
    return choose(less(x, splat(0.0f)), negative(value), value);
}

template <int64_t kKind>
inline F8 activate8(F8 x, F8 up) {
    if constexpr (kKind == kSilu) return x / (splat(1.0f) + exp8(negative(x))) * up;
    if constexpr (kKind == kGelu) return splat(0.5f) * x * (splat(1.0f) + erf8(x * splat(0.70710678f))) * up;
    if constexpr (kKind == kGeluTanh) {
        const F8 inner = splat(0.79788456f) * plus_product(x, splat(0.044715f) * x * x, x);
        return splat(0.5f) * x * (splat(1.0f) + tanh8(inner)) * up;
    }
    if constexpr (kKind == kRelu) return choose(is_nan(x), x, larger(x, splat(0.0f))) * up;
    if constexpr (kKind == kClampedSwiglu) {
        const F8 gate = choose(is_nan(x), x, smaller(x, splat(7.0f)));
        const F8 bounded = choose(is_nan(up), up, larger(smaller(up, splat(7.0f)), splat(-7.0f)));
        return gate * sigmoid8(gate * splat(1.702f)) * (bounded + splat(1.0f));
    }
}

// out = body(x, y), where y may be null and is 1 then; count need not be a multiple of 8.
template <class Body>
inline void by_eights(const float* x, const float* y, int64_t count, float* out, Body body) {
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t n = count - i < 8 ? count - i : 8;
        if (n == 8) {
            store8(out + i, body(load8(x + i), y ? load8(y + i) : splat(1.0f)));
            continue;
        }
        alignas(32) float a[8] = {}, b[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        std::memcpy(a, x + i, static_cast<size_t>(n) * sizeof(float));
        if (y) std::memcpy(b, y + i, static_cast<size_t>(n) * sizeof(float));
        store8(a, body(load8(a), load8(b)));
        std::memcpy(out + i, a, static_cast<size_t>(n) * sizeof(float));
    }
}

template <int64_t kKind>
inline void activate_as(const float* x, const float* up, int64_t count, float* out) {
    by_eights(x, up, count, out, [](F8 v, F8 by) { return activate8<kKind>(v, by); });
}

// out = kind(x) * up; `up` null: out = kind(x).
inline void activate(int64_t kind, const float* x, const float* up, int64_t count, float* out) {
    switch (kind) {
        case kSilu: return activate_as<kSilu>(x, up, count, out);
        case kGelu: return activate_as<kGelu>(x, up, count, out);
        case kGeluTanh: return activate_as<kGeluTanh>(x, up, count, out);
        case kRelu: return activate_as<kRelu>(x, up, count, out);
        case kClampedSwiglu: return activate_as<kClampedSwiglu>(x, up, count, out);
    }
}

// out = limit * tanh(x / limit)
inline void cap_row(const float* x, float limit, float inverse, int64_t count, float* out) {
    by_eights(x, nullptr, count, out, [=](F8 v, F8) { return splat(limit) * tanh8(v * splat(inverse)); });
}

}  // namespace gpt_fast
