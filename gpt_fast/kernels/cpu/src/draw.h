// From a row of logits to a token: temperature, min_p, top_k, top_p and the race, as engine/sampling.py says.
#pragma once

#include <algorithm>
#include <functional>

#include "race.h"

namespace gpt_fast {

struct Draw {
    double temperature;  // 0: the greatest logit wins, the first of equal ones
    int64_t top_k;       // 0: all
    double top_p, min_p;
    int64_t low, high;  // the key of the noise, 32 bits each
};

// The sum of e^(x - greatest) over the x above `limit`; `count` is a multiple of 8.
inline float mass_above(const float* x, int64_t count, float limit, float greatest) {
    F8 sum = splat(0.0f);
    for (int64_t i = 0; i < count; i += 8) {
        const F8 v = load8(x + i);
        sum = sum + choose(less(splat(limit), v), exp8(v - splat(greatest)), splat(0.0f));
    }
    return lane_sum(sum);
}

// -infinity for all x but those above `limit`, and those equal to it where `equal` says so.
inline void keep_above(float* x, int64_t count, float limit, bool equal) {
    for (int64_t i = 0; i < count; i += 8) {
        const F8 v = load8(x + i), least = splat(limit), none = splat(-INFINITY);
        store8(x + i, equal ? choose(less(v, least), none, v) : choose(less(least, v), v, none));
    }
}

inline int64_t first_equal(const float* x, int64_t count, float value) {
    for (int64_t i = 0; i < count; i += 8) {
        if (!any(as_ints(choose(less(load8(x + i), splat(value)), splat(0.0f), splat(1.0f))))) continue;
        for (int64_t j = i; j < i + 8; ++j)
            if (x[j] == value) return j;
    }
    return -1;
}

// The token that is drawn from logits [vocab]; -1 where none is finite, or one is NaN or +infinity.
inline int64_t draw_row(const float* logits, int64_t vocab, const Draw& d) {
    static thread_local Scratch scratch;
    const int64_t count = ceil_div(vocab, 8) * 8;
    float* x = scratch.get<float>(2 * count);
    std::memcpy(x, logits, static_cast<size_t>(vocab) * sizeof(float));
    for (int64_t i = vocab; i < count; ++i) x[i] = -INFINITY;
    const F8 temperature = splat(d.temperature > 0 ? static_cast<float>(d.temperature) : 1.0f);
    F8 most = splat(-INFINITY), odd = splat(0.0f);
    for (int64_t i = 0; i < count; i += 8) {
        const F8 v = load8(x + i) / temperature;
        store8(x + i, v);
        most = larger(v, most);
        odd = choose(is_nan(v), splat(1.0f), odd);
    }
    const float greatest = lane_max(most);
    if (!std::isfinite(greatest) || any(as_ints(odd))) return -1;
    if (d.temperature == 0) return first_equal(x, count, greatest);
    float least = d.min_p > 0 ? greatest + std::log(static_cast<float>(d.min_p)) : -INFINITY;
    if (d.top_k > 0 && d.top_k < vocab) {
        float* ranked = x + count;
        std::memcpy(ranked, x, static_cast<size_t>(count) * sizeof(float));
        std::nth_element(ranked, ranked + d.top_k - 1, ranked + count, std::greater<float>());
        least = std::max(least, ranked[d.top_k - 1]);
    }
    if (least > -INFINITY) keep_above(x, count, least, true);
    const bool nucleus = d.top_p < 1;
    const float limit = nucleus ? static_cast<float>(d.top_p) * mass_above(x, count, -INFINITY, greatest) : 0;
    for (;;) {
        const int64_t winner = race_row(x, count, greatest, static_cast<int32_t>(d.low), static_cast<int32_t>(d.high));
        // The likeliest token always belongs to the nucleus, even where the limit is too small for a float.
        if (!nucleus || x[winner] == greatest || mass_above(x, count, x[winner], greatest) < limit) return winner;
        // Tokens above the winner have the mass already, so neither it nor one below it belongs to the nucleus. The
        // race among the others comes out as it would have without those.
        keep_above(x, count, x[winner], false);
    }
}

// A token for each row of logits [rows, vocab].
inline void draw_rows(Team& team, const float* logits, const Draw* draws, int64_t* tokens, int64_t rows,
                      int64_t vocab) {
    team.share(rows, 1, [&](int64_t i, int64_t) { tokens[i] = draw_row(logits + i * vocab, vocab, draws[i]); });
    team.barrier();
}

}  // namespace gpt_fast
