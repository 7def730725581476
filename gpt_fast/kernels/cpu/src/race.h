// The exponential race that draws a token (engine/sampling.py says why): the token that comes in first.
//
// Token i starts with probability proportional to e^logit and takes E / e^(logit - greatest logit) to arrive, where E is
// exponentially distributed noise: a hash of the row's key and i. The first to arrive is distributed as the softmax of
// the logits is (Efraimidis & Spirakis 2006; the Gumbel-max trick is its logarithm).
#pragma once

#include <cmath>

#include "common.h"

namespace gpt_fast {

// One round of lowbias32 (Wellons 2018): a bijection of 32 bits whose output bits each depend on all input bits.
inline I8 mix(I8 x) {
    x = multiply(exclusive_or(x, shift_right<16>(x)), splat(0x7feb352d));
    x = multiply(exclusive_or(x, shift_right<15>(x)), splat(static_cast<int32_t>(0x846ca68bu)));
    return exclusive_or(x, shift_right<16>(x));
}

// ln x for x in [2^-31, 1], absolute error below 2e-7: exponent and mantissa apart, ln(1 + m) for m in
// [sqrt(1/2) - 1, sqrt(2) - 1] by Cephes' polynomial (Moshier 1989).
inline F8 log8(F8 x) {
    const I8 bits = as_ints(x);
    const F8 half = splat(0.5f), one = splat(1.0f);
    F8 exponent = to_floats(add(shift_right<23>(bits), splat(-126)));
    F8 m = as_floats((bits & splat(0x007fffff)) | splat(0x3f000000));  // [0.5, 1)
    const F8 small = less(m, splat(0.707106781186547524f));
    exponent = exponent - choose(small, one, splat(0.0f));
    m = m + choose(small, m, splat(0.0f)) - one;
    const F8 square = m * m;
    F8 p = splat(7.0376836292e-2f);
    for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                          2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = plus_product(splat(c), p, m);
    p = p * m * square;
    p = plus_product(p, exponent, splat(-2.12194440e-4f));
    p = minus_product(p, half, square);
    return plus_product(m + p, exponent, splat(0.693359375f));
}

// Exponential noise of mean 1 for eight tokens: -ln(1 - u), u = (h + 1/2) / 2^31 of 31 bits of hash.
inline F8 exponential8(I8 token, I8 low, I8 high) {
    const I8 hash = shift_right<1>(mix(exclusive_or(mix(exclusive_or(token, low)), high)));
    const F8 one = splat(1.0f);
    const F8 u = smaller((to_floats(hash) + splat(0.5f)) * splat(0x1p-31f), splat(1.0f - 0x1p-24f));
    const F8 rest = one - u;
    // Kahan's ln(1 + x): what rounding 1 - u lost is put back as a factor.
    const F8 lost = one - rest;
    return choose(less(splat(0.0f), lost), negative(log8(rest)) * u / larger(lost, splat(0x1p-60f)), u);
}

// Which of `count` tokens, a multiple of 8, arrives first. `greatest`: the greatest of their logits, finite; a logit of
// -infinity never arrives. Of equal times the lower token wins.
inline int64_t race_row(const float* logits, int64_t count, float greatest, int32_t low_key, int32_t high_key) {
    const I8 low = splat(low_key), high = splat(high_key);
    alignas(32) const int32_t first[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    I8 token = load32(reinterpret_cast<const uint8_t*>(first));
    F8 best = splat(INFINITY), winner = splat(0.0f);
    for (int64_t i = 0; i < count; i += 8, token = add(token, splat(8))) {
        const F8 chance = exp8(load8(logits + i) - splat(greatest));
        const F8 time = exponential8(token, low, high) / chance;  // chance 0: infinity
        const F8 sooner = less(time, best);
        best = choose(sooner, time, best);
        winner = choose(sooner, as_floats(token), winner);
    }
    alignas(32) float times[8];
    alignas(32) int32_t who[8];
    store8(times, best);
    store8(reinterpret_cast<float*>(who), winner);
    int found = 0;
    for (int j = 1; j < 8; ++j)
        if (times[j] < times[found] || (times[j] == times[found] && who[j] < who[found])) found = j;
    return who[found];
}

}  // namespace gpt_fast
