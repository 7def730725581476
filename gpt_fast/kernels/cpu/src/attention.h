// Attention over the paged cache: any mixture of prefill, decode and verify in one call (attention.py has the layout).
//
// Every query's keys are taken in blocks of kKeys at fixed absolute positions, and blocks in splits of kSplit. A split
// is a softmax of its own (online, Milakov & Gimelshein 2018, arXiv 1805.02867); splits are merged in ascending order
// (Dao et al. 2023, Flash-Decoding). So a query's result depends neither on what else is in the step nor on how its
// prompt was cut into chunks nor on threads. Nothing outside a sequence's context is read: pages keep stale values.
//
// Work is handed out in one of two ways. Prompts: by (sequence, piece of its queries, key-value head), all splits in
// turn. Decoding, or little work for the threads: by (sequence, split), each part into a place of its own, merged
// afterwards. All query heads of a key-value head are computed together, so that keys and values are read once for
// them; and where one item has all key-value heads, memory is read from one end to the other, not a head here and
// there.
#pragma once

#include <algorithm>

#include "elementwise.h"

namespace gpt_fast {

constexpr int64_t kKeys = 32;
constexpr int64_t kSplit = 512;
constexpr int64_t kQueryPiece = 8;  // tokens of one sequence that share a pass over its keys

// Shapes as in attention.py. q and out [N, H, D] (row strides below), cache [pages, page_size, K, D].
// Cached: float, uint16_t (bfloat16), or int8_t with a scale for each head of each place.
template <class Cached>
struct Paged {
    const float* q;
    int64_t q_stride;  // floats from one token's heads to the next one's
    float* out;        // [N, H, out_dim], contiguous
    const Cached* k_cache;
    const Cached* v_cache;
    const float* k_scale;  // [pages, page_size, K], int8_t only
    const float* v_scale;
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    int64_t slots, pages_per_slot, page_size;
    int64_t heads, kv_heads, head_dim;  // of q and of the cache: a multiple of 8
    int64_t out_dim;                    // columns of a head that count
    int64_t window;
    float scale;
    float cap;            // scores become cap * tanh(score / cap); 0: they stay
    const float* slopes;  // [H] or null: a score falls by so much with each position of distance
    const float* sinks;   // [H] or null: scores without a key

    // The first head of positions [begin, end) of a slot, in heads of a cache; page by page, as divisions are slow.
    void locate(int64_t slot, int64_t begin, int64_t end, int64_t* places) const {
        for (int64_t position = begin; position < end;) {
            const int64_t in_page = position % page_size, left = page_size - in_page;
            const int64_t place = page_table[slot * pages_per_slot + position / page_size] * page_size + in_page;
            const int64_t count = end - position < left ? end - position : left;
            for (int64_t i = 0; i < count; ++i) *places++ = (place + i) * kv_heads;
            position += count;
        }
    }

    void prefetch(const Cached* cache, int64_t head) const {
        const char* at = reinterpret_cast<const char*>(cache + head * head_dim);
        for (int64_t byte = 0; byte < head_dim * static_cast<int64_t>(sizeof(Cached)); byte += 64)
            gpt_fast::prefetch(at + byte);
    }
};

// Running softmax of one query head: sum of values weighted by e^(score - max), sum of weights, max.
struct Partial {
    float* value;  // [D]
    float* sum;
    float* max;
};

inline void clear(const Partial& p, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) p.value[d] = 0.0f;
    *p.sum = 0.0f, *p.max = -__builtin_inff();
}

inline float exp_one(float x) { return first_lane(exp8(splat(x))); }

// into = into and then other.
inline void merge(const Partial& into, const Partial& other, int64_t dim) {
    if (*other.max == -__builtin_inff() && *other.sum == 0.0f) return;
    // A NaN on either side must survive.
    const float top = *into.max > *other.max ? *into.max : *other.max;
    const float keep = exp_one(*into.max - top), add = exp_one(*other.max - top);
    for (int64_t d = 0; d < dim; ++d) into.value[d] = into.value[d] * keep + other.value[d] * add;
    *into.sum = *into.sum * keep + *other.sum * add;
    *into.max = top;
}

// The same for states side by side, [D] and then sum and max each.
inline void merge_states(float* into, float* other, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count; ++i, into += dim + 2, other += dim + 2)
        merge({into, into + dim, into + dim + 1}, {other, other + dim, other + dim + 1}, dim);
}

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

// Scores of one block to weights, in place, and its sum and largest score into `state`; returns what the earlier
// values are to be multiplied with.
inline float softmax_block(float* weights, const Partial& state) {
    F8 top = load8(weights);
    for (int64_t i = 8; i < kKeys; i += 8) top = larger(top, load8(weights + i));
    float max = lane_max(top);
    max = *state.max > max ? *state.max : max;
    F8 total = splat(0.0f);
    // Should all be -infinity, the difference would be NaN: such a block has no weight.
    const F8 shift = splat(max == -__builtin_inff() ? 0.0f : max);
    for (int64_t i = 0; i < kKeys; i += 8) {
        const F8 e = exp8(load8(weights + i) - shift);
        store8(weights + i, e);
        total = total + e;
    }
    const float keep = *state.sum == 0.0f ? 0.0f : exp_one(*state.max - max);
    *state.sum = *state.sum * keep + lane_sum(total);
    *state.max = max;
    return keep;
}

// What is done to scores beside scaling. `slopes`: of the heads in turn, or null; `distance`: from the query to the first
// key of the block, negative for keys before it.
struct Adjust {
    float cap;
    const float* slopes;
    int64_t distance;
};

inline void adjust_scores(float* scores, const Adjust& a, float slope) {
    for (int64_t i = 0; i < kKeys; i += 8) {
        F8 v = load8(scores + i);
        const F8 hidden = less(v, splat(-3e38f));
        if (a.cap != 0.0f) v = choose(hidden, v, splat(a.cap) * tanh8(v * splat(1.0f / a.cap)));
        if (a.slopes) {
            alignas(32) float fall[8];
            for (int64_t j = 0; j < 8; ++j) fall[j] = slope * static_cast<float>(a.distance + i + j);
            v = choose(hidden, v, v + load8(fall));
        }
        store8(scores + i, v);
    }
}

// One block of keys for R query heads: scores, weights, and the values into the states. q [R, D], states [R, D + 2]:
// [D] and then sum and max each. Keys [begin, end) of the block.
template <int R>
inline void attend_block(const float* q, float* states, const float* const* keys, const float* const* values,
                         int64_t begin, int64_t end, int64_t dim, float scale, const Adjust* adjust) {
    alignas(32) float weights[R][kKeys];
    const float* heads[R];
    float *into[R], kept[R];
    for (int r = 0; r < R; ++r) {
        heads[r] = q + r * dim;
        into[r] = states + r * (dim + 2);
        for (float& weight : weights[r]) weight = -__builtin_inff();
    }
    scores_of<R>(heads, keys, begin, end, dim, scale, weights);
    if (adjust)
        for (int r = 0; r < R; ++r) adjust_scores(weights[r], *adjust, adjust->slopes ? adjust->slopes[r] : 0.0f);
    for (int r = 0; r < R; ++r) kept[r] = softmax_block(weights[r], {into[r], into[r] + dim, into[r] + dim + 1});
    constexpr int W = 8 / R;  // eight sums at once hide each other's latency
    int64_t d = 0;
    for (; d + 8 * W <= dim; d += 8 * W) add_values<R, W>(into, kept, weights, values, begin, end, d);
    for (; d < dim; d += 8) add_values<R, 1>(into, kept, weights, values, begin, end, d);
}

// The same for all query heads of a key-value head.
inline void attend_heads(const float* q, float* states, int64_t group, const float* const* keys,
                         const float* const* values, int64_t begin, int64_t end, int64_t dim, float scale,
                         const Adjust* adjust) {
    Adjust own{};
    if (adjust) own = *adjust, adjust = &own;
    while (group > 0) {
        const int64_t now = group >= 4 ? 4 : group >= 2 ? 2 : 1;
        if (now == 4)
            attend_block<4>(q, states, keys, values, begin, end, dim, scale, adjust);
        else if (now == 2)
            attend_block<2>(q, states, keys, values, begin, end, dim, scale, adjust);
        else
            attend_block<1>(q, states, keys, values, begin, end, dim, scale, adjust);
        group -= now, q += now * dim, states += now * (dim + 2);
        if (own.slopes) own.slopes += now;
    }
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

// Tokens [first, last) of a slot's queries, heads [kv_begin, kv_end) of the cache, against keys of [split, split + 1) *
// kSplit; state[kv_head - kv_begin][token - first][query head of kv_head].
template <class Cached>
void attend_split(const Paged<Cached>& p, int64_t slot, int64_t first, int64_t last, int64_t kv_begin, int64_t kv_end,
                  int64_t split, float* state) {
    static thread_local Scratch widened;
    float* room = widened.get<float>(2 * kKeys * p.head_dim);
    const int64_t group = p.heads / p.kv_heads, record = p.head_dim + 2, states = (last - first) * group;
    const int64_t end = p.query_start[slot + 1], length = p.context_len[slot];
    for (int64_t i = 0; i < (kv_end - kv_begin) * states; ++i) {
        float* s = state + i * record;
        clear({s, s + p.head_dim, s + p.head_dim + 1}, p.head_dim);
    }
    const int64_t top = length - end + last;  // positions that the last of the queries may see
    const int64_t lowest = p.window ? length - end + first + 1 - p.window : 0;
    const int64_t key_end = (split + 1) * kSplit < top ? (split + 1) * kSplit : top;
    for (int64_t base = split * kSplit; base < key_end; base += kKeys) {
        if (base + kKeys <= lowest) continue;
        const int64_t from = lowest > base ? lowest - base : 0;
        const int64_t count = key_end - base < kKeys ? key_end - base : kKeys;
        const int64_t next = std::clamp<int64_t>(key_end - base - kKeys, 0, kKeys);
        int64_t places[kKeys], next_places[kKeys];
        p.locate(slot, base + from, base + count, places);
        p.locate(slot, base + kKeys, base + kKeys + next, next_places);
        for (int64_t kv_head = kv_begin; kv_head < kv_end; ++kv_head) {
            const float *keys[kKeys], *values[kKeys];
            for (int64_t i = from; i < count; ++i) {
                const int64_t place = places[i - from] + kv_head;
                keys[i] = widen(p.k_cache, p.k_scale, place, p.head_dim, room + i * p.head_dim);
                values[i] = widen(p.v_cache, p.v_scale, place, p.head_dim, room + (kKeys + i) * p.head_dim);
            }
            for (int64_t i = 0; i < next; ++i) {  // comes in while this one is computed
                p.prefetch(p.k_cache, next_places[i] + kv_head);
                p.prefetch(p.v_cache, next_places[i] + kv_head);
            }
            for (int64_t token = first; token < last; ++token) {
                const int64_t position = length - end + token;
                const int64_t begin = p.window && position + 1 - p.window > base ? position + 1 - p.window - base : 0;
                const int64_t stop = position + 1 - base < count ? position + 1 - base : count;
                const Adjust adjust{p.cap, p.slopes ? p.slopes + kv_head * group : nullptr, base - position};
                if (begin < stop)
                    attend_heads(p.q + token * p.q_stride + kv_head * group * p.head_dim,
                                 state + ((kv_head - kv_begin) * states + (token - first) * group) * record, group,
                                 keys, values, begin, stop, p.head_dim, p.scale,
                                 p.cap != 0.0f || p.slopes ? &adjust : nullptr);
            }
        }
    }
}

template <class Cached>
void finish(const Paged<Cached>& p, int64_t first, int64_t last, int64_t kv_head, const float* state) {
    const int64_t group = p.heads / p.kv_heads, record = p.head_dim + 2;
    for (int64_t token = first; token < last; ++token)
        for (int64_t h = 0; h < group; ++h) {
            const float* s = state + ((token - first) * group + h) * record;
            const int64_t head = kv_head * group + h;
            float* to = p.out + (token * p.heads + head) * p.out_dim;
            float sum = s[p.head_dim];
            if (p.sinks) {
                const float most = s[p.head_dim + 1];
                sum += exp_one(p.sinks[head] - most);
            }
            for (int64_t d = 0; d < p.out_dim; ++d) to[d] = s[d] / sum;
        }
}

// What the threads share out: pieces of queries, found by walking the slots.
struct Piece {
    int64_t slot, first, last, split_begin, split_end;
};

template <class Cached>
int64_t count_pieces(const Paged<Cached>& p) {
    int64_t count = 0;
    for (int64_t s = 0; s < p.slots; ++s) count += ceil_div(p.query_start[s + 1] - p.query_start[s], kQueryPiece);
    return count;
}

template <class Cached>
Piece find_piece(const Paged<Cached>& p, int64_t index) {
    int64_t slot = 0;
    for (;; ++slot) {
        const int64_t here = ceil_div(p.query_start[slot + 1] - p.query_start[slot], kQueryPiece);
        if (index < here) break;
        index -= here;
    }
    const int64_t first = p.query_start[slot] + index * kQueryPiece, end = p.query_start[slot + 1];
    const int64_t last = first + kQueryPiece < end ? first + kQueryPiece : end;
    const int64_t length = p.context_len[slot], lowest = p.window ? length - end + first + 1 - p.window : 0;
    return {slot, first, last, lowest > 0 ? lowest / kSplit : 0, ceil_div(length - end + last, kSplit)};
}

// Called by the whole team; keys and values of the step must be in the cache. Ends without a barrier.
// `shared` has room for attention_scratch() floats.
template <class Cached>
void paged_attention(Team& team, const Paged<Cached>& p, float* shared) {
    static thread_local Scratch own_scratch;
    const int64_t group = p.heads / p.kv_heads, record = p.head_dim + 2;
    const int64_t pieces = count_pieces(p), items = pieces * p.kv_heads;
    const bool decoding = pieces == p.query_start[p.slots];              // one token each
    const int64_t size = (decoding ? 1 : kQueryPiece) * group * record;  // of the states of one key-value head
    if (!decoding && items >= 2 * team.size) {
        float* own = own_scratch.get<float>(2 * size);
        team.share(items, 1, [&](int64_t index, int64_t) {
            const Piece piece = find_piece(p, index / p.kv_heads);
            const int64_t kv_head = index % p.kv_heads, states = (piece.last - piece.first) * group;
            for (int64_t split = piece.split_begin; split < piece.split_end; ++split) {
                float* part = own + (split > piece.split_begin ? size : 0);
                attend_split(p, piece.slot, piece.first, piece.last, kv_head, kv_head + 1, split, part);
                if (part != own) merge_states(own, part, states, p.head_dim);
            }
            finish(p, piece.first, piece.last, kv_head, own);
        });
        return;
    }
    int64_t most = 1;  // splits of a piece
    for (int64_t i = 0; i < pieces; ++i) {
        const Piece piece = find_piece(p, i);
        most = std::max(most, piece.split_end - piece.split_begin);
    }
    const int64_t together = decoding && pieces * most >= 2 * team.size ? p.kv_heads : 1, parts = p.kv_heads / together;
    auto part_of = [&](int64_t piece, int64_t split, int64_t kv_head) {
        return shared + ((piece * most + split) * p.kv_heads + kv_head) * size;
    };
    team.share(pieces * most * parts, 1, [&](int64_t index, int64_t) {
        const int64_t which = index / parts / most, split = index / parts % most, kv_head = index % parts * together;
        const Piece piece = find_piece(p, which);
        if (piece.split_begin + split < piece.split_end)
            attend_split(p, piece.slot, piece.first, piece.last, kv_head, kv_head + together, piece.split_begin + split,
                         part_of(which, split, kv_head));
    });
    team.barrier();
    team.share(items, 1, [&](int64_t index, int64_t) {
        const int64_t which = index / p.kv_heads, kv_head = index % p.kv_heads;
        const Piece piece = find_piece(p, which);
        float* total = part_of(which, 0, kv_head);
        for (int64_t split = 1; split < piece.split_end - piece.split_begin; ++split)
            merge_states(total, part_of(which, split, kv_head), (piece.last - piece.first) * group, p.head_dim);
        finish(p, piece.first, piece.last, kv_head, total);
    });
}

// Floats of `shared` for a team of `threads`, and for contexts of at most `longest` tokens in `slots` sequences.
inline int64_t attention_scratch(int threads, int64_t slots, int64_t longest, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim) {
    const int64_t few = 2 * team_size(threads) * kQueryPiece * (heads / kv_heads), decoding = slots * heads;
    return std::max(few, decoding) * ceil_div(longest, kSplit) * (head_dim + 2);
}

// One head's numbers to int8: the rule of reference.py, quantize_heads.
inline void quantize_head(const float* x, int64_t dim, int8_t* values, float* scale) {
    F8 largest = splat(0.0f);
    for (int64_t d = 0; d < dim; d += 8) largest = larger(largest, magnitude(load8(x + d)));
    const float most = lane_max(largest), inverse = most == 0.0f ? 0.0f : 127.0f / most;
    for (int64_t d = 0; d < dim; ++d) values[d] = static_cast<int8_t>(__builtin_rintf(x[d] * inverse));
    *scale = most / 127.0f;
}

// One token's keys or values [K, D] to its slot of the cache.
template <class Cached>
void write_row(const float* x, int64_t kv_heads, int64_t head_dim, int64_t slot, Cached* cache, float* scales) {
    const int64_t place = slot * kv_heads;
    if constexpr (std::is_same_v<Cached, int8_t>)
        for (int64_t h = 0; h < kv_heads; ++h)
            quantize_head(x + h * head_dim, head_dim, cache + (place + h) * head_dim, scales + place + h);
    else
        for (int64_t d = 0; d < kv_heads * head_dim; ++d) store_as(x[d], cache + place * head_dim + d);
}

}  // namespace gpt_fast
