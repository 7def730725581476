// Attention over the paged cache: any mixture of prefill, decode and verify in one call. attention.py has the layout,
// attention.cpp the kernels.
//
// Every query's keys are taken in blocks of kKeys at fixed absolute positions, and blocks in splits of kSplit. A split
// is a separate softmax (online, Milakov & Gimelshein 2018, arXiv 1805.02867); splits are merged in ascending order
// (Dao et al. 2023, Flash-Decoding). So a query's result depends neither on what else is in the step nor on how its
// prompt was cut into chunks nor on threads. Nothing outside a sequence's context is read: pages keep stale values.
//
// Work is handed out in one of two ways. Prompts: by (sequence, piece of its queries, key-value head), all splits in
// turn. Decoding, or little work for the threads: by (sequence, split), each part into a separate place, merged
// afterwards. All query heads of a key-value head are computed together, so that keys and values are read once for
// them; and where one item has all key-value heads, memory is read from one end to the other, not a head here and
// there.
#pragma once

#include <algorithm>

#include "paged.h"

namespace gpt_fast {

constexpr int64_t kSplit = 512;
constexpr int64_t kQueryPiece = kBfloat16Dots ? 16 : 8;  // tokens of one sequence that share a pass over its keys
constexpr int64_t kLongestPiece = 64;                    // or so many, behind long contexts
constexpr int64_t kMostSums = 1 << 16;                   // floats of a piece's sums, a quarter of a MB

// Called by the whole team; keys and values of the step must be in the cache. Ends without a barrier.
// `shared` has room for attention_scratch() floats. Cached: as in Paged.
template <class Cached>
void paged_attention(Team& team, const Paged<Cached>& p, float* shared);

// Floats of `shared` for a team of `threads`, and for contexts of at most `longest` tokens in `slots` sequences.
inline int64_t attention_scratch(int threads, int64_t slots, int64_t longest, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim) {
    const int64_t group = heads / kv_heads, dim = state_dim_of(head_dim);
    const int64_t few = 2 * team_size(threads) * state_floats(kQueryPiece * group, dim);
    return std::max(few, slots * kv_heads * state_floats(group, dim)) * ceil_div(longest, kSplit);
}

// One head's numbers to int8, eight at a time to store(d, eight); returns their scale. The rule of reference.py,
// quantize_heads.
template <class Store>
inline float quantize_head(const float* x, int64_t dim, Store store) {
    I8 largest = splat(0);
    for (int64_t d = 0; d < dim; d += 8) largest = larger_magnitude(largest, load8(x + d));
    const float most = largest_lane(largest), inverse = steps_of(most);
    for (int64_t d = 0; d < dim; d += 8) {
        int8_t eight[8];
        for (int i = 0; i < 8; ++i) {
            const float steps = x[d + i] * inverse;
            eight[i] = steps == steps ? static_cast<int8_t>(__builtin_rintf(steps)) : int8_t{0};  // not of a NaN
        }
        store(d, eight);
    }
    return most / 127.0f;
}

// Of one token's keys and values [K, D] heads [first, first + count) to its place in the cache.
template <class Cached>
void write_token(const float* k, const float* v, int64_t first, int64_t count, int64_t kv_heads, int64_t dim,
                 int64_t place, Cached* k_cache, Cached* v_cache, float* k_scale, float* v_scale) {
    constexpr int64_t each = Paged<Cached>::kEach;
    const int64_t lane = place % kTogether;
    for (int64_t h = first; h < first + count; ++h) {
        const int64_t head = place / kTogether * kv_heads + h, at = head * dim * kTogether;
        Cached *key = k_cache + at + each * lane, *value = v_cache + at + lane / each * each * dim + lane % each;
        if constexpr (std::is_same_v<Cached, int8_t>) {
            k_scale[head * kTogether + lane] = quantize_head(k + h * dim, dim, [&](int64_t d, int8_t* eight) {
                for (int i = 0; i < 8; ++i) eight[i] = static_cast<int8_t>(eight[i] ^ -128);
                std::memcpy(key + d * kTogether, eight, 4);
                std::memcpy(key + (d + 4) * kTogether, eight + 4, 4);
            });
            v_scale[head * kTogether + lane] = quantize_head(v + h * dim, dim, [&](int64_t d, const int8_t* eight) {
                for (int64_t i = 0; i < 8; ++i) value[each * (d + i)] = eight[i];
            });
        } else {
            for (int64_t d = 0; d < dim; d += each)
                for (int64_t i = 0; i < each; ++i) store_as(k[h * dim + d + i], key + d * kTogether + i);
            for (int64_t d = 0; d < dim; ++d) store_as(v[h * dim + d], value + each * d);
        }
    }
}

}  // namespace gpt_fast
