// Attention to one block of keys in float32. Keys stand in the lanes of a vector for the scores, columns for the values;
// the cache has its keys the other way round, so they are turned once for all queries of their head.
#pragma once

#include "attention_block.h"

namespace gpt_fast {

// Lanes of 32 bits to float32, a vector for each number in a lane: one float32, two bfloat16, four int8.
inline void spread(I8 lanes, const float*, float* to) { store8(to, as_floats(lanes)); }

inline void spread(I8 lanes, const uint16_t*, float* to) {
    store8(to, as_floats(shift_left<16>(lanes)));
    store8(to + kKeys, as_floats(lanes & splat(static_cast<int32_t>(0xffff0000u))));
}

inline void spread(I8 lanes, const int8_t*, float* to) {
    store8(to, to_floats(shift_right_signed<24>(shift_left<24>(lanes))));
    store8(to + kKeys, to_floats(shift_right_signed<24>(shift_left<16>(lanes))));
    store8(to + 2 * kKeys, to_floats(shift_right_signed<24>(shift_left<8>(lanes))));
    store8(to + 3 * kKeys, to_floats(shift_right_signed<24>(lanes)));
}

inline F8 widened8(const float* p) { return load8(p); }
inline F8 widened8(const uint16_t* p) { return load8(p); }
inline F8 widened8(const int8_t* p) { return load8_int8(p); }

// Keys of attention_block.h. The scales of int8 are applied to scores and weights, which are fewer than keys and values.
template <class Cached>
class FloatKeys {
public:
    using Number = float;

    explicit FloatKeys(const Paged<Cached>& p) : p_(p), dim_(p.head_dim), columns_(p.state_dim()) {
        static thread_local Scratch scratch;
        const int64_t turned = kKeys * ceil_div(dim_, kChunk) * kChunk;
        keys_ = scratch.get<float>(turned + kKeys * columns_);
        widened_ = keys_ + turned;
    }

    int64_t load_work() const { return 0; }

    void load(const int64_t* places, int64_t kv_head, int64_t from, int64_t end, Ahead&) {
        from_ = from, end_ = end;
        const Cached* keys[kKeys];
        for (int64_t i = 0; i < kKeys; ++i) {
            keys[i] = i >= from && i < end ? p_.k_cache + (places[i - from] + kv_head) * dim_ : nullptr;
            if constexpr (std::is_same_v<Cached, int8_t>) {
                k_scale_[i] = keys[i] ? p_.k_scale[places[i - from] + kv_head] : 0.0f;
                v_scale_[i] = keys[i] ? p_.v_scale[places[i - from] + kv_head] : 0.0f;
            }
        }
        for (int64_t i = 0; i < kKeys; i += 8)
            for (int64_t d = 0; d < dim_; d += kChunk) turn(keys + i, d, keys_ + d * kKeys + i);
        for (int64_t i = from; i < end; ++i) {
            const Cached* value = p_.v_cache + (places[i - from] + kv_head) * dim_;
            if constexpr (std::is_same_v<Cached, float>) {
                values_[i] = value;
                if (dim_ == columns_) continue;
            }
            float* to = widened_ + i * columns_;
            values_[i] = to;
#pragma GCC unroll 4
            for (int64_t d = 0; d < dim_; d += 8) store8(to + d, widened8(value + d));
            if (dim_ < columns_) store8(to + dim_, splat(0.0f));
        }
    }

    template <int R>
    void scores(const float* q, float (*scores)[kKeys], Ahead& ahead) const {
        constexpr int some = kRegisters >= 32 || R < 2 ? R : 2;
        for (int r = 0; r < R; r += some) {
            ahead.fetch(some * dim_);
            some_scores<some>(q + r * dim_, scores + r);
        }
    }

    template <int R>
    void add_values(float* const* into, const float* kept, float (*weights)[kKeys], Ahead& ahead) const {
        constexpr int some = R < 4 ? R : 4, wide = kRegisters >= 32 ? 4 : 1;
        if constexpr (std::is_same_v<Cached, int8_t>)
            for (int r = 0; r < R; ++r)
                for (int64_t i = 0; i < kKeys; i += 16)
                    store16(weights[r] + i, load16(weights[r] + i) * load16(v_scale_ + i));
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 16 * wide <= columns_; d += 16 * wide) {
                ahead.fetch(some * 16 * wide);
                some_values<some, wide>(into + r, kept + r, weights + r, d);
            }
            if constexpr (wide > 1)
                for (; d < columns_; d += 16) {
                    ahead.fetch(some * 16);
                    some_values<some, 1>(into + r, kept + r, weights + r, d);
                }
        }
    }

private:
    static constexpr int64_t kChunk = 32 / sizeof(Cached);  // columns that are turned together

    // Columns [d, d + kChunk) of eight keys; null: zero.
    void turn(const Cached* const* keys, int64_t d, float* to) const {
        I8 rows[8];
        const int64_t count = dim_ - d;
        for (int i = 0; i < 8; ++i) {
            alignas(32) Cached part[kChunk] = {};
            if (keys[i] && count < kChunk) std::memcpy(part, keys[i] + d, static_cast<size_t>(count) * sizeof(Cached));
            const Cached* from = keys[i] && count >= kChunk ? keys[i] + d : part;
            rows[i] = load32(reinterpret_cast<const uint8_t*>(from));
        }
        turn8(rows);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) spread(rows[j], keys[0], to + j * (kChunk / 8) * kKeys);
    }

    template <int R>
    void some_scores(const float* q, float (*scores)[kKeys]) const {
        constexpr int V = kKeys / 16;
        F16 sum[R][V];
        clear_sums(sum);
#pragma GCC unroll 4
        for (int64_t d = 0; d < dim_; ++d) {
            F16 key[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) key[v] = load16(keys_ + d * kKeys + 16 * v);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 x = splat16(q[r * dim_ + d]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = plus_product(sum[r][v], key[v], x);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                F16 score = sum[r][v] * splat16(p_.scale);
                if constexpr (std::is_same_v<Cached, int8_t>) score = score * load16(k_scale_ + 16 * v);
                store16(scores[r] + 16 * v, score);
            }
    }

    template <int R, int W>
    void some_values(float* const* into, const float* kept, const float (*weights)[kKeys], int64_t d) const {
        F16 sum[R][W];
        load_values(sum, into, kept, d);
#pragma GCC unroll 4
        for (int64_t i = from_; i < end_; ++i) {
            F16 v[W];
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) v[w] = load16(values_[i] + d + 16 * w);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 weight = splat16(weights[r][i]);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum[r][w] = plus_product(sum[r][w], weight, v[w]);
            }
        }
        store_values(sum, into, d);
    }

    const Paged<Cached>& p_;
    const int64_t dim_, columns_;
    int64_t from_ = 0, end_ = 0;
    float *keys_, *widened_;  // [D, kKeys], [kKeys, columns]
    const float* values_[kKeys];
    alignas(64) float k_scale_[kKeys], v_scale_[kKeys];
};

}  // namespace gpt_fast
