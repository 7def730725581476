// The keys and values of attention in pages (attention.py has the layout).
#pragma once

#include "softmax.h"

namespace gpt_fast {

constexpr int64_t kSixteen = 16;  // places of a cache of int8 that lie together (attention_bytes.h)

// Shapes as in attention.py. q and out [N, H, D] (row strides below). Cached: float or uint16_t (bfloat16), with a
// cache of [pages, page_size, K, D]; or int8_t, as attention_bytes.h has it, with a scale for each head of each place.
template <class Cached>
struct Paged {
    static constexpr int64_t kTogether = std::is_same_v<Cached, int8_t> ? kSixteen : 1;

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
