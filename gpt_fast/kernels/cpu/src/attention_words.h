// Attention to one block of a cache of int8 by products of pairs of 16 bits (simd.h, dot_words), summed in integers:
// two instructions for 16 products, where float32 takes two for 8 after bytes have been widened to it.
//
// A query is rounded to multiples of a scale, the weights of a block, each times the scale of its value, to multiples
// of another one: steps of a 32,767th of the largest. Sums are exact, so nothing else is rounded, and the order of what
// is added does not matter.
//
// Sixteen keys lie in the lanes of a vector, pairs along the head; for the values sixteen columns, pairs of keys. The
// cache has neither, so a block is rearranged once for all queries of its head.
#pragma once

#include "attention_block.h"

namespace gpt_fast {

// Keys of attention_block.h.
class WordKeys {
public:
    using Number = int16_t;

    WordKeys(const Paged<int8_t>& p, int64_t) : p_(p), columns_(p.state_dim()), turned_(ceil_div(p.head_dim, 32) * 32) {
        static thread_local Scratch scratch;
        keys_ = scratch.get<int16_t>(kKeys * (turned_ + columns_));
        values_ = keys_ + kKeys * turned_;
    }

    static int64_t column(int64_t d, int64_t) { return d; }

    // Of each four neighbours the second and the third change places: bytes of four columns are widened to the first
    // and the third, and to the second and the fourth.
    float store_query(const float* q, int16_t* to) const {
        F8 largest = splat(0.0f), finite = splat(0.0f);  // else NaN
        for (int64_t d = 0; d < p_.head_dim; d += 8) {
            largest = larger(largest, magnitude(load8(q + d)));
            finite = plus_product(finite, finite, load8(q + d));
        }
        const float most = lane_max(largest), inverse = most == 0.0f ? 0.0f : steps_ / most;
        for (int64_t d = 0; d < p_.head_dim; d += 8) {
            int16_t rounded[16];
            const F8 x = load8(q + d) * splat(inverse);
            store16_words(rounded, x, x);
            for (int i = 0; i < 8; i += 4) {
                uint64_t four;
                std::memcpy(&four, rounded + i, sizeof four);
                four = (four & 0xffff00000000ffff) | (four >> 16 & 0xffff0000) | (four << 16 & 0xffff00000000);
                std::memcpy(to + d + i, &four, sizeof four);
            }
        }
        return most / steps_ + lane_sum(finite);
    }

    int64_t load_work() const { return kLoadRows * p_.head_dim; }

    void load(const Rows<int8_t>& rows, int64_t kv_head, Ahead& ahead) {
        const int64_t dim = p_.head_dim, at = kv_head * dim;
        first_ = rows.from / 2, last_ = ceil_div(rows.end, 2);
        for (int64_t i = 0; i < kKeys; ++i) {
            k_scale_[i] = p_.k_scale[rows.place[i] + kv_head];
            v_scale_[i] = p_.v_scale[rows.place[i] + kv_head];
        }
        F16 finite = splat16(0.0f);
        for (int64_t i = 0; i < kKeys; i += 16) finite = plus_product(finite, finite, load16(v_scale_ + i));
        finite_ = lane_sum(finite);
        for (int64_t i = 0; i < kKeys; i += 8) {
            ahead.fetch(kLoadRows * dim * 8 / kKeys);
            for (int64_t d = 0; d < dim; d += 32) turn(rows.keys + i, at, d, i);
        }
        for (int64_t i = first_; i < last_; ++i) {
            const int8_t *a = rows.values[2 * i] + at, *b = rows.values[2 * i + 1] + at;
            int16_t* to = values_ + 2 * i * columns_;
            int64_t d = 0;
            for (; d + 16 <= dim; d += 16) join_words(a + d, b + d, to + 2 * d);
            if (d < dim) join_words(Piece<16>(a, d, dim).bytes, Piece<16>(b, d, dim).bytes, to + 2 * d);
        }
    }

    template <int R>
    void scores(const int16_t* q, const float* factors, float (*scores)[kKeys], Ahead& ahead) const {
        constexpr int some = kRegisters >= 32 || R < 4 ? R : 4, V = kRegisters >= 32 || R < 3 ? kKeys / 16 : 1;
        for (int r = 0; r < R; r += some)
            for (int64_t i = 0; i < kKeys; i += 16 * V) {
                ahead.fetch(some * p_.head_dim * 16 * V / kKeys);
                some_scores<some, V>(q + r * p_.head_dim, factors + r, i, scores + r);
            }
    }

    template <int R>
    void add_values(float* const* into, const float* kept, const float (*weights)[kKeys], Ahead& ahead) const {
        alignas(64) int16_t rounded[R][kKeys];
        float factors[R];
        for (int r = 0; r < R; ++r) factors[r] = round_weights(weights[r], rounded[r]);
        constexpr int some = R < 4 ? R : 4, W = kRegisters >= 32 ? 4 : R < 3 ? 2 : 1;
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 16 * W <= columns_; d += 16 * W) {
                ahead.fetch(some * 16 * W);
                some_values<some, W>(into + r, kept + r, rounded + r, factors + r, d);
            }
            if constexpr (W > 1)
                for (; d < columns_; d += 16) {
                    ahead.fetch(some * 16);
                    some_values<some, 1>(into + r, kept + r, rounded + r, factors + r, d);
                }
        }
    }

private:
    static constexpr int64_t kLoadRows = 2;       // whose scores take as long as to turn keys
    static constexpr int64_t kMostSum = 1 << 30;  // what sums of products stay below

    // The last bytes of a head, from column d on, and zeros behind them.
    template <int64_t count>
    struct Piece {
        Piece(const int8_t* head, int64_t d, int64_t dim) {
            std::memcpy(bytes, head + d, static_cast<size_t>(dim - d));
        }
        int8_t bytes[count] = {};
    };

    // Columns [d, d + 32) of the head at `at`, of keys [first, first + 8).
    void turn(const int8_t* const* keys, int64_t at, int64_t d, int64_t first) {
        auto load = [](const int8_t* from) { return load32(reinterpret_cast<const uint8_t*>(from)); };
        I8 rows[8];
        if (d + 32 <= p_.head_dim)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) rows[i] = load(keys[i] + at + d);
        else
            for (int i = 0; i < 8; ++i) rows[i] = load(Piece<32>(keys[i] + at, d, p_.head_dim).bytes);
        turn8(rows);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            int16_t* to = keys_ + (d + 4 * i) * kKeys + 2 * first;
            store32(reinterpret_cast<uint8_t*>(to), even_words(rows[i]));
            store32(reinterpret_cast<uint8_t*>(to + 2 * kKeys), odd_words(rows[i]));
        }
    }

    // A row of weights times the scales of the values, in multiples of what is returned.
    float round_weights(const float* weights, int16_t* to) const {
        F16 largest = splat16(0.0f), w[kKeys / 16];
        for (int64_t i = 0; i < kKeys / 16; ++i) {
            w[i] = load16(weights + 16 * i) * load16(v_scale_ + 16 * i);
            largest = larger(largest, w[i]);
        }
        const float most = lane_max(largest), inverse = most == 0.0f ? 0.0f : 32767.0f / most;
        for (int64_t i = 0; i < kKeys / 16; ++i) store16_words(to + 16 * i, w[i] * splat16(inverse));
        return most * (1.0f / 32767.0f) + finite_;
    }

    // Of R queries and keys [first, first + 16 V).
    template <int R, int V>
    void some_scores(const int16_t* q, const float* factors, int64_t first, float (*scores)[kKeys]) const {
        I16 sum[R][V];
        clear_sums(sum);
#pragma GCC unroll 2
        for (int64_t d = 0; d < p_.head_dim; d += 2) {
            I16 key[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                key[v] = load64(reinterpret_cast<const uint8_t*>(keys_ + d * kKeys + 2 * (first + 16 * v)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I16 x = splat_words(q + r * p_.head_dim + d);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = dot_words(sum[r][v], key[v], x);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store16(scores[r] + first + 16 * v,
                        to_floats(sum[r][v]) * splat16(factors[r]) * load16(k_scale_ + first + 16 * v));
    }

    template <int R, int W>
    void some_values(float* const* into, const float* kept, const int16_t (*weights)[kKeys], const float* factors,
                     int64_t d) const {
        I16 sum[R][W];
        clear_sums(sum);
#pragma GCC unroll 4
        for (int64_t i = first_; i < last_; ++i) {
            I16 v[W];
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w)
                v[w] = load64(reinterpret_cast<const uint8_t*>(values_ + 2 * (i * columns_ + d + 16 * w)));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I16 weight = splat_words(weights[r] + 2 * i);
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum[r][w] = dot_words(sum[r][w], v[w], weight);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) {
                float* at = into[r] + d + 16 * w;
                store16(at, plus_product(load16(at) * splat16(kept[r]), to_floats(sum[r][w]), splat16(factors[r])));
            }
    }

    const Paged<int8_t>& p_;
    const int64_t columns_, turned_;
    const float steps_ = static_cast<float>(std::min<int64_t>(32767, kMostSum / (127 * p_.head_dim)));  // of a query
    int64_t first_ = 0, last_ = 0;  // pairs of values
    float finite_ = 0.0f;           // else NaN: a scale is not
    int16_t *keys_, *values_;       // [D / 2, kKeys, 2], [kKeys / 2, columns, 2]
    alignas(64) float k_scale_[kKeys], v_scale_[kKeys];
};

}  // namespace gpt_fast
