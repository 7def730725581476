// The running softmax of attention's queries (Milakov & Gimelshein 2018, arXiv 1805.02867), one block of keys at a
// time.
#pragma once

#include <algorithm>

#include "elementwise.h"

namespace gpt_fast {

constexpr int64_t kKeys = 32;  // of a block, where its Keys (attention_block.h) have no other number

// The score of a key that a token may not see: far below all others, but a number, as differences of infinities are
// none.
constexpr float kHidden = -1e30f;

// What exponentials are relative to before a key was seen: beside it kHidden has no weight.
constexpr float kNothingSeen = -1e29f;

// Running softmaxes of some queries: sums of values weighted by e^(score - max), of those weights alone, and max.
struct States {
    int64_t dim;
    float *sums, *maxes, *values;  // [rows], [rows], [rows, dim]; of the first two eight may be used from any row on

    // In state_floats() of memory.
    States(float* memory, int64_t rows, int64_t dim)
        : dim(dim), sums(memory), maxes(sums + room_for(rows)), values(maxes + room_for(rows)) {}

    static int64_t room_for(int64_t rows) { return ceil_div(rows + 7, 16) * 16; }

    States from(int64_t row) const {
        States rest = *this;
        rest.sums += row, rest.maxes += row, rest.values += row * dim;
        return rest;
    }
};

// The cache's columns of a head, rounded up to a multiple of 16.
inline int64_t state_dim_of(int64_t head_dim) { return ceil_div(head_dim, 16) * 16; }
inline int64_t state_floats(int64_t rows, int64_t dim) { return 2 * States::room_for(rows) + rows * dim; }

inline void clear(const States& states, int64_t rows) {
    std::fill_n(states.sums, States::room_for(rows), 0.0f);
    std::fill_n(states.maxes, States::room_for(rows), kNothingSeen);
    std::fill_n(states.values, rows * states.dim, 0.0f);
}

inline float exp_one(float x) { return first_lane(exp8(splat(x))); }

// into = into and then other.
inline void merge(const States& into, const States& other, int64_t rows) {
    for (int64_t row = 0; row < rows; row += 8) {
        const int64_t count = std::min<int64_t>(rows - row, 8);
        const F8 max = load8(into.maxes + row), others = load8(other.maxes + row);
        const F8 top = choose(less(others, max), max, others);  // NaN on either side survives
        const F8 keep = exp8(max - top), add = exp8(others - top);
        const F8 kept = load8(into.sums + row) * keep;
        store8(into.sums + row, plus_product(kept, load8(other.sums + row), add));
        store8(into.maxes + row, top);
        alignas(32) float keeps[8], adds[8];
        store8(keeps, keep), store8(adds, add);
        for (int64_t i = 0; i < count; ++i) {
            float* to = into.values + (row + i) * into.dim;
            const float* from = other.values + (row + i) * into.dim;
            for (int64_t d = 0; d < into.dim; d += 16)
                store16(to + d, plus_product(load16(to + d) * splat16(keeps[i]), load16(from + d), splat16(adds[i])));
        }
    }
}

// How much larger a score may be than the one that exponentials are taken relative to: e^8 costs no precision, and what
// was summed up needs no other scale then.
constexpr float kHeadroom = 8.0f;

constexpr int kExpVectors = kRegisters < 32 ? 2 : 4;  // whose exponentials are made together

// All bits of the first R lanes.
template <int R>
inline F8 first_lanes() {
    static constexpr int32_t bits[] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    return as_floats(load32(reinterpret_cast<const uint8_t*>(bits + 8 - R)));
}

// Scores of one block of N keys, each query's to be multiplied by its factor, to weights, in place, for R queries;
// their sums and what they are relative to into `states`, and into `kept` what the earlier values are to be multiplied
// with. kDegree: of power16_each(), for weights that are rounded afterwards; 0: exp16_each(). Eight of `factors` are
// read.
template <int R, int kDegree, int64_t N>
[[gnu::noinline]] void softmax_block(float (*weights)[N], const float* factors, const States& states,
                                     float (&kept)[8]) {
    constexpr int vectors = N / 16, most = kExpVectors < vectors ? 1 : kExpVectors / vectors;
    constexpr int rows = R < most ? R : most;
    F8 each[8];  // lanes without a query: zeros
#pragma GCC unroll 8
    for (int r = R; r < 8; ++r) each[r] = splat(0.0f);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        F16 top = load16(weights[r]);
#pragma GCC unroll 4
        for (int64_t i = 16; i < N; i += 16) top = larger(top, load16(weights[r] + i));
        each[r] = larger(lower(top), upper(top));
    }
    F8 top = lane_maxes(each) * load8(factors), max = load8(states.maxes), keep = splat(1.0f);
    if (R < 8) top = choose(first_lanes<R>(), top, splat(kHidden));  // the others stay as they are
    const F8 above = less(max + splat(kHeadroom), top);
    if (any(as_ints(above))) {  // seldom, behind a prompt's first blocks
        const F8 before = max;
        max = choose(above, top, max), keep = exp8(before - max);
        store8(states.maxes, max);
    }
    constexpr float unit = kDegree == 0 ? 1.0f : kLog2E;  // base e, or 2
    alignas(32) float by[8], shift[8];
    store8(by, load8(factors) * splat(unit)), store8(shift, max * splat(-unit)), store8(kept, keep);
#pragma GCC unroll 8
    for (int first = 0; first < R; first += rows) {
        F16 e[rows * vectors];
#pragma GCC unroll 4
        for (int i = 0; i < rows * vectors; ++i) {
            const int r = first + i / vectors;
            e[i] = plus_product(splat16(shift[r]), load16(weights[r] + i % vectors * 16), splat16(by[r]));
        }
        if constexpr (kDegree == 0)
            exp16_each(e);
        else
            power16_each<kDegree>(e);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            F16 total = splat16(0.0f);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                store16(weights[first + r] + 16 * v, e[r * vectors + v]);
                total = total + e[r * vectors + v];
            }
            each[first + r] = lower(total) + upper(total);
        }
    }
    store8(states.sums, plus_product(lane_sums(each), load8(states.sums), keep));
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
        if (a.cap != 0.0f) v = splat(a.cap) * tanh8(v * splat(1.0f / a.cap));
        if (a.slopes) {
            alignas(32) float fall[8];
            for (int64_t j = 0; j < 8; ++j) fall[j] = a.slopes[head] * static_cast<float>(distance + i + j);
            v = v + load8(fall);
        }
        store8(scores + i, v);
    }
}

}  // namespace gpt_fast
