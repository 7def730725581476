// One head's keys and values of a block as the cache has them (paged.h): in the order that products want.
#pragma once

#include "attention_block.h"

namespace gpt_fast {

// A scale for each key and each value, of int8 alone; 0 where nothing was loaded.
template <class Cached, int64_t N>
struct CachedScales {};
template <int64_t N>
struct CachedScales<int8_t, N> {
    alignas(64) float k_scale[N], v_scale[N];
};

// Of N keys. Where pages are whole sixteens, products read the cache itself. Pages of another size work as well,
// slowly: their keys and values are copied first.
template <class Cached, int64_t N>
class CachedBlock : public CachedScales<Cached, N> {
public:
    using Number = std::conditional_t<std::is_same_v<Cached, int8_t>, uint8_t, Cached>;
    static constexpr int64_t kEach = Paged<Cached>::kEach;

    const Number* keys[N / kTogether];  // [D / kEach, 16, kEach] each
    const Number* values[N / kEach];    // [columns, kEach] each, of groups [first, last)
    int64_t first = 0, last = 0;

    explicit CachedBlock(const Paged<Cached>& p)
        : p_(p), columns_(p.state_dim()), whole_(p.page_size % kTogether == 0) {
        static thread_local Scratch scratch;
        const int64_t numbers = N * (p.head_dim + columns_);
        copies_ = scratch.get<Number>(numbers);
        if (!whole_ || p.head_dim != columns_) std::memset(copies_, 0, static_cast<size_t>(numbers) * sizeof(Number));
    }

    void find(const Rows<N>& rows, int64_t kv_head) {
        first = rows.from / kEach, last = ceil_div(rows.end, kEach);
        if (whole_)
            for (int64_t i = 0; i < N; i += kTogether) point(rows, i, kv_head);
        else
            for (int64_t i = 0; i < N; ++i) copy(rows.place[i], i, kv_head);
        if constexpr (kScaled) {
            for (int64_t i = 0; i < rows.from; ++i) this->k_scale[i] = this->v_scale[i] = 0.0f;
            for (int64_t i = rows.end; i < N; ++i) this->k_scale[i] = this->v_scale[i] = 0.0f;
        } else if constexpr (kEach == 2) {
            if (rows.from % 2) keep_half(rows.from - 1, 1);
            if (rows.end % 2) keep_half(rows.end - 1, 0);
        }
    }

private:
    static constexpr bool kScaled = std::is_same_v<Cached, int8_t>;

    // Which of all heads of all sixteens.
    int64_t head_at(int64_t place, int64_t kv_head) const { return place / kTogether * p_.kv_heads + kv_head; }

    const Number* at(const Cached* cache, int64_t head) const {
        return reinterpret_cast<const Number*>(cache + head * p_.head_dim * kTogether);
    }

    // Of the group at key i.
    Number* copied_values(int64_t i) { return copies_ + N * p_.head_dim + i * columns_; }

    // At key i, a multiple of 16.
    void point(const Rows<N>& rows, int64_t i, int64_t kv_head) {
        const int64_t dim = p_.head_dim, head = head_at(rows.place[std::clamp(i, rows.from, rows.end - 1)], kv_head);
        keys[i / kTogether] = at(p_.k_cache, head);
        const Number* from = at(p_.v_cache, head);
        for (int64_t group = i; group < i + kTogether; group += kEach, from += kEach * dim) {
            values[group / kEach] = from;
            if (dim == columns_) continue;
            Number* to = copied_values(group);
            std::memcpy(to, from, static_cast<size_t>(kEach * dim) * sizeof(Number));
            values[group / kEach] = to;
        }
        if constexpr (kScaled) {
            store16(this->k_scale + i, load16(p_.k_scale + head * kTogether));
            store16(this->v_scale + i, load16(p_.v_scale + head * kTogether));
        }
    }

    void copy(int64_t place, int64_t i, int64_t kv_head) {
        const int64_t dim = p_.head_dim, head = head_at(place, kv_head), lane = place % kTogether;
        Number* some_keys = copies_ + i / kTogether * kTogether * dim;
        const Number* from = at(p_.k_cache, head) + kEach * lane;
        for (int64_t d = 0; d < dim; d += kEach)
            std::memcpy(some_keys + d * kTogether + i % kTogether * kEach, from + d * kTogether, 4);
        Number* group = copied_values(i / kEach * kEach);
        from = at(p_.v_cache, head) + lane / kEach * kEach * dim + lane % kEach;
        for (int64_t d = 0; d < dim; ++d) group[kEach * d + i % kEach] = from[kEach * d];
        keys[i / kTogether] = some_keys, values[i / kEach] = group;
        if constexpr (kScaled) {
            this->k_scale[i] = p_.k_scale[head * kTogether + lane];
            this->v_scale[i] = p_.v_scale[head * kTogether + lane];
        }
    }

    // Of the pair of values at key i the other half may be anything, and 0 times anything may be no number.
    void keep_half(int64_t i, int half) {
        const Number* from = values[i / 2];
        Number* to = copied_values(i);
        const uint32_t kept = half ? 0xffff0000u : 0xffffu;
        for (int64_t d = 0; d < columns_; ++d) {
            uint32_t both;
            std::memcpy(&both, from + 2 * d, sizeof both);
            both &= kept;
            std::memcpy(to + 2 * d, &both, sizeof both);
        }
        values[i / 2] = to;
    }

    const Paged<Cached>& p_;
    const int64_t columns_;
    const bool whole_;  // pages are whole sixteens
    Number* copies_;    // keys [N / 16, D / kEach, 16, kEach], values [N / kEach, columns, kEach]
};

}  // namespace gpt_fast
