// Attention to one block of keys by products of pairs of bfloat16 (simd.h, kBfloat16Dots), summed in float32. Queries
// and weights are rounded to bfloat16, as torch does it for a model of that type.
//
// Sixteen keys lie in the lanes of a vector, pairs along the head; for the values sixteen columns, pairs of keys. So a
// cache of bfloat16 has them (paged.h). One of int8 has both in bytes, and a block is widened once for all queries of
// its head.
#pragma once

#include "attention_cached.h"
#include "attention_tiles.h"

namespace gpt_fast {

// Keys of attention_block.h. Of int8, keys are exact in bfloat16, and their scales are applied to scores; values are
// multiplied by their scales.
template <class Cached>
class PairKeys {
public:
    using Number = uint16_t;
    static constexpr bool kTiled = kTiles;
    static constexpr int64_t kKeys = kTiles ? kTileKeys : kRegisters >= 32 ? 64 : gpt_fast::kKeys;
    static constexpr int kDegree = 3;

    PairKeys(const Paged<Cached>& p, int64_t queries)
        : dim_(p.head_dim),
          columns_(p.state_dim()),
          block_(p),
          brings_(queries, kScaled ? 0 : 16 * dim_ * sizeof(Cached)) {
        if (!kScaled && !tiled_) return;
        static thread_local Scratch scratch;
        joined_ = scratch.get<uint16_t>(kKeys * (columns_ + (kScaled ? dim_ : 0)));
    }

    static int64_t query_numbers(int64_t dim) { return dim; }

    float store_query(const float* q, uint16_t* to) const {
        int64_t d = 0;
        for (; d + 16 <= dim_; d += 16) store16_bfloat16(to + d, load16(q + d));
        for (; d < dim_; ++d) store_as(q[d], to + d);
        return 1.0f;
    }

    int64_t load_work() const { return kScaled ? kLoadRows * (columns_ + dim_) : tiled_ ? kLoadRows * columns_ : 0; }

    void load(const Rows<kKeys>& rows, int64_t kv_head, Ahead<Cached>& ahead) {
        block_.find(rows, kv_head);
        brings_.begin_block(ahead.near());
        if constexpr (kScaled) {
            widen(ahead);
        } else {
            first_ = block_.first, last_ = block_.last;
            for (int64_t i = 0; i < kKeys / 16; ++i) keys_[i] = block_.keys[i];
            for (int64_t i = first_; i < last_; ++i) values_[i] = block_.values[i];
            if (tiled_) join(ahead);
        }
    }

    template <int R>
    void scores(const uint16_t* q, float (*scores)[kKeys], Ahead<Cached>& ahead) {
        constexpr int some = R < 4 ? R : 4;
        for (int r = 0; r < R; r += some) {
            if (brings_.values(r + some == R))
                some_scores<some, true>(q + r * dim_, scores + r, ahead);
            else
                some_scores<some, false>(q + r * dim_, scores + r, ahead);
        }
        multiply_scores<R>(scores);
    }

    template <int R>
    void add_values(float* into, int64_t stride, const float* kept, float (*weights)[kKeys], Ahead<Cached>& ahead) {
        alignas(64) uint16_t rounded[R][kKeys];
        for (int r = 0; r < R; ++r)
            for (int64_t i = 0; i < kKeys; i += 16) store16_bfloat16(rounded[r] + i, load16(weights[r] + i));
        brings_.attend(R);
        constexpr int some = R < 4 ? R : 4;
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 64 <= columns_; d += 64)
                if (brings_.keys(r + some == R))
                    some_values<some, 4, true>(into + r * stride + d, stride, kept + r, rounded + r, d, ahead);
                else
                    some_values<some, 4, false>(into + r * stride + d, stride, kept + r, rounded + r, d, ahead);
            for (; d < columns_; d += 16)
                some_values<some, 1, false>(into + r * stride + d, stride, kept + r, rounded + r, d, ahead);
        }
    }

    // Whether attend() makes all of this, by tiles. `scale`: of scores, beside those of keys; null if
    // prepare(row, scores) of R rows multiplies them by all scales.
    bool tiled() const { return tiled_; }

    template <int R, class Prepare>
    void attend(const uint16_t* q, int64_t rows, const float* scale, const States& states, Ahead<Cached>& ahead,
                Prepare prepare) {
        TileBlock block{keys_, joined_, dim_, columns_, scale ? *scale : 1.0f, nullptr};
        if constexpr (kScaled) block.scales = scale ? block_.k_scale : nullptr;
        tiles_.template attend<R>(block, q, rows, states, ahead, prepare);
    }

    template <int R>
    void multiply_scores(float (*scores)[kKeys]) const {
        if constexpr (kScaled)
            for (int r = 0; r < R; ++r)
                for (int64_t i = 0; i < kKeys; i += 16)
                    store16(scores[r] + i, load16(scores[r] + i) * load16(block_.k_scale + i));
    }

private:
    static constexpr bool kScaled = std::is_same_v<Cached, int8_t>;
    static constexpr int64_t kLoadRows = kTiles || kScaled ? 4 : 1;  // whose products take as long as load()

    // Tiles take the values of a whole block, one pair of keys behind the other; the cache has 16 keys together.
    void join(Ahead<Cached>& ahead) {
        auto* to = reinterpret_cast<uint8_t*>(joined_);
        for (int64_t i = 0; i < kKeys / 2; ++i) {
            if (i % 4 == 0) ahead.fetch(kLoadRows * columns_ * 8 / kKeys);
            const bool there = first_ <= i && i < last_;
            const auto* from = reinterpret_cast<const uint8_t*>(values_[there ? i : first_]);
            for (int64_t line = 0; line < 4 * columns_; line += kLine, to += kLine)
                store64(to, there ? load64(from + line) : splat16(0));
        }
    }

    void widen(Ahead<Cached>& ahead) {
        first_ = 0, last_ = kKeys / 2;
        uint16_t* to = joined_ + kKeys * columns_;
        for (int64_t i = 0; i < kKeys / 16; ++i) {
            ahead.fetch(kLoadRows * dim_ * 16 / kKeys);
            keys_[i] = to;
            for (int64_t d = 0; d < dim_; d += 4, to += 64) pairs_of_raised_bytes(block_.keys[i] + 16 * d, to, to + 32);
        }
        for (int64_t i = 0; i < kKeys / 4; ++i) {
            ahead.fetch(kLoadRows * columns_ * 4 / kKeys);
            to = joined_ + 4 * i * columns_;
            values_[2 * i] = to, values_[2 * i + 1] = to + 2 * columns_;
            const ScaledBytes scaled(block_.v_scale + 4 * i);
            for (int64_t d = 0; d < columns_; d += 16)
                scaled.to_pairs(block_.values[i] + 4 * d, to + 2 * d, to + 2 * (columns_ + d));
        }
    }

    // Of R queries and the whole block. `brings`: its values.
    template <int R, bool brings>
    void some_scores(const uint16_t* q, float (*scores)[kKeys], Ahead<Cached>& ahead) const {
        constexpr int V = kKeys / 16;
        F16 sum[R][V];
        clear_sums(sum);
        fetching_steps(ahead, R * 2, 0, dim_ / 2, [&](int64_t pair) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int v = 0; brings && !kScaled && v < V; ++v) prefetch(block_.values[8 * v] + 32 * pair);
            I16 key[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) key[v] = load64(reinterpret_cast<const uint8_t*>(keys_[v] + 32 * pair));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I16 x = splat_four(q + r * dim_ + 2 * pair);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = bfloat16_dot(sum[r][v], key[v], x);
            }
        });
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) store16(scores[r] + 16 * v, sum[r][v]);
    }

    // Of R queries and columns [d, d + 16 W): what stands at `into`, times `kept`, plus weights * values, keys in
    // ascending order. `brings`: the next head's keys.
    template <int R, int W, bool brings>
    void some_values(float* into, int64_t stride, const float* kept, const uint16_t (*weights)[kKeys], int64_t d,
                     Ahead<Cached>& ahead) const {
        F16 sum[R][W];
        load_values(sum, into, stride, kept);
        constexpr int64_t work = R * 16 * W * 2 / kKeys;
        fetching_steps(ahead, work, first_, last_, [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int v = 0; brings && v < kKeys / 16; ++v) prefetch(block_.keys[v] + 16 * dim_ + 16 * d + 32 * i);
            I16 v[W];
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) v[w] = load64(reinterpret_cast<const uint8_t*>(values_[i] + 2 * d + 32 * w));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I16 weight = splat_four(weights[r] + 2 * i);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum[r][w] = bfloat16_dot(sum[r][w], v[w], weight);
            }
        });
        store_values(sum, into, stride);
    }

    const int64_t dim_, columns_;
    const bool tiled_ = kTiles && dim_ % 32 == 0;
    AttentionTiles<> tiles_;
    CachedBlock<Cached, kKeys> block_;
    Brings brings_;
    int64_t first_ = 0, last_ = 0;       // pairs of values
    const uint16_t* keys_[kKeys / 16];   // [D / 2, 16, 2] each
    const uint16_t* values_[kKeys / 2];  // [columns, 2] each
    uint16_t* joined_ = nullptr;         // the latter, one behind the other; what is widened
};

}  // namespace gpt_fast
