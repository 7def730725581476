// Attention to one block of keys by products of pairs of bfloat16 (simd.h, kBfloat16Dots), summed in float32. Queries
// and weights are rounded to bfloat16, as torch does it for a model of that type.
//
// Sixteen keys lie in the lanes of a vector, pairs along the head; for the values sixteen columns, pairs of keys. A
// cache of bfloat16 has neither, so a block is rearranged once for all queries of its head; one of int8 has both, in
// bytes.
#pragma once

#include "attention_bytes.h"
#include "attention_tiles.h"

namespace gpt_fast {

// scores[r][i] = q[r] . keys[i] of a whole block. q [R, D] in bfloat16, keys [D / 2, kKeys, 2].
template <int R>
inline void pair_scores(const uint16_t* q, const uint16_t* keys, int64_t dim, float (*scores)[kKeys]) {
    constexpr int V = kKeys / 16;
    F16 sum[R][V];
    clear_sums(sum);
#pragma GCC unroll 2
    for (int64_t d = 0; d < dim; d += 2) {
        I16 key[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) key[v] = load64(reinterpret_cast<const uint8_t*>(keys + d * kKeys + 32 * v));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I16 x = splat_four(q + r * dim + d);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sum[r][v] = bfloat16_dot(sum[r][v], key[v], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store16(scores[r] + 16 * v, sum[r][v]);
}

// Columns [d, d + 16 W) of R sums of values, `stride` floats apart: times `kept`, plus weights * values, keys in
// ascending order. weights [R, kKeys] in bfloat16, values [kKeys / 2, columns, 2].
template <int R, int W>
inline void add_pair_values(float* into, int64_t stride, const float* kept, const uint16_t (*weights)[kKeys],
                            const uint16_t* values, int64_t columns, int64_t d) {
    F16 sum[R][W];
    load_values(sum, into + d, stride, kept);
#pragma GCC unroll 2
    for (int64_t i = 0; i < kKeys; i += 2) {
        I16 v[W];
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w)
            v[w] = load64(reinterpret_cast<const uint8_t*>(values + i * columns + 2 * d + 32 * w));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I16 weight = splat_four(weights[r] + i);
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) sum[r][w] = bfloat16_dot(sum[r][w], v[w], weight);
        }
    }
    store_values(sum, into + d, stride);
}

struct NoBytes {
    template <class Cached>
    explicit NoBytes(const Paged<Cached>&) {}
};

// Keys of attention_block.h. Numbers of int8 are exact in bfloat16; their scales are applied to scores and weights,
// which are fewer than keys and values.
template <class Cached>
class PairKeys {
public:
    using Number = uint16_t;
    static constexpr int64_t kKeys = gpt_fast::kKeys;
    static constexpr int kDegree = 3;

    PairKeys(const Paged<Cached>& p, int64_t) : p_(p), columns_(p.state_dim()), bytes_(p) {
        static thread_local Scratch scratch;
        keys_ = scratch.get<uint16_t>(2 * kKeys * columns_);
        values_ = keys_ + kKeys * columns_;
    }

    static int64_t column(int64_t d, int64_t) { return d; }

    static int64_t query_numbers(int64_t dim) { return dim; }

    float store_query(const float* q, uint16_t* to) const {
        for (int64_t d = 0; d < p_.head_dim; ++d) store_as(q[d], to + d);
        return 1.0f;
    }

    int64_t load_work() const { return 2 * kLoadRows * p_.head_dim; }

    void load(const Rows<Cached, kKeys>& rows, int64_t kv_head, Ahead<Cached>& ahead) {
        if constexpr (kScaled) {
            bytes_.find(rows, kv_head);
            widen(ahead);
        } else {
            rearrange(rows.keys, rows.values, kv_head * p_.head_dim, ahead);
        }
    }

    template <int R>
    void scores(const uint16_t* q, float (*scores)[kKeys], Ahead<Cached>& ahead) {
        ahead.fetch(R * p_.head_dim);
        if (tiled_)
            tiles_.template scores<R>(q, keys_, p_.head_dim, scores);
        else
            pair_scores<R>(q, keys_, p_.head_dim, scores);
        if constexpr (kScaled) multiply<R>(scores, bytes_.k_scale);
    }

    template <int R>
    void add_values(float* into, int64_t stride, const float* kept, float (*weights)[kKeys], Ahead<Cached>& ahead) {
        alignas(64) uint16_t rounded[R][kKeys];
        if constexpr (kScaled) multiply<R>(weights, bytes_.v_scale);
        for (int r = 0; r < R; ++r)
            for (int64_t i = 0; i < kKeys; i += 16) store16_bfloat16(rounded[r] + i, load16(weights[r] + i));
        if (tiled_) {
            ahead.fetch(R * columns_);
            return tiles_.template add_values<R>(into, stride, kept, rounded, values_, columns_);
        }
        constexpr int some = R < 4 ? R : 4;
        for (int r = 0; r < R; r += some) {
            ahead.fetch(some * columns_);
            int64_t d = 0;
            for (; d + 64 <= columns_; d += 64)
                add_pair_values<some, 4>(into + r * stride, stride, kept + r, rounded + r, values_, columns_, d);
            for (; d < columns_; d += 16)
                add_pair_values<some, 1>(into + r * stride, stride, kept + r, rounded + r, values_, columns_, d);
        }
    }

private:
    static constexpr int64_t kLoadRows = 4;  // whose products take as long as to turn or widen keys, or to join values
    static constexpr bool kScaled = std::is_same_v<Cached, int8_t>;

    // A head of each row, from column `at` on.
    void rearrange(const uint16_t* const* keys, const uint16_t* const* values, int64_t at, Ahead<Cached>& ahead) {
        for (int64_t d = 0; d < p_.head_dim; d += 8)
            for (int64_t i = 0; i < kKeys; i += 16) {
                ahead.fetch(kLoadRows * 8 * 16 / kKeys);
                turn_pairs(keys + i, at + d, keys_ + d * kKeys + 2 * i, 2 * kKeys);
            }
        for (int64_t i = 0; i < kKeys; i += 2) {
            ahead.fetch(kLoadRows * p_.head_dim * 2 / kKeys);
            join_pairs(values[i] + at, values[i + 1] + at, p_.head_dim, values_ + i * columns_);
            if (p_.head_dim < columns_) std::memset(values_ + i * columns_ + 2 * p_.head_dim, 0, 32);
        }
    }

    void widen(Ahead<Cached>& ahead) {
        for (int64_t i = 0; i < kKeys; i += 16) {
            ahead.fetch(kLoadRows * p_.head_dim * 16 / kKeys);
            for (int64_t d = 0; d < p_.head_dim; d += 4) {
                uint16_t* to = keys_ + d * kKeys + 2 * i;
                pairs_of_bytes<true>(bytes_.keys[i / 16] + 16 * d, to, to + 2 * kKeys);
            }
        }
        for (int64_t i = 0; i < kKeys; i += 4) {
            ahead.fetch(kLoadRows * p_.head_dim * 4 / kKeys);
            for (int64_t d = 0; d < columns_; d += 16) {
                uint16_t* to = values_ + i * columns_ + 2 * d;
                pairs_of_bytes<false>(bytes_.values[i / 4] + 4 * d, to, to + 2 * columns_);
            }
        }
    }

    template <int R>
    static void multiply(float (*rows)[kKeys], const float* scales) {
        for (int r = 0; r < R; ++r)
            for (int64_t i = 0; i < kKeys; i += 16) store16(rows[r] + i, load16(rows[r] + i) * load16(scales + i));
    }

    const Paged<Cached>& p_;
    const int64_t columns_;
    const bool tiled_ = kTiles && p_.head_dim % 32 == 0;
    AttentionTiles<> tiles_;
    uint16_t *keys_, *values_;
    std::conditional_t<kScaled, ByteBlock<kKeys>, NoBytes> bytes_;
};

}  // namespace gpt_fast
