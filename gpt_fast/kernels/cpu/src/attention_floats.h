// Attention to one block of keys in float32.
#pragma once

#include "paged.h"
#include "softmax.h"

namespace gpt_fast {

// Query heads that see the same keys of a block are computed R at a time, so that a key or value is read once for them.
// What one of them gets does not depend on the others: its sums are the same chains for every R.
// scores[r][i] = scale * q[r] . keys[i] for keys [begin, end). D is a multiple of 8. R x (8 / R) sums at a time: each
// waits four cycles for the one before, and adding up lanes costs as much as the products unless four sums share it.
// A group of keys that is not full repeats one, which changes nothing for the others.
template <int R>
inline void scores_of(const float* const* q, const float* const* keys, int64_t begin, int64_t end, int64_t dim,
                      float scale, float (*scores)[kKeys]) {
    constexpr int J = 8 / R;
    for (int64_t i = begin / J * J; i < end; i += J) {
        const bool whole = i >= begin && i + J <= end;
        const float* key[J];
        F8 sum[8];  // [R][J]
#pragma GCC unroll 8
        for (int64_t j = 0; j < J; ++j)
            key[j] = keys[whole ? i + j : i + j < begin ? begin : i + j < end ? i + j : end - 1];
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) sum[j] = splat(0.0f);
#pragma GCC unroll 2
        for (int64_t d = 0; d < dim; d += 8) {
#pragma GCC unroll 8
            for (int j = 0; j < J; ++j) {
                const F8 kv = load8(key[j] + d);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sum[r * J + j] = plus_product(sum[r * J + j], load8(q[r] + d), kv);
            }
        }
        float dots[8];
        store_lane_sums(sum, scale, dots);
        store_lane_sums(sum + 4, scale, dots + 4);
        if (whole) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) std::memcpy(scores[r] + i, dots + r * J, J * sizeof(float));
            continue;
        }
        for (int r = 0; r < R; ++r)
            for (int64_t j = 0; j < J; ++j)
                if (i + j >= begin && i + j < end) scores[r][i + j] = dots[r * J + j];
    }
}

// value[r][d .. d + 8 W) = value * kept + sum of weights * values, keys in ascending order. R x W sums at a time.
template <int R, int W>
inline void add_values(float* const* value, const float* kept, const float (*weights)[kKeys],
                       const float* const* values, int64_t begin, int64_t end, int64_t d) {
    F8 acc[R][W];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) acc[r][j] = load8(value[r] + d + 8 * j) * splat(kept[r]);
#pragma GCC unroll 2
    for (int64_t i = begin; i < end; ++i) {
        F8 v[W];
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) v[j] = load8(values[i] + d + 8 * j);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F8 weight = splat(weights[r][i]);
#pragma GCC unroll 8
            for (int j = 0; j < W; ++j) acc[r][j] = plus_product(acc[r][j], weight, v[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) store8(value[r] + d + 8 * j, acc[r][j]);
}

// A head of the cache as float32: where it lies, or widened into `room`.
inline const float* widen(const float* cache, const float*, int64_t place, int64_t dim, float*) {
    return cache + place * dim;
}

inline const float* widen(const uint16_t* cache, const float*, int64_t place, int64_t dim, float* room) {
    const uint16_t* from = cache + place * dim;
#pragma GCC unroll 4
    for (int64_t d = 0; d < dim; d += 8) store8(room + d, load8(from + d));
    return room;
}

inline const float* widen(const int8_t* cache, const float* scales, int64_t place, int64_t dim, float* room) {
    const int8_t* from = cache + place * dim;
    const F8 scale = splat(scales[place]);
#pragma GCC unroll 4
    for (int64_t d = 0; d < dim; d += 8) store8(room + d, load8_int8(from + d) * scale);
    return room;
}

// One head's keys and values of a block in float32, and the queries that attend to them.
template <class Cached>
class FloatKeys {
public:
    FloatKeys(const Paged<Cached>& p, int64_t, int64_t, int64_t, int64_t) : p_(p) {
        static thread_local Scratch widened;
        room_ = widened.get<float>(2 * kKeys * p.head_dim);
    }

    // Keys [from, end) of the block, of the heads of the cache at `places`.
    void load(const int64_t* places, int64_t kv_head, int64_t from, int64_t end) {
        for (int64_t i = from; i < end; ++i) {
            const int64_t place = places[i - from] + kv_head;
            keys_[i] = widen(p_.k_cache, p_.k_scale, place, p_.head_dim, room_ + i * p_.head_dim);
            values_[i] = widen(p_.v_cache, p_.v_scale, place, p_.head_dim, room_ + (kKeys + i) * p_.head_dim);
        }
    }

    // Tokens [first, last) with what each sees; states [tokens, heads of kv_head].
    void attend(int64_t first, int64_t last, const View* views, int64_t kv_head, float* states) const {
        const int64_t group = p_.group(), record = state_floats(p_.state_dim());
        for (int64_t token = first; token < last; ++token, ++views, states += group * record) {
            if (views->begin >= views->end) continue;
            const float* q = p_.q + token * p_.q_stride + kv_head * group * p_.head_dim;
            for (int64_t head = 0; head < group;) {
                const int64_t left = group - head;
                float* to = states + head * record;
                if (left >= 4)
                    attend_heads<4>(q + head * p_.head_dim, *views, kv_head, head, to), head += 4;
                else if (left >= 2)
                    attend_heads<2>(q + head * p_.head_dim, *views, kv_head, head, to), head += 2;
                else
                    attend_heads<1>(q + head * p_.head_dim, *views, kv_head, head, to), head += 1;
            }
        }
    }

private:
    // R query heads: scores, weights, and the values into the states.
    template <int R>
    void attend_heads(const float* q, const View& view, int64_t kv_head, int64_t head, float* states) const {
        alignas(32) float weights[R][kKeys];
        const float* heads[R];
        float *into[R], kept[R];
        const int64_t dim = p_.head_dim, state_dim = p_.state_dim();
        for (int r = 0; r < R; ++r) {
            heads[r] = q + r * dim;
            into[r] = states + r * state_floats(state_dim);
            for (float& weight : weights[r]) weight = -__builtin_inff();
        }
        scores_of<R>(heads, keys_, view.begin, view.end, dim, p_.scale, weights);
        for (int r = 0; r < R; ++r) {
            if (const Adjust adjust = p_.adjust(kv_head)) adjust_scores(weights[r], adjust, head + r, view.distance);
            kept[r] = softmax_block(weights[r], partial(into[r], state_dim));
        }
        constexpr int W = 8 / R;  // eight sums at once hide each other's latency
        int64_t d = 0;
        for (; d + 8 * W <= dim; d += 8 * W) add_values<R, W>(into, kept, weights, values_, view.begin, view.end, d);
        for (; d < dim; d += 8) add_values<R, 1>(into, kept, weights, values_, view.begin, view.end, d);
    }

    const Paged<Cached>& p_;
    float* room_;
    const float *keys_[kKeys], *values_[kKeys];
};

}  // namespace gpt_fast
