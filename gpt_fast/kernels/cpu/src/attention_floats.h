// Attention to one block of keys in float32. Keys stand in the lanes of a vector for the scores, columns for the
// values.
//
// Numbers of bfloat16 lie in pairs, of which the first and the second become float32 by one instruction each. A few
// queries widen where they multiply: to store all that before would take longer than their products.
#pragma once

#include "attention_cached.h"

namespace gpt_fast {

// Keys of attention_block.h.
template <class Cached>
class FloatKeys {
public:
    using Number = float;
    static constexpr int64_t kKeys = gpt_fast::kKeys;
    static constexpr bool kTiled = false;
    static constexpr int kDegree = std::is_same_v<Cached, float> ? 0 : 3;

    FloatKeys(const Paged<Cached>& p, int64_t queries)
        : dim_(p.head_dim), columns_(p.state_dim()), widens_(kPairs && queries > kFewQueries), block_(p) {
        if (!widens_) return;
        static thread_local Scratch scratch;
        widened_ = scratch.get<float>(kKeys * (dim_ + columns_));
    }

    static int64_t query_numbers(int64_t dim) { return dim; }

    float store_query(const float* q, float* to) const {
        std::memcpy(to, q, static_cast<size_t>(dim_) * sizeof *to);
        return 1.0f;
    }

    int64_t load_work() const { return widens_ ? 2 * kLoadRows * dim_ : 0; }

    void load(const Rows<kKeys>& rows, int64_t kv_head, Ahead<Cached>& ahead) {
        block_.find(rows, kv_head);
        if constexpr (kPairs) {
            if (widens_) widen(ahead);
        } else {
            for (int64_t i = 0; i < kKeys / 16; ++i) keys_[i] = block_.keys[i];
            for (int64_t i = block_.first; i < block_.last; ++i) values_[i] = block_.values[i];
        }
    }

    template <int R>
    void scores(const float* q, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        if constexpr (kFewQueries > 0)
            if (!widens_) return scores_of<R, true>(q, scores, ahead);
        scores_of<R, false>(q, scores, ahead);
    }

    template <int R>
    void add_values(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys],
                    Ahead<Cached>& ahead) const {
        if constexpr (kFewQueries > 0)
            if (!widens_) return values_of<R, true>(into, stride, kept, weights, ahead);
        values_of<R, false>(into, stride, kept, weights, ahead);
    }

private:
    static constexpr int64_t kEach = Paged<Cached>::kEach;
    static constexpr bool kPairs = kEach == 2;
    static constexpr int64_t kFewQueries = kPairs && kRegisters < 32 ? 8 : 0;
    static constexpr int64_t kLoadRows = 1;  // whose products take as long as to widen a block

    // `count` vectors of pairs to vectors of float32: the first of each pair, and the second.
    static void widen(const uint16_t* pairs, int64_t count, float* first, float* second, int64_t step) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < count; ++i) {
            const I16 both = load64(reinterpret_cast<const uint8_t*>(pairs + 32 * i));
            store16(first + i * step, low_bfloat16(both)), store16(second + i * step, high_bfloat16(both));
        }
    }

    void widen(Ahead<Cached>& ahead) {
        float* to = widened_;
        for (int64_t i = 0; i < kKeys / 16; ++i, to += 16 * dim_) {
            ahead.fetch(kLoadRows * dim_ * 16 / kKeys);
            keys_[i] = to;
            widen(block_.keys[i], dim_ / 2, to, to + 16, 32);
        }
        for (int64_t i = block_.first; i < block_.last; ++i, to += 2 * columns_) {
            ahead.fetch(kLoadRows * dim_ * 2 / kKeys);
            values_[2 * i] = to, values_[2 * i + 1] = to + columns_;
            widen(block_.values[i], columns_ / 16, to, to + columns_, 16);
        }
    }

    template <int R, bool few>
    void scores_of(const float* q, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        constexpr int some = kRegisters >= 32 || R < 2 ? R : few && R > 2 ? 4 : 2, V = few && some > 2 ? 1 : kKeys / 16;
        for (int r = 0; r < R; r += some)
            for (int64_t i = 0; i < kKeys; i += 16 * V) some_scores<some, V, few>(q + r * dim_, i, scores + r, ahead);
    }

    template <int R, bool few>
    void values_of(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys],
                   Ahead<Cached>& ahead) const {
        constexpr int some = R < 4 ? R : 4;
        // One or two queries take a line of the cache at a time: the lines of all tokens may fall into one set of it.
        constexpr int W = kRegisters >= 32 ? 4 : few && R <= 2 ? 2 : 1;
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 16 * W <= columns_; d += 16 * W)
                some_values<some, W, few>(into + r * stride, stride, kept + r, weights + r, d, ahead);
            if constexpr (W > 1)
                for (; d < columns_; d += 16)
                    some_values<some, 1, few>(into + r * stride, stride, kept + r, weights + r, d, ahead);
        }
    }

    // A vector of pairs of column d and the next one, of keys [i, i + 16); or of values and the next token's.
    I16 key_pairs(int64_t d, int64_t i) const {
        return load64(reinterpret_cast<const uint8_t*>(block_.keys[i / 16] + d * 16));
    }
    I16 value_pairs(int64_t pair, int64_t d) const {
        return load64(reinterpret_cast<const uint8_t*>(block_.values[pair] + 2 * d));
    }

    // Of R queries and keys [first, first + 16 V).
    template <int R, int V, bool few>
    void some_scores(const float* q, int64_t first, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        F16 sum[R][V];
        clear_sums(sum);
        auto add_column = [&](int64_t d, const F16(&key)[V]) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 x = splat16(q[r * dim_ + d]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = plus_product(sum[r][v], key[v], x);
            }
        };
        constexpr int64_t each = few ? 2 : 1, work = R * each * 16 * V / kKeys;
        fetching_steps(ahead, work, 0, dim_ / each, [&](int64_t group) __attribute__((always_inline)) {
            const int64_t d = each * group;
            F16 key[V];
            if constexpr (few) {
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) key[v] = low_bfloat16(key_pairs(d, first + 16 * v));
                add_column(d, key);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) key[v] = high_bfloat16(key_pairs(d, first + 16 * v));
                add_column(d + 1, key);
            } else {
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) key[v] = load16(keys_[first / 16 + v] + 16 * d);
                add_column(d, key);
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) store16(scores[r] + first + 16 * v, sum[r][v]);
    }

    template <int R, int W, bool few>
    void some_values(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys], int64_t d,
                     Ahead<Cached>& ahead) const {
        F16 sum[R][W];
        load_values(sum, into + d, stride, kept);
        auto add_token = [&](int64_t i, const F16(&v)[W]) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 weight = splat16(weights[r][i]);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum[r][w] = plus_product(sum[r][w], weight, v[w]);
            }
        };
        constexpr int64_t each = few ? 2 : 1, of_group = kEach / each, work = R * each * 16 * W / kKeys;
        const int64_t first = block_.first * of_group, last = block_.last * of_group;
        fetching_steps(ahead, work, first, last, [&](int64_t group) __attribute__((always_inline)) {
            F16 v[W];
            if constexpr (few) {
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) v[w] = low_bfloat16(value_pairs(group, d + 16 * w));
                add_token(2 * group, v);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) v[w] = high_bfloat16(value_pairs(group, d + 16 * w));
                add_token(2 * group + 1, v);
            } else {
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) v[w] = load16(values_[group] + d + 16 * w);
                add_token(group, v);
            }
        });
        store_values(sum, into + d, stride);
    }

    const int64_t dim_, columns_;
    const bool widens_;  // a block, before its products
    CachedBlock<Cached, kKeys> block_;
    float* widened_ = nullptr;
    const float* keys_[kKeys / 16];  // [D, 16] each
    const float* values_[kKeys];     // [columns] each
};

}  // namespace gpt_fast
