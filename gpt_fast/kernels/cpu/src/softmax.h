// The running softmax of attention's queries (Milakov & Gimelshein 2018, arXiv 1805.02867), one block of keys at a
// time.
#pragma once

#include <algorithm>

#include "elementwise.h"

namespace gpt_fast {

constexpr int64_t kKeys = 32;  // of a block, where its Keys (attention_block.h) have no other number

// Running softmax of one query head: sum of values weighted by e^(score - max), sums of the weights of keys that are 16
// apart, max.
struct Partial {
    float* value;  // [D]
    float* sums;   // [16]
    float* max;
};

// Partials lie side by side, each of whole lines of the cache: D values, then sums and max. D is the cache's, rounded
// up to a multiple of 16.
inline int64_t state_dim_of(int64_t head_dim) { return ceil_div(head_dim, 16) * 16; }
inline int64_t state_floats(int64_t dim) { return dim + 32; }
inline Partial partial(float* state, int64_t dim) { return {state, state + dim, state + dim + 16}; }

inline void clear(const Partial& p, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) p.value[d] = 0.0f;
    store16(p.sums, splat16(0.0f));
    *p.max = -__builtin_inff();
}

inline float sum_of(const Partial& p) { return lane_sum(load16(p.sums)); }

inline float exp_one(float x) { return first_lane(exp8(splat(x))); }

// into = into and then other.
inline void merge(const Partial& into, const Partial& other, int64_t dim) {
    if (*other.max == -__builtin_inff() && sum_of(other) == 0.0f) return;
    // A NaN on either side must survive.
    const float top = *into.max > *other.max ? *into.max : *other.max;
    const float keep = exp_one(*into.max - top), add = exp_one(*other.max - top);
    for (int64_t d = 0; d < dim; ++d) into.value[d] = into.value[d] * keep + other.value[d] * add;
    store16(into.sums, plus_product(load16(into.sums) * splat16(keep), load16(other.sums), splat16(add)));
    *into.max = top;
}

inline void merge_states(float* into, float* other, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count; ++i, into += state_floats(dim), other += state_floats(dim))
        merge(partial(into, dim), partial(other, dim), dim);
}

// How much larger a score may be than the one that exponentials are taken relative to: e^8 costs no precision, and what
// was summed up needs no other scale then.
constexpr float kHeadroom = 8.0f;

constexpr int kExpVectors = kRegisters < 32 ? 2 : 4;  // whose exponentials are made together

// Scores of one block of N keys to weights, in place, for R queries; their sums and what they are relative to into
// `states`, and into `kept` what the earlier values are to be multiplied with. All largest scores first: then the
// exponentials of all queries wait for nothing. kRough: weights that are rounded to a byte afterwards, of scores that
// are to be multiplied by `factors` first.
template <int R, bool kRough, int64_t N>
[[gnu::noinline]] void softmax_block(float (*weights)[N], const float* factors, const Partial* states, float* kept) {
    F16 tops[R], above = splat16(-1.0f);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        tops[r] = load16(weights[r]);
#pragma GCC unroll 4
        for (int64_t i = 16; i < N; i += 16) tops[r] = larger(tops[r], load16(weights[r] + i));
        if (kRough) tops[r] = tops[r] * splat16(factors[r]);
        above = larger(tops[r] - splat16(*states[r].max + kHeadroom), above);  // which stays where the first is NaN
        kept[r] = 1.0f;
    }
    if (any_larger(above, 0.0f))  // seldom, behind a prompt's first blocks
        for (int r = 0; r < R; ++r) {
            const float old = *states[r].max;
            if (!any_larger(tops[r], old + kHeadroom)) continue;
            *states[r].max = lane_max(tops[r]);
            kept[r] = old == -__builtin_inff() ? 0.0f : exp_one(old - *states[r].max);
        }
    // Should all be -infinity, the difference to the largest would be NaN: such a block has no weight.
    auto shift = [&](int r) { return *states[r].max == -__builtin_inff() ? 0.0f : *states[r].max; };
    constexpr int vectors = N / 16, most = kExpVectors / vectors, rows = R < most ? R : most;
    for (int first = 0; first < R; first += rows) {
        F16 e[rows * vectors];
#pragma GCC unroll 4
        for (int i = 0; i < rows * vectors; ++i) e[i] = load16(weights[first + i / vectors] + i % vectors * 16);
        if constexpr (kRough) {
            static_assert(rows == 1, "one factor");
            exp16_rough(e, factors[first], shift(first));
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < rows * vectors; ++i) e[i] = e[i] - splat16(shift(first + i / vectors));
            exp16_each(e);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            F16 total = splat16(0.0f);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                store16(weights[first + r] + 16 * v, e[r * vectors + v]);
                total = total + e[r * vectors + v];
            }
            float* sums = states[first + r].sums;
            store16(sums, plus_product(total, load16(sums), splat16(kept[first + r])));
        }
    }
}

// What is done to scores beside scaling. `slopes`: of the query heads of a key-value head, or null.
struct Adjust {
    float cap;
    const float* slopes;

    explicit operator bool() const { return cap != 0.0f || slopes; }
};

// What a token sees of a block: keys [begin, end). `distance`: from the token to the first key of the block, negative
// for keys before it.
struct View {
    int64_t begin, end, distance;
};

// Those of tokens that follow each other, the first of which stands `first` behind the first key of the block, of whose
// keys `end` are loaded.
struct Views {
    int64_t first, end, window;

    View of(int64_t token) const {
        const int64_t at = first + token;
        return {window ? std::max<int64_t>(at + 1 - window, 0) : 0, std::min(at + 1, end), -at};
    }
};

// The scores of one query head, the `head`-th of its key-value head.
inline void adjust_scores(float* scores, int64_t count, const Adjust& a, int64_t head, int64_t distance) {
    for (int64_t i = 0; i < count; i += 8) {
        F8 v = load8(scores + i);
        const F8 hidden = less(v, splat(-3e38f));
        if (a.cap != 0.0f) v = choose(hidden, v, splat(a.cap) * tanh8(v * splat(1.0f / a.cap)));
        if (a.slopes) {
            alignas(32) float fall[8];
            for (int64_t j = 0; j < 8; ++j) fall[j] = a.slopes[head] * static_cast<float>(distance + i + j);
            v = choose(hidden, v, v + load8(fall));
        }
        store8(scores + i, v);
    }
}

}  // namespace gpt_fast
