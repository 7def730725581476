// The exponential race that draws a token (engine/sampling.py says why): of each row the token that comes in first.
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

// The token of each row of `logits` [rows, vocab] that arrives first; -1 where no logit is finite, or one is NaN or
// +infinity. keys [rows, 2]: the rows' keys. Of equal times the lower token wins.
inline void race(Team& team, const float* logits, const int32_t* keys, int64_t* tokens, int64_t rows, int64_t vocab) {
    team.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* row = logits + r * vocab;
            const int64_t whole = vocab / 8 * 8;
            alignas(32) float tail[8];
            for (int j = 0; j < 8; ++j) tail[j] = whole + j < vocab ? row[whole + j] : -INFINITY;
            F8 most = load8(tail), sum = splat(0.0f);
            for (int64_t i = 0; i < whole; i += 8) {
                const F8 x = load8(row + i);
                most = larger(x, most);
                sum = choose(is_nan(x), x, sum);
            }
            const float greatest = lane_max(most);
            alignas(32) float lanes[8];
            store8(lanes, choose(is_nan(load8(tail)), load8(tail), sum));
            bool sound = std::isfinite(greatest);
            for (const float lane : lanes) sound = sound && lane == lane;
            tokens[r] = -1;
            if (!sound) continue;
            const I8 low = splat(keys[2 * r]), high = splat(keys[2 * r + 1]);
            alignas(32) const int32_t first[8] = {0, 1, 2, 3, 4, 5, 6, 7};
            I8 token = load32(reinterpret_cast<const uint8_t*>(first));
            F8 best = splat(INFINITY), winner = splat(0.0f);
            for (int64_t i = 0; i <= whole; i += 8, token = add(token, splat(8))) {
                const F8 x = i < whole ? load8(row + i) : load8(tail);
                const F8 chance = exp8(x - splat(greatest));
                const F8 time = exponential8(token, low, high) / chance;  // chance 0: infinity
                const F8 sooner = less(time, best);
                best = choose(sooner, time, best);
                winner = choose(sooner, as_floats(token), winner);
            }
            alignas(32) int32_t who[8];
            store8(lanes, best);
            store8(reinterpret_cast<float*>(who), winner);
            int found = 0;
            for (int j = 1; j < 8; ++j)
                if (lanes[j] < lanes[found] || (lanes[j] == lanes[found] && who[j] < who[found])) found = j;
            tokens[r] = who[found];
        }
    });
}

}  // namespace gpt_fast
