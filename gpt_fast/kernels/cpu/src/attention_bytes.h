// Keys and values of int8 as the cache has them: in the order and the form that products of bytes want.
//
// Sixteen places, from a multiple of 16 on, lie together: sixteen keys side by side, with four neighbours of the head
// each, and for each column of the head four values side by side:
//
//   keys [sixteens, K, D / 4, 16, 4], 128 more each; values [sixteens, K, 4, D, 4]; scales of both [sixteens, K, 16]
//
// Where pages are whole sixteens, products read the cache itself. Pages of another size work as well, slowly: their
// keys and values are copied first.
#pragma once

#include "attention_block.h"

namespace gpt_fast {

// Where a token stands says its place alone (attention_block.h).
template <int64_t N>
struct Rows<int8_t, N> {
    int64_t from, end, place[N];

    void set(const Paged<int8_t>&, int64_t i, int64_t at) { place[i] = at; }
};

// One head's keys and values of a block of N.
template <int64_t N>
class ByteBlock {
public:
    const uint8_t* keys[N / kSixteen];         // [D / 4, 16, 4] each
    const uint8_t* values[N / 4];              // [columns, 4] each
    alignas(64) float k_scale[N], v_scale[N];  // those of values are 0 where nothing was loaded

    explicit ByteBlock(const Paged<int8_t>& p) : p_(p), columns_(p.state_dim()), whole_(p.page_size % kSixteen == 0) {
        if (whole_ && p.head_dim == columns_) return;
        static thread_local Scratch scratch;
        copies_ = scratch.get<uint8_t>(N * (p.head_dim + columns_));
        std::memset(copies_, 0, static_cast<size_t>(N * (p.head_dim + columns_)));
    }

    void find(const Rows<int8_t, N>& rows, int64_t kv_head) {
        if (whole_)
            for (int64_t i = 0; i < N; i += kSixteen) point(rows, i, kv_head);
        else
            for (int64_t i = 0; i < N; ++i) copy(rows.place[i], i, kv_head);
        for (int64_t i = 0; i < rows.from; ++i) v_scale[i] = 0.0f;
        for (int64_t i = rows.end; i < N; ++i) v_scale[i] = 0.0f;
    }

private:
    // Which of all heads of all sixteens.
    int64_t head_at(int64_t place, int64_t kv_head) const { return place / kSixteen * p_.kv_heads + kv_head; }

    const uint8_t* at(const int8_t* cache, int64_t head) const {
        return reinterpret_cast<const uint8_t*>(cache + head * p_.head_dim * kSixteen);
    }

    uint8_t* copied_values(int64_t i) { return copies_ + N * p_.head_dim + i * columns_; }

    // At key i, a multiple of 16.
    void point(const Rows<int8_t, N>& rows, int64_t i, int64_t kv_head) {
        const int64_t dim = p_.head_dim, head = head_at(rows.place[std::clamp(i, rows.from, rows.end - 1)], kv_head);
        keys[i / kSixteen] = at(p_.k_cache, head);
        const uint8_t* from = at(p_.v_cache, head);
        for (int64_t four = i; four < i + kSixteen; four += 4, from += 4 * dim) {
            values[four / 4] = from;
            if (dim == columns_) continue;
            uint8_t* to = copied_values(four);
            std::memcpy(to, from, static_cast<size_t>(4 * dim));
            values[four / 4] = to;
        }
        store16(k_scale + i, load16(p_.k_scale + head * kSixteen));
        store16(v_scale + i, load16(p_.v_scale + head * kSixteen));
    }

    void copy(int64_t place, int64_t i, int64_t kv_head) {
        const int64_t dim = p_.head_dim, head = head_at(place, kv_head), lane = place % kSixteen;
        uint8_t* some_keys = copies_ + i / kSixteen * kSixteen * dim;
        const uint8_t* from = at(p_.k_cache, head) + 4 * lane;
        for (int64_t d = 0; d < dim; d += 4)
            std::memcpy(some_keys + d * kSixteen + i % kSixteen * 4, from + d * kSixteen, 4);
        uint8_t* four = copied_values(i / 4 * 4);
        from = at(p_.v_cache, head) + lane / 4 * 4 * dim + lane % 4;
        for (int64_t d = 0; d < dim; ++d) four[4 * d + i % 4] = from[4 * d];
        keys[i / kSixteen] = some_keys, values[i / 4] = four;
        k_scale[i] = p_.k_scale[head * kSixteen + lane], v_scale[i] = p_.v_scale[head * kSixteen + lane];
    }

    const Paged<int8_t>& p_;
    const int64_t columns_;
    const bool whole_;           // pages are whole sixteens
    uint8_t* copies_ = nullptr;  // keys [N / 16, D / 4, 16, 4], values [N / 4, columns, 4]
};

}  // namespace gpt_fast
