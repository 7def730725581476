// The keys and values of attention in pages (attention.py has the pages), in the order that products want.
//
// Sixteen places, from a multiple of 16 on, lie together. A lane of a vector has 4 bytes, so E numbers of the cache: 4 of
// int8, 2 of bfloat16, 1 of float32. Sixteen keys stand side by side, with E neighbours of the head each; and for each
// column of the head E values stand side by side:
//
//   keys [sixteens, K, D / E, 16, E]; values [sixteens, K, 16 / E, D, E]
//
// Keys of int8 have 128 added. Scales of int8, of keys and of values: [sixteens, K, 16].
#pragma once

#include "softmax.h"

namespace gpt_fast {

constexpr int64_t kTogether = 16;  // places that lie together

// Shapes as in attention.py. q and out [N, H, D] (row strides below). Cached: float, uint16_t (bfloat16) or int8_t.
template <class Cached>
struct Paged {
    static constexpr int64_t kEach = 4 / sizeof(Cached);

    const float* q;
    int64_t q_stride;  // floats from one token's heads to the next one's
    float* out;        // [N, H, out_dim], contiguous
    const Cached* k_cache;
    const Cached* v_cache;
    const float* k_scale;  // int8_t only
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

    int64_t group() const { return heads / kv_heads; }
    int64_t state_dim() const { return state_dim_of(head_dim); }
    Adjust adjust(int64_t kv_head) const { return {cap, slopes ? slopes + kv_head * group() : nullptr}; }

    // Where positions [begin, end) of a sequence are in the cache: page * page_size + offset. Page by page, as
    // divisions are slow.
    void locate(int64_t sequence, int64_t begin, int64_t end, int64_t* places) const {
        for (int64_t position = begin; position < end;) {
            const int64_t in_page = position % page_size, left = page_size - in_page;
            const int64_t place = page_table[sequence * pages_per_slot + position / page_size] * page_size + in_page;
            const int64_t count = end - position < left ? end - position : left;
            for (int64_t i = 0; i < count; ++i) *places++ = place + i;
            position += count;
        }
    }
};

}  // namespace gpt_fast
