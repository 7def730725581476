// Attention to one block of a cache of int8 by products of integers, whose sums are exact: nothing is rounded but a
// query, to multiples of a scale, and the weights of kPart keys, each times the scale of its value, to multiples of
// another one. The order of what is added does not matter.
//
// Sixteen keys lie in the lanes of a vector, four neighbours of the head in each lane; for the values sixteen columns,
// four keys. So the cache has them (paged.h). Where pairs of 16 bits are multiplied, a block is widened once
// for all queries of its head.
#pragma once

#include "activations.h"
#include "attention_cached.h"

namespace gpt_fast {

// How integers are multiplied: Words or Bytes. They bring
//   Query, Weight: the types of rounded queries and weights
//   kEach: how many neighbours a lane has
//   kMostWeight: to which the largest weight is rounded
//   most_of_query(dim): to which the largest number of a query is rounded, for heads of `dim`
//   query_numbers(dim): how many Query a query takes
//   store_query(q, scale, dim, to): a query [dim] times `scale`, rounded
//   begin(q, dim): what sums of scores begin with
//   add_score(sum, keys, q), add_value(sum, values, weights): sum + products; splat(): the neighbours of a query, or
//     weights, in every lane
//   store_weights(to, v): vectors of weights, rounded

// Pairs of 16 bits (simd.h, dot_words): two instructions for 16 products, where float32 takes two for 8 after bytes
// have been widened to it.
struct Words {
    using Query = int16_t;
    using Weight = int16_t;
    static constexpr int64_t kEach = 2;
    static constexpr int64_t kKeys = gpt_fast::kKeys;
    static constexpr float kMostWeight = 32767.0f;

    static float most_of_query(int64_t dim) {
        constexpr int64_t most_sum = 1 << 30;
        return static_cast<float>(std::min<int64_t>(32767, most_sum / (127 * dim)));
    }
    static int64_t query_numbers(int64_t dim) { return dim; }

    static void store_query(const float* q, float scale, int64_t dim, int16_t* to) {
        for (int64_t d = 0; d < dim; d += 8) {
            int16_t rounded[16];
            const F8 x = load8(q + d) * gpt_fast::splat(scale);
            store16_words(rounded, x, x);
            std::memcpy(to + d, rounded, 8 * sizeof *to);
        }
    }

    // `count` fours of bytes, `raised` by 128 or not, to pairs: the first two of each four, the last two.
    template <bool raised>
    static void widen(const uint8_t* fours, int64_t count, uint8_t* first, uint8_t* last) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < count; i += 8) {
            I8 eight = load32(fours + 4 * i);
            if (raised) eight = raise(eight);
            store32(first + 4 * i, first_words(eight));
            store32(last + 4 * i, last_words(eight));
        }
    }

    static I16 begin(const int16_t*, int64_t) { return I16{}; }
    static I16 splat(const int16_t* two) { return splat_words(two); }
    static I16 add_score(I16 sum, I16 keys, I16 q) { return dot_words(sum, keys, q); }
    static I16 add_value(I16 sum, I16 values, I16 weights) { return dot_words(sum, values, weights); }
    template <int N>
    static void store_weights(int16_t* to, const F16 (&v)[N]) {
        for (int i = 0; i < N; ++i) store16_words(to + 16 * i, v[i]);
    }
};

#ifdef GPT_FAST_DPBUSD
// Fours of bytes, half as many products as Words where one instruction multiplies and adds four. One side of it is
// unsigned: keys have 128 added, and what sums begin with, behind the query, takes that off; weights are never
// negative. Coarser steps than those of Words, as fine as the cache's own.
struct Bytes {
    using Query = int8_t;
    using Weight = uint8_t;
    static constexpr int64_t kEach = 4;
    static constexpr int64_t kKeys = kRegisters >= 32 ? 64 : gpt_fast::kKeys;  // what a block costs once is a lot
    static constexpr float kMostWeight = 255.0f;

    static float most_of_query(int64_t) { return 127.0f; }
    static int64_t query_numbers(int64_t dim) { return dim + 4; }

    static void store_query(const float* q, float scale, int64_t dim, int8_t* to) {
        I8 total = gpt_fast::splat(0);
        for (int64_t d = 0; d < dim; d += 8) {
            int32_t rounded[8];
            const I8 x = nearest(load8(q + d) * gpt_fast::splat(scale));
            store32(reinterpret_cast<uint8_t*>(rounded), x);
            total = add(total, x);
            for (int i = 0; i < 8; ++i) to[d + i] = static_cast<int8_t>(rounded[i]);
        }
        const uint32_t begin = -128u * static_cast<uint32_t>(lane_sum(total));  // anything where q is not finite
        std::memcpy(to + dim, &begin, sizeof begin);
    }

    static I16 begin(const int8_t* q, int64_t dim) { return begin_dots16(load_four(q + dim)); }
    static I16 splat(const void* four) { return splat_four(four); }
    static I16 add_score(I16 sum, I16 keys, I16 q) { return dot_raised(sum, keys, q); }
    static I16 add_value(I16 sum, I16 values, I16 weights) { return dot_raised(sum, weights, values); }
    template <int N>
    static void store_weights(uint8_t* to, const F16 (&v)[N]) {
        store_bytes(to, v);
    }
};
#endif

// Keys of attention_block.h.
template <class Numbers>
class IntegerKeys {
public:
    using Number = typename Numbers::Query;
    static constexpr int64_t kKeys = Numbers::kKeys;
    static constexpr bool kTiled = false;
    static constexpr int kDegree = Numbers::kMostWeight < 256.0f ? 2 : 4;  // as exact as rounded weights

    IntegerKeys(const Paged<int8_t>& p, int64_t queries)
        : p_(p),
          columns_(p.state_dim()),
          stride_(query_numbers(p.head_dim)),
          most_(Numbers::most_of_query(p.head_dim)),
          block_(p),
          brings_(queries, kRegisters < 32 ? 0 : 16 * p.head_dim) {
        if constexpr (kWidened) {
            static thread_local Scratch scratch;
            widened_ = scratch.get<uint8_t>(kKeys * (p.head_dim + columns_) * kBytes);
        }
    }

    static int64_t query_numbers(int64_t dim) { return Numbers::query_numbers(dim); }

    float store_query(const float* q, Number* to) const {
        I8 largest = splat(0);
        for (int64_t d = 0; d < p_.head_dim; d += 8) largest = larger_magnitude(largest, load8(q + d));
        const float most = largest_lane(largest);
        const bool nothing = most < 1e-30f;
        Numbers::store_query(q, nothing ? 0.0f : most_ / most, p_.head_dim, to);
        return nothing ? 1.0f : most / most_ + (most - most);  // NaN if a number is not finite
    }

    int64_t load_work() const { return 2 * kLoadRows * p_.head_dim; }

    void load(const Rows<kKeys>& rows, int64_t kv_head, Ahead<int8_t>& ahead) {
        block_.find(rows, kv_head);
        brings_.begin_block(ahead.near());
        F16 finite = splat16(0.0f);
        for (int64_t i = 0; i < kKeys; i += 16) finite = plus_product(finite, finite, load16(block_.v_scale + i));
        finite_ = lane_sum(finite);
        first_ = block_.first * kOfFour, last_ = block_.last * kOfFour;
        if constexpr (kWidened) {
            widen(ahead);
        } else {
            for (int64_t i = 0; i < kKeys / 16; ++i) keys_[i] = block_.keys[i];
            for (int64_t i = 0; i < kKeys / kEach; ++i)  // those that nobody sees have the weight 0
                values_[i] = block_.values[std::clamp(i, first_, last_ - 1)];
        }
    }

    template <int R>
    void scores(const Number* q, float (*scores)[kKeys], Ahead<int8_t>& ahead) const {
        constexpr int some = R < 4 ? R : 4, V = kRegisters >= 32 ? kKeys / 16 : R < 3 ? 2 : 1;
        for (int r = 0; r < R; r += some)
            for (int64_t i = 0; i < kKeys; i += 16 * V) {
                ahead.fetch(some * p_.head_dim * 16 * V / kKeys);
                if (brings_.values(r + some == R))
                    some_scores<some, V, true>(q + r * stride_, i, scores + r);
                else
                    some_scores<some, V, false>(q + r * stride_, i, scores + r);
            }
    }

    template <int R>
    void add_values(float* into, int64_t stride, const float* kept, const float (*weights)[kKeys],
                    Ahead<int8_t>& ahead) {
        brings_.attend(R);
        alignas(64) Weight rounded[R][kKeys];
        alignas(32) float factors[kParts][8];
        round_weights<R>(weights, rounded, factors);
        constexpr int some = R < 4 ? R : 4, W = kParts > 1 ? 2 : kRegisters >= 32 ? 4 : R < 3 ? 2 : 1;
        for (int r = 0; r < R; r += some) {
            int64_t d = 0;
            for (; d + 16 * W <= columns_; d += 16 * W) {
                ahead.fetch(some * 16 * W);
                if (brings_.keys(r + some == R))
                    some_values<some, W, true>(into + r * stride + d, stride, kept + r, rounded + r, factors[0] + r, d);
                else
                    some_values<some, W, false>(into + r * stride + d, stride, kept + r, rounded + r, factors[0] + r,
                                                d);
            }
            if constexpr (W > 1)
                for (; d < columns_; d += 16) {
                    ahead.fetch(some * 16);
                    some_values<some, 1, false>(into + r * stride + d, stride, kept + r, rounded + r, factors[0] + r,
                                                d);
                }
        }
    }

private:
    using Weight = typename Numbers::Weight;
    static constexpr int64_t kEach = Numbers::kEach, kBytes = sizeof(Number), kLane = kEach * kBytes,
                             kVector = 16 * kLane;
    static constexpr bool kWidened = kEach == 2;
    static constexpr int64_t kOfFour = 4 / kEach;           // groups of kEach values in four
    static constexpr int64_t kLoadRows = kWidened ? 1 : 0;  // whose products take as long as to widen a block
    static constexpr int64_t kPart = 32, kParts = kKeys / kPart;

    void widen(Ahead<int8_t>& ahead) {
        const int64_t dim = p_.head_dim;
        uint8_t* to = widened_;
        for (int64_t i = 0; i < kKeys / 16; ++i) {
            ahead.fetch(kLoadRows * dim * 16 / kKeys);
            keys_[i] = to;
            for (int64_t d = 0; d < dim; d += 4, to += 2 * kVector)
                Numbers::template widen<true>(block_.keys[i] + d * 16, 16, to, to + kVector);
        }
        for (int64_t i = first_; i < last_; i += 2) {
            const int64_t bytes = columns_ * kLane;
            ahead.fetch(kLoadRows * dim * 4 / kKeys);
            values_[i] = to, values_[i + 1] = to + bytes;
            Numbers::template widen<false>(block_.values[i / 2], columns_, to, to + bytes);
            to += 2 * bytes;
        }
    }

    // The weights of R queries times the scales of the values, each part of a row in multiples of factors[part][row].
    template <int R>
    void round_weights(const float (*weights)[kKeys], Weight (*to)[kKeys], float (*factors)[8]) const {
        static_assert(R <= 8, "lanes");
        alignas(32) float inverse[kParts][8];
#pragma GCC unroll 2
        for (int64_t part = 0; part < kParts; ++part) {
            F8 largest[8];
#pragma GCC unroll 8
            for (int r = R; r < 8; ++r) largest[r] = splat(0.0f);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                F16 most = splat16(0.0f);
#pragma GCC unroll 4
                for (int64_t i = part * kPart; i < (part + 1) * kPart; i += 16)
                    most = larger(most, load16(weights[r] + i) * load16(block_.v_scale + i));
                largest[r] = larger(lower(most), upper(most));
            }
            const F8 most = larger(splat(1e-30f), lane_maxes(largest));  // not 0, to be divided by
            store8(factors[part], plus_product(splat(finite_), most, splat(1.0f / Numbers::kMostWeight)));
            store8(inverse[part], splat(Numbers::kMostWeight) / most);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            F16 w[kKeys / 16];
#pragma GCC unroll 4
            for (int64_t i = 0; i < kKeys; i += 16)
                w[i / 16] = load16(weights[r] + i) * load16(block_.v_scale + i) * splat16(inverse[i / kPart][r]);
            Numbers::store_weights(to[r], w);
        }
    }

    // Of R queries and keys [first, first + 16 V). `brings`: the values of these tokens.
    template <int R, int V, bool brings>
    void some_scores(const Number* q, int64_t first, float (*scores)[kKeys]) const {
        I16 sum[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sum[r][v] = Numbers::begin(q + r * stride_, p_.head_dim);
        auto step = [&](int64_t d) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int v = 0; brings && v < V; ++v) prefetch(block_.values[(first + 16 * v) / 4] + 16 * d);
            I16 key[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) key[v] = load64(keys_[first / 16 + v] + d * 16 * kBytes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const I16 x = Numbers::splat(q + r * stride_ + d);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sum[r][v] = Numbers::add_score(sum[r][v], key[v], x);
            }
        };
        // Unrolled by hand: at the end of a loop that it unrolls gcc copies all sums.
        int64_t d = 0;
        for (; d + 4 * kEach <= p_.head_dim; d += 4 * kEach)
            step(d), step(d + kEach), step(d + 2 * kEach), step(d + 3 * kEach);
        for (; d < p_.head_dim; d += 2 * kEach) step(d), step(d + kEach);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                store16(scores[r] + first + 16 * v, to_floats(sum[r][v]) * load16(block_.k_scale + first + 16 * v));
    }

    // Of R queries and 16 W columns; `factors` of a part stand eight behind those of the one before. All parts together,
    // since the registers have no room for what one part has made while the next is summed. `brings`: the next head's
    // keys.
    template <int R, int W, bool brings>
    void some_values(float* into, int64_t stride, const float* kept, const Weight (*weights)[kKeys],
                     const float* factors, int64_t d) const {
        I16 sum[kParts][R][W];
        for (auto& part : sum) clear_sums(part);
        const int64_t size = kPart / kEach, end = kParts == 1 ? last_ : size;
#pragma GCC unroll 8
        for (int64_t i = kParts == 1 ? first_ : 0; i < end; ++i) {
#pragma GCC unroll 8
            for (int s = 0; brings && s < kKeys / 16; ++s)
                prefetch(block_.keys[s] + 16 * (p_.head_dim + d) + 64 * i);
#pragma GCC unroll 2
            for (int64_t part = 0; part < kParts; ++part) {
                I16 v[W];
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) v[w] = load64(values_[part * size + i] + (d + 16 * w) * kLane);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const I16 weight = Numbers::splat(weights[r] + part * kPart + kEach * i);
#pragma GCC unroll 8
                    for (int w = 0; w < W; ++w) sum[part][r][w] = Numbers::add_value(sum[part][r][w], v[w], weight);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r, into += stride) {
            asm("" : "+r"(into));  // as in store_values()
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) {
                F16 total = load16(into + 16 * w) * splat16(kept[r]);
#pragma GCC unroll 2
                for (int64_t part = 0; part < kParts; ++part)
                    total = plus_product(total, to_floats(sum[part][r][w]), splat16(factors[8 * part + r]));
                store16(into + 16 * w, total);
            }
        }
    }

    const Paged<int8_t>& p_;
    const int64_t columns_, stride_;  // of a stored query
    const float most_;                // of a rounded query
    int64_t first_ = 0, last_ = 0;    // groups of kEach values
    float finite_ = 0.0f;             // else NaN: a scale is not
    CachedBlock<int8_t, kKeys> block_;
    Brings brings_;
    const uint8_t* keys_[kKeys / 16];       // [D / kEach, 16, kEach] each
    const uint8_t* values_[kKeys / kEach];  // [columns, kEach] each
    uint8_t* widened_ = nullptr;            // these, one behind the other
};

}  // namespace gpt_fast
