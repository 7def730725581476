// Attention over the paged cache: any mixture of prefill, decode and verify in one call (attention.py has the layout).
//
// Every query's keys are taken in blocks of kKeys at fixed absolute positions, and blocks in splits of kSplit. A split
// is a softmax of its own (online, Milakov & Gimelshein 2018, arXiv 1805.02867); splits are merged in ascending order
// (Dao et al. 2023, Flash-Decoding). So a query's result depends neither on what else is in the step nor on how its
// prompt was cut into chunks nor on threads. Nothing outside a sequence's context is read: pages keep stale values.
//
// Work is handed out by (sequence, piece of its queries, key-value head); all query heads of a key-value head are
// computed together, so that keys and values are read once for them. When there is little such work for the threads, as
// in decoding one long sequence, the splits are computed in parallel and merged afterwards.
#pragma once

#include "common.h"

namespace gpt_fast {

constexpr int64_t kKeys = 64;
constexpr int64_t kSplit = 512;
constexpr int64_t kQueryPiece = 8;  // tokens of one sequence that share a pass over its keys

// Shapes as in attention.py. q and out [N, H, D] (row strides below), cache [pages, page_size, K, D].
template <class Cached>
struct Paged {
    const float* q;
    int64_t q_stride;  // floats from one token's heads to the next one's
    float* out;  // [N, H, D], contiguous
    const Cached* k_cache;
    const Cached* v_cache;
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    int64_t slots, pages_per_slot, page_size;
    int64_t heads, kv_heads, head_dim;
    int64_t window;
    float scale;

    // Where positions [begin, end) of a slot lie in the caches, in elements; page by page, as divisions are slow.
    void locate(int64_t slot, int64_t begin, int64_t end, int64_t kv_head, int64_t* offsets) const {
        for (int64_t position = begin; position < end;) {
            const int64_t in_page = position % page_size, left = page_size - in_page;
            const int64_t place = page_table[slot * pages_per_slot + position / page_size] * page_size + in_page;
            const int64_t count = end - position < left ? end - position : left;
            for (int64_t i = 0; i < count; ++i) *offsets++ = ((place + i) * kv_heads + kv_head) * head_dim;
            position += count;
        }
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

inline float exp_one(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

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

// q . k for keys [begin, end) of a block, one query head. D is a multiple of 8. Eight keys at a time: a sum waits four
// cycles for the one before, and adding up lanes costs as much as the products unless four keys share it. An eight that
// is not full repeats a key, which changes nothing for the others.
inline void scores_of(const float* q, const float* const* keys, int64_t begin, int64_t end, int64_t dim, float scale,
                      float* scores) {
    for (int64_t i = begin / 8 * 8; i < end; i += 8) {
        const float* key[8];
        __m256 sum[8];
#pragma GCC unroll 8
        for (int64_t j = 0; j < 8; ++j) {
            key[j] = keys[i + j < begin ? begin : i + j < end ? i + j : end - 1];
            sum[j] = _mm256_setzero_ps();
        }
        for (int64_t d = 0; d < dim; d += 8) {
            const __m256 qv = load8(q + d);
#pragma GCC unroll 8
            for (int64_t j = 0; j < 8; ++j) sum[j] = _mm256_fmadd_ps(qv, load8(key[j] + d), sum[j]);
        }
        alignas(16) float dots[8];
#pragma GCC unroll 2
        for (int64_t j = 0; j < 8; j += 4) {
            const __m256 pairs =
                _mm256_hadd_ps(_mm256_hadd_ps(sum[j], sum[j + 1]), _mm256_hadd_ps(sum[j + 2], sum[j + 3]));
            const __m128 four = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
            _mm_store_ps(dots + j, _mm_mul_ps(four, _mm_set1_ps(scale)));
        }
        for (int64_t j = 0; j < 8; ++j)
            if (i + j >= begin && i + j < end) scores[i + j] = dots[j];
    }
}

// value[d .. d + 8 W) = value * kept + sum of weights * values, keys in ascending order.
template <int W>
inline void add_values(float* value, __m256 kept, const float* weights, const float* const* values, int64_t begin,
                       int64_t end, int64_t d) {
    __m256 acc[W];
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) acc[j] = _mm256_mul_ps(load8(value + d + 8 * j), kept);
    for (int64_t i = begin; i < end; ++i) {
        const __m256 weight = _mm256_broadcast_ss(weights + i);
        const float* from = values[i] + d;
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) acc[j] = _mm256_fmadd_ps(weight, load8(from + 8 * j), acc[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) _mm256_storeu_ps(value + d + 8 * j, acc[j]);
}

// One block of keys for one query head: scores, weights, and the values into `state`. Keys [begin, end) of the block.
inline void attend_block(const float* q, const float* const* keys, const float* const* values, int64_t begin,
                         int64_t end, int64_t dim, float scale, const Partial& state) {
    alignas(32) float weights[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) weights[i] = -__builtin_inff();
    scores_of(q, keys, begin, end, dim, scale, weights);
    __m256 top = _mm256_load_ps(weights);
    for (int64_t i = 8; i < kKeys; i += 8) top = _mm256_max_ps(top, _mm256_load_ps(weights + i));
    float max = lane_max(top);
    max = *state.max > max ? *state.max : max;
    __m256 total = _mm256_setzero_ps();
    // Should all be -infinity, the difference would be NaN: such a block has no weight.
    const __m256 shift = _mm256_set1_ps(max == -__builtin_inff() ? 0.0f : max);
    for (int64_t i = 0; i < kKeys; i += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_load_ps(weights + i), shift));
        _mm256_store_ps(weights + i, e);
        total = _mm256_add_ps(total, e);
    }
    const float keep = *state.sum == 0.0f ? 0.0f : exp_one(*state.max - max);
    *state.sum = *state.sum * keep + lane_sum(total);
    *state.max = max;
    const __m256 kept = _mm256_set1_ps(keep);
    int64_t d = 0;  // eight sums at once hide each other's latency
    for (; d + 64 <= dim; d += 64) add_values<8>(state.value, kept, weights, values, begin, end, d);
    for (; d + 32 <= dim; d += 32) add_values<4>(state.value, kept, weights, values, begin, end, d);
    for (; d < dim; d += 8) add_values<1>(state.value, kept, weights, values, begin, end, d);
}

// A key or value as float32: where it lies, or widened into `room`.
inline const float* widen(const float* from, int64_t, float*) { return from; }

inline const float* widen(const uint16_t* from, int64_t dim, float* room) {
    for (int64_t d = 0; d < dim; d += 8) _mm256_storeu_ps(room + d, load8(from + d));
    return room;
}

// Tokens [first, last) of a slot's queries against keys of [split, split + 1) * kSplit; state[token - first][head].
template <class Cached>
void attend_split(const Paged<Cached>& p, int64_t slot, int64_t first, int64_t last, int64_t kv_head, int64_t split,
                  float* state) {
    static thread_local Scratch widened;
    float* room = widened.get<float>(2 * kKeys * p.head_dim);
    const int64_t group = p.heads / p.kv_heads, record = p.head_dim + 2;
    const int64_t end = p.query_start[slot + 1], length = p.context_len[slot];
    for (int64_t i = 0; i < (last - first) * group; ++i) {
        float* s = state + i * record;
        clear({s, s + p.head_dim, s + p.head_dim + 1}, p.head_dim);
    }
    const int64_t top = length - end + last;  // positions that the last of the queries may see
    const int64_t lowest = p.window ? length - end + first + 1 - p.window : 0;
    const int64_t key_end = (split + 1) * kSplit < top ? (split + 1) * kSplit : top;
    for (int64_t base = split * kSplit; base < key_end; base += kKeys) {
        if (base + kKeys <= lowest) continue;
        const float *keys[kKeys], *values[kKeys];
        const int64_t from = lowest > base ? lowest - base : 0;
        const int64_t count = key_end - base < kKeys ? key_end - base : kKeys;
        int64_t offsets[kKeys];
        p.locate(slot, base + from, base + count, kv_head, offsets);
        for (int64_t i = from; i < count; ++i) {
            const int64_t at = offsets[i - from];
            keys[i] = widen(p.k_cache + at, p.head_dim, room + i * p.head_dim);
            values[i] = widen(p.v_cache + at, p.head_dim, room + (kKeys + i) * p.head_dim);
        }
        if (base + kKeys < key_end) {  // the next block comes in while this one is computed
            const int64_t next_end = base + 2 * kKeys < key_end ? base + 2 * kKeys : key_end;
            p.locate(slot, base + kKeys, next_end, kv_head, offsets);
            for (int64_t i = 0; i < next_end - base - kKeys; ++i)
                for (int64_t byte = 0; byte < p.head_dim * static_cast<int64_t>(sizeof(Cached)); byte += 64) {
                    _mm_prefetch(reinterpret_cast<const char*>(p.k_cache + offsets[i]) + byte, _MM_HINT_T1);
                    _mm_prefetch(reinterpret_cast<const char*>(p.v_cache + offsets[i]) + byte, _MM_HINT_T1);
                }
        }
        for (int64_t token = first; token < last; ++token) {
            const int64_t position = length - end + token;
            const int64_t begin = p.window && position + 1 - p.window > base ? position + 1 - p.window - base : 0;
            const int64_t stop = position + 1 - base < count ? position + 1 - base : count;
            if (begin >= stop) continue;
            for (int64_t h = 0; h < group; ++h) {
                float* s = state + ((token - first) * group + h) * record;
                attend_block(p.q + token * p.q_stride + (kv_head * group + h) * p.head_dim, keys, values, begin, stop,
                             p.head_dim, p.scale, {s, s + p.head_dim, s + p.head_dim + 1});
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
            float* to = p.out + (token * p.heads + kv_head * group + h) * p.head_dim;
            for (int64_t d = 0; d < p.head_dim; ++d) to[d] = s[d] / s[p.head_dim];
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
    const int64_t pieces = count_pieces(p), items = pieces * p.kv_heads, size = kQueryPiece * group * record;
    float* own = own_scratch.get<float>(2 * size);
    int64_t most = 1;
    if (items < 2 * team.size)
        for (int64_t i = 0; i < pieces; ++i) {
            const Piece piece = find_piece(p, i);
            most = piece.split_end - piece.split_begin > most ? piece.split_end - piece.split_begin : most;
        }
    if (most > 1) {  // few items: splits in parallel, each into its place in `shared`
        team.share(items * most, 1, [&](int64_t index, int64_t) {
            const Piece piece = find_piece(p, index / most / p.kv_heads);
            const int64_t split = piece.split_begin + index % most;
            if (split < piece.split_end)
                attend_split(p, piece.slot, piece.first, piece.last, index / most % p.kv_heads, split,
                             shared + index * size);
        });
        team.barrier();
    }
    team.share(items, 1, [&](int64_t index, int64_t) {
        const Piece piece = find_piece(p, index / p.kv_heads);
        const int64_t kv_head = index % p.kv_heads, states = (piece.last - piece.first) * group;
        float* total = own;
        for (int64_t split = piece.split_begin; split < piece.split_end; ++split) {
            float* part = most > 1 ? shared + (index * most + split - piece.split_begin) * size
                                   : own + (split > piece.split_begin ? size : 0);
            if (most == 1) attend_split(p, piece.slot, piece.first, piece.last, kv_head, split, part);
            if (split == piece.split_begin) total = part;
            for (int64_t i = 0; i < states && part != total; ++i) {
                float *a = total + i * record, *b = part + i * record;
                merge({a, a + p.head_dim, a + p.head_dim + 1}, {b, b + p.head_dim, b + p.head_dim + 1}, p.head_dim);
            }
        }
        finish(p, piece.first, piece.last, kv_head, total);
    });
}

// Floats of `shared` for a team of `threads` and contexts of at most `longest` tokens.
inline int64_t attention_scratch(int threads, int64_t longest, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    return 2 * threads * ceil_div(longest, kSplit) * kQueryPiece * (heads / kv_heads) * (head_dim + 2);
}

// One token's keys and values [K * D] to its slot of the cache.
template <class Cached>
void write_row(const float* k, const float* v, int64_t kv_dim, int64_t slot, Cached* k_cache, Cached* v_cache) {
    for (int64_t d = 0; d < kv_dim; ++d) store_as(k[d], k_cache + slot * kv_dim + d);
    for (int64_t d = 0; d < kv_dim; ++d) store_as(v[d], v_cache + slot * kv_dim + d);
}

}  // namespace gpt_fast
