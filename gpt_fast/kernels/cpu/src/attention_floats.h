// Attention to one block of keys in float32. Keys stand in the lanes of a vector for the scores, columns for the
// values; the cache has its keys the other way round, so they are turned once for all queries of their head.
//
// Numbers of bfloat16 lie in pairs, of which the first and the second become float32 by one instruction each. So
// columns of values stand with even ones first, then odd ones, of each sixteen. A few queries widen where they
// multiply: to store all that before would take longer than their products.
#pragma once

#include "attention_block.h"

namespace gpt_fast {

// Lanes of 32 bits to float32, a vector for each number in a lane: one float32, or two bfloat16.
template <class Cached>
inline void spread(I8 lanes, float* to) {
    if constexpr (std::is_same_v<Cached, float>)
        store8(to, as_floats(lanes));
    else
        store8(to, low_bfloat16(lanes)), store8(to + kKeys, high_bfloat16(lanes));
}

// Keys of attention_block.h.
template <class Cached>
class FloatKeys {
public:
    using Number = float;
    static constexpr int64_t kKeys = gpt_fast::kKeys;
    static constexpr int kDegree = std::is_same_v<Cached, float> ? 0 : 3;

    FloatKeys(const Paged<Cached>& p, int64_t queries)
        : p_(p), dim_(p.head_dim), columns_(p.state_dim()), few_(queries <= kFewQueries && in_pairs(dim_)) {
        static thread_local Scratch scratch;
        const int64_t turned = kKeys * ceil_div(dim_, kChunk) * kChunk;
        keys_ = scratch.get<float>(turned + kKeys * columns_);
        widened_ = keys_ + turned;
    }

    // Where column d of the values stands in the sums.
    static int64_t column(int64_t d, int64_t dim) { return in_pairs(dim) ? d / 16 * 16 + d % 2 * 8 + d % 16 / 2 : d; }

    static int64_t query_numbers(int64_t dim) { return dim; }

    float store_query(const float* q, float* to) const {
        std::memcpy(to, q, static_cast<size_t>(dim_) * sizeof *to);
        return 1.0f;
    }

    int64_t load_work() const { return kLoadRows * dim_; }

    void load(const Rows<Cached, kKeys>& rows, int64_t kv_head, Ahead<Cached>& ahead) {
        from_ = rows.from, end_ = rows.end, cached_ = rows.values, at_ = kv_head * dim_;
        for (int64_t i = 0; i < kKeys; i += 8) {
            ahead.fetch(kLoadRows * dim_ * 8 / kKeys);
            for (int64_t d = 0; d < dim_; d += kChunk) turn(rows.keys + i, d, i);
        }
        if (few_) return;
        for (int64_t i = from_; i < end_; ++i) {
            const Cached* value = cached_[i] + at_;
            if constexpr (std::is_same_v<Cached, float>) {
                values_[i] = value;
                if (dim_ == columns_) continue;
            }
            float* to = widened_ + i * columns_;
            values_[i] = to;
            if constexpr (std::is_same_v<Cached, uint16_t>)
                if (in_pairs(dim_)) {
#pragma GCC unroll 4
                    for (int64_t d = 0; d < dim_; d += 16) {
                        const I8 pairs = load32(reinterpret_cast<const uint8_t*>(value + d));
                        store8(to + d, low_bfloat16(pairs)), store8(to + d + 8, high_bfloat16(pairs));
                    }
                    continue;
                }
#pragma GCC unroll 4
            for (int64_t d = 0; d < dim_; d += 8) store8(to + d, load8(value + d));
            if (dim_ < columns_) store8(to + dim_, splat(0.0f));
        }
    }

    template <int R>
    void scores(const float* q, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        if constexpr (kFewQueries > 0)
            if (few_) return scores_of<R, true>(q, scores, ahead);
        scores_of<R, false>(q, scores, ahead);
    }

    template <int R>
    void add_values(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys],
                    Ahead<Cached>& ahead) const {
        if constexpr (kFewQueries > 0)
            if (few_) return values_of<R, true>(into, stride, kept, weights, ahead);
        values_of<R, false>(into, stride, kept, weights, ahead);
    }

private:
    static constexpr int64_t kChunk = 32 / sizeof(Cached);  // columns that are turned together
    static constexpr int64_t kFewQueries = std::is_same_v<Cached, uint16_t> && kRegisters < 32 ? 8 : 0;
    static constexpr int64_t kLoadRows = 2;  // whose scores take as long as to turn keys

    static bool in_pairs(int64_t dim) { return std::is_same_v<Cached, uint16_t> && dim % 16 == 0; }

    // Columns [d, d + kChunk) of keys [first, first + 8).
    void turn(const Cached* const* keys, int64_t d, int64_t first) const {
        I8 rows[8];
        const int64_t count = dim_ - d;
        if (count >= kChunk) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) rows[i] = load32(reinterpret_cast<const uint8_t*>(keys[i] + (at_ + d)));
        } else {
            for (int i = 0; i < 8; ++i) {
                alignas(32) Cached part[kChunk] = {};
                std::memcpy(part, keys[i] + (at_ + d), static_cast<size_t>(count) * sizeof(Cached));
                rows[i] = load32(reinterpret_cast<const uint8_t*>(part));
            }
        }
        turn8(rows);
        if (few_) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) store8(keys_ + (d / 2 + j) * kKeys + first, as_floats(rows[j]));
            return;
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) spread<Cached>(rows[j], keys_ + (d + j * (kChunk / 8)) * kKeys + first);
    }

    template <int R, bool few>
    void scores_of(const float* q, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        constexpr int some = kRegisters >= 32 || R < 2 ? R : few && R > 2 ? 4 : 2, V = few && some > 2 ? 1 : kKeys / 16;
        for (int r = 0; r < R; r += some)
            for (int64_t i = 0; i < kKeys; i += 16 * V) {
                ahead.fetch(some * dim_ * 16 * V / kKeys);
                some_scores<some, V, few>(q + r * dim_, i, scores + r);
            }
    }

    template <int R, bool few>
    void values_of(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys],
                   Ahead<Cached>& ahead) const {
        constexpr int some = R < 4 ? R : 4;
        // One or two queries take a line of the cache at a time: the lines of all tokens may fall into one set of it.
        constexpr int W = kRegisters >= 32 ? 4 : few && R <= 2 ? 2 : 1;
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 16 * W <= columns_; d += 16 * W) {
                ahead.fetch(some * 16 * W);
                some_values<some, W, few>(into + r * stride, stride, kept + r, weights + r, d);
            }
            if constexpr (W > 1)
                for (; d < columns_; d += 16) {
                    ahead.fetch(some * 16);
                    some_values<some, 1, few>(into + r * stride, stride, kept + r, weights + r, d);
                }
        }
    }

    // Column d of keys [i, i + 16).
    template <bool few>
    F16 keys_at(int64_t d, int64_t i) const {
        if constexpr (!few) return load16(keys_ + d * kKeys + i);
        const I16 pairs = load64(reinterpret_cast<const uint8_t*>(keys_ + d / 2 * kKeys + i));
        return d % 2 == 0 ? low_bfloat16(pairs) : high_bfloat16(pairs);
    }

    // Sixteen columns of the values of token i, from d on.
    template <bool few>
    F16 values_at(int64_t i, int64_t d) const {
        if constexpr (!few) return load16(values_[i] + d);
        const I8 pairs = load32(reinterpret_cast<const uint8_t*>(cached_[i] + (at_ + d)));
        return join(low_bfloat16(pairs), high_bfloat16(pairs));
    }

    // Of R queries and keys [first, first + 16 V).
    template <int R, int V, bool few>
    void some_scores(const float* q, int64_t first, float (*scores)[kKeys]) const {
        F16 sum[R][V];
        clear_sums(sum);
        auto add_column = [&](int64_t d) {
            F16 key[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) key[v] = keys_at<few>(d, first + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 x = splat16(q[r * dim_ + d]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = plus_product(sum[r][v], key[v], x);
            }
        };
        if constexpr (few) {
#pragma GCC unroll 2
            for (int64_t d = 0; d < dim_; d += 2) add_column(d), add_column(d + 1);
        } else {
#pragma GCC unroll 4
            for (int64_t d = 0; d < dim_; ++d) add_column(d);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) store16(scores[r] + first + 16 * v, sum[r][v]);
    }

    template <int R, int W, bool few>
    void some_values(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys], int64_t d) const {
        F16 sum[R][W];
        load_values(sum, into + d, stride, kept);
#pragma GCC unroll 4
        for (int64_t i = from_; i < end_; ++i) {
            F16 v[W];
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) v[w] = values_at<few>(i, d + 16 * w);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 weight = splat16(weights[r][i]);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum[r][w] = plus_product(sum[r][w], weight, v[w]);
            }
        }
        store_values(sum, into + d, stride);
    }

    const Paged<Cached>& p_;
    const int64_t dim_, columns_;
    const bool few_;
    int64_t from_ = 0, end_ = 0, at_ = 0;  // at_: of the head in a row
    float *keys_, *widened_;               // [D, kKeys], [kKeys, columns]
    const Cached* const* cached_ = nullptr;
    const float* values_[kKeys];
};

}  // namespace gpt_fast
