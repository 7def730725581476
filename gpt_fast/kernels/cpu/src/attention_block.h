// One head's keys and values of a block, and the queries that attend to them: what both kinds of products share.
#pragma once

#include <cmath>

#include "paged.h"
#include "softmax.h"
#include "tiles.h"

namespace gpt_fast {

// Where the tokens of a block stand in the cache. Of the block only [from, end) is to be loaded; nobody gives the rest
// a weight, and the nearest of the others stands there.
template <int64_t N>
struct Rows {
    int64_t from, end, place[N];
};

// Brings the next keys and values into the CPU's cache, a few lines at a time between the parts of the work for a
// block: many at once would fill the queue of lines that a core waits for. For one token, whose products take little
// time, into its first level if that is large enough; prompts need that for their sums.
template <class Cached>
class Ahead {
public:
    // One of `parts` of the keys and values of heads [kv_begin, kv_end) at `count` places, evenly over so much work.
    Ahead(const Paged<Cached>& p, int64_t kv_begin, int64_t kv_end, int64_t part, int64_t parts, const int64_t* places,
          int64_t count, int64_t work, bool near)
        : near_(near),
          heads_(kv_end - kv_begin),
          each_(p.kv_heads * p.head_dim * static_cast<int64_t>(sizeof(Cached))),
          bytes_(each_ / p.kv_heads * kTogether * heads_),
          places_(places),
          places_end_(places + count),
          memory_(reinterpret_cast<const char*>(p.k_cache + kv_begin * p.head_dim * kTogether)),
          values_(reinterpret_cast<const char*>(p.v_cache + kv_begin * p.head_dim * kTogether)) {
        if (kScales)
            each_scale_ = p.kv_heads, scales_ = p.k_scale + kv_begin * kTogether,
            v_scales_ = p.v_scale + kv_begin * kTogether;
        const int64_t piece = ceil_div(bytes_, kLine), lines = ceil_div(count, kTogether) * piece;
        const int64_t begin = lines * part / parts, end = lines * (part + 1) / parts;
        left_ = (kInTurns ? 1 : 2) * (end - begin), rate_ = (left_ << kBits) / work + 1;
        if (left_ > 0) go_to(places + begin / piece * kTogether), at_ += begin % piece * kLine;
    }

    // Whether lines of keys and of values are asked for in turns, else all keys before all values. A loop reads 38 to 42
    // GB/s if all heads of a block are asked for, in turns and in the order of memory, and 31 head by head (Xeon, AMX).
    static constexpr bool kInTurns = kTiles;

    // Whether the first level gets it.
    bool near() const { return near_; }

    [[gnu::always_inline]] void fetch(int64_t work) {
        int64_t due = due_ + work * rate_, lines = due >> kBits;
        asm("" : "+r"(due), "+r"(lines));  // else gcc computes them in registers of vectors, which products need
        lines = std::min(lines, left_);
        due_ = due - (lines << kBits), left_ -= lines;
        if (near_)
            walk(lines, [](const char* at) { prefetch(at); });
        else
            walk(lines, [](const char* at) { prefetch_to_level2(at); });
    }

private:
    static constexpr bool kScales = std::is_same_v<Cached, int8_t>;
    static constexpr int kBits = 24;  // of lines for a unit of work behind the point: divisions are slow

    template <class Body>
    void walk(int64_t lines, Body body) {
        for (; lines > 0; --lines) {
            body(at_);
            if (kInTurns) body(at_ + (values_ - memory_));
            at_ += kLine;
            if (at_ < end_) continue;
            const bool last = places_end_ - now_ <= kTogether;
            if (last && !kInTurns) memory_ = values_, scales_ = v_scales_;
            go_to(last ? places_ : now_ + kTogether);
        }
    }

    void go_to(const int64_t* place) {
        const int64_t first = *place & -kTogether;
        now_ = place, at_ = memory_ + first * each_, end_ = at_ + bytes_;
        for (int64_t head = 0; kScales && head < heads_; ++head) {  // a line each
            const int64_t at = first * each_scale_ + head * kTogether;
            prefetch(scales_ + at);
            if (kInTurns) prefetch(v_scales_ + at);
        }
    }

    bool near_;
    int64_t heads_, each_, bytes_, each_scale_ = 0;  // bytes of a place, and of a sixteen's heads; scales of a place
    const int64_t *places_, *places_end_, *now_ = nullptr;
    const char *memory_, *values_, *at_ = nullptr, *end_ = nullptr;
    const float *scales_ = nullptr, *v_scales_ = nullptr;
    int64_t left_, rate_, due_ = 0;
};

// Does step(i) for i in [begin, end). Each step is `work`, for which memory is asked ahead: every four steps where
// registers are many, else at once before the first.
template <class Cached, class Step>
[[gnu::always_inline]] inline void fetching_steps(Ahead<Cached>& ahead, int64_t work, int64_t begin, int64_t end,
                                                  Step step) {
    if constexpr (kRegisters < 32) {
        ahead.fetch((end - begin) * work);
#pragma GCC unroll 4
        for (; begin < end; ++begin) step(begin);
        return;
    }
    // Unrolled by hand: at the end of a loop that it unrolls gcc copies all sums.
    for (; begin + 4 <= end; begin += 4) {
        ahead.fetch(4 * work);
        step(begin), step(begin + 1), step(begin + 2), step(begin + 3);
    }
    if (begin == end) return;
    ahead.fetch((end - begin) * work);
    for (; begin < end; ++begin) step(begin);
}

constexpr int kMostQueries = 8;  // whose products vectors make together

// Says when few queries bring what they need next from the second level of the cache into the first. The first queries
// bring the values of the block while they make their last scores. The last queries bring the keys of the next head,
// which lie behind those of this one, while they make their last sums. Without it a third of the values' time is
// waiting.
// Pieces of memory of 1 kB are as fast without.
class Brings {
public:
    Brings(int64_t queries, int64_t piece_bytes)
        : queries_(queries), pays_(queries <= kMostQueries && piece_bytes >= 2048) {}

    void begin_block(bool near) { now_ = pays_ && !near, attended_ = 0; }
    void attend(int64_t queries) { attended_ += queries; }

    // Of R queries, for the last ones of which `last` is true.
    bool values(bool last) const { return now_ && last && attended_ == 0; }
    bool keys(bool last) const { return now_ && last && attended_ == queries_; }

private:
    const int64_t queries_;
    const bool pays_;
    bool now_ = false;
    int64_t attended_ = 0;
};

template <class Sums, int R, int V>
inline void clear_sums(Sums (&sum)[R][V]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = Sums{};
}

// Of R queries, `stride` floats apart, W vectors of their values, each query's times `kept`; and back.
template <int R, int W>
inline void load_values(F16 (&sum)[R][W], const float* from, int64_t stride, const float* kept) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) sum[r][w] = load16(from + r * stride + 16 * w) * splat16(kept[r]);
}

template <int R, int W>
inline void store_values(const F16 (&sum)[R][W], float* to, int64_t stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, to += stride) {
        asm("" : "+r"(to));  // else gcc keeps all addresses from load_values() on, in registers that products need
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) store16(to + 16 * w, sum[r][w]);
    }
}

// Keys keeps a block in the order that its products want: attention_floats.h, attention_pairs.h, attention_integers.h.
// It brings
//   Keys(p, queries): `queries` is how many queries of one head will use each block
//   Number: the type of queries
//   kKeys: how many keys are a block
//   kDegree: of softmax_block(), what exponentials are made by
//   query_numbers(dim): how many of them a query takes, for heads of `dim`
//   store_query(q, to): a query [D] to what scores() takes, in units of what is returned: a factor of the score, not 0
//   load(rows, kv_head, ahead): a block of that head
//   load_work(): of one load()
//   scores<R>(q, scores, ahead): scores[r][i] = q[r] . keys[i], anything where no key was loaded; q [R, query_numbers]
//   add_values<R>(into, stride, kept, weights, ahead): what stands from into + r * stride on, times kept[r], and the
//     sum of weights[r][i] * values[i], in ascending order of i; the weights may be changed
//   kTiled: whether it may have tiled(), attend() and multiply_scores() (attention_pairs.h)
// They tell `ahead` of their work: of products, rows times columns. What a row gets is the same for every R. Keys that
// a token may not see have the weight 0, so a value that is not finite makes earlier tokens of the same step not finite
// too.
template <class Cached, class Keys>
class AttentionBlock {
public:
    using Number = typename Keys::Number;
    static constexpr int64_t kKeys = Keys::kKeys;

    // Tokens [first, last), heads [kv_begin, kv_end) of the cache.
    AttentionBlock(const Paged<Cached>& p, int64_t first, int64_t last, int64_t kv_begin, int64_t kv_end)
        : p_(p), kv_begin_(kv_begin), rows_((last - first) * p.group()), keys_(p, rows_) {
        static thread_local Scratch scratch;
        const int64_t queries = (kv_end - kv_begin) * rows_;
        q_ = reinterpret_cast<Number*>(scratch.get<float>(queries * (p.head_dim + 1) + 8));
        factors_ = reinterpret_cast<float*>(q_ + queries * each_);
        std::fill_n(factors_ + queries, 8, 1.0f);  // eight are read from any row on
        int64_t row = 0;
        for (int64_t kv_head = kv_begin; kv_head < kv_end; ++kv_head)
            for (int64_t token = first; token < last; ++token)
                for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head, ++row) {
                    const float* q = p.q + token * p.q_stride + head * p.head_dim;
                    factors_[row] = p.scale * keys_.store_query(q, q_ + row * each_);
                }
    }

    void load(const Rows<kKeys>& rows, int64_t kv_head, Ahead<Cached>& ahead) { keys_.load(rows, kv_head, ahead); }

    // All rows: tokens with what each sees, heads of kv_head; states of [tokens, heads of kv_head].
    void attend(const Views& views, int64_t kv_head, const States& states, Ahead<Cached>& ahead) {
        const bool all_seen = views.of(0).end >= kKeys && views.of(rows_ / p_.group() - 1).begin <= 0;
        int64_t row = 0;
        auto attend = [&](auto size) {  // the rows that are left, `size` at a time
            const int64_t count = (rows_ - row) / size * size, end = row + count;
            if constexpr (Keys::kTiled)
                if (count > 0 && keys_.tiled())
                    attend_tiles<size>(row, count, views, all_seen, kv_head, states, ahead), row = end;
            for (; row < end; row += size) attend_rows<size>(row, views, all_seen, kv_head, states, ahead);
        };
        if constexpr (Keys::kTiled)
            if (keys_.tiled()) attend(Size<16>());
        attend(Size<8>()), attend(Size<4>()), attend(Size<2>()), attend(Size<1>());
    }

    // Of one head, as Ahead is told of it.
    int64_t work() const { return keys_.load_work() + rows_ * (p_.head_dim + p_.state_dim()); }

private:
    static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, kLowest = -3e38f;

    template <int R>
    using Size = std::integral_constant<int, R>;

    int64_t query_of(int64_t row, int64_t kv_head) const { return (kv_head - kv_begin_) * rows_ + row; }

    // `all_seen`: every token sees the whole block.
    template <int R>
    [[gnu::noinline]] void attend_rows(int64_t row, const Views& views, bool all_seen, int64_t kv_head,
                                       const States& states, Ahead<Cached>& ahead) {
        constexpr int some = R < 8 ? R : 8;
        alignas(64) float weights[R][kKeys];
        alignas(32) float kept[R / some][8];
        const int64_t query = query_of(row, kv_head);
        const float* factors = factors_ + query;
        keys_.template scores<R>(q_ + query * each_, weights, ahead);
        if (scales_scores(kv_head)) scale_scores<R>(factors, weights), factors = kOnes;
        hide<R>(row, views, all_seen, kv_head, factors, weights);
        for (int r = 0; r < R; r += some)
            softmax_block<some, Keys::kDegree>(weights + r, factors + r, states.from(row + r), kept[r / some]);
        keys_.template add_values<R>(states.from(row).values, states.dim, kept[0], weights, ahead);
    }

    // `count` rows, R at a time.
    template <int R>
    void attend_tiles(int64_t first, int64_t count, const Views& views, bool all_seen, int64_t kv_head,
                      const States& states, Ahead<Cached>& ahead) {
        const int64_t query = query_of(first, kv_head);
        const bool scales = scales_scores(kv_head);
        const float* scale = scales ? nullptr : &p_.scale;  // else of scores, as they are
        auto prepare = [&](int64_t row, float(*scores)[kKeys]) {
            if (scales) keys_.template multiply_scores<R>(scores), scale_scores<R>(factors_ + query + row, scores);
            if (!scales && all_seen) return false;
            hide<R>(first + row, views, all_seen, kv_head, nullptr, scores);
            return !all_seen;
        };
        keys_.template attend<R>(q_ + query * each_, count, scale, states.from(first), ahead, prepare);
    }

    // Whether scores are multiplied by their factors at once: else the largest is the same before and after it.
    bool scales_scores(int64_t kv_head) const { return p_.adjust(kv_head) || !(p_.scale > 0.0f); }

    template <int R>
    static void scale_scores(const float* factors, float (*scores)[kKeys]) {
        for (int r = 0; r < R; ++r)
            for (int64_t i = 0; i < kKeys; i += 16) store16(scores[r] + i, load16(scores[r] + i) * splat16(factors[r]));
    }

    // Adjusts scores, and hides those of keys that a token does not see. `factors`: what they are still multiplied by; if
    // null, they are hidden by -infinity.
    template <int R>
    void hide(int64_t row, const Views& views, bool all_seen, int64_t kv_head, const float* factors,
              float (*scores)[kKeys]) {
        const Adjust adjust = p_.adjust(kv_head);
        for (int r = 0; (adjust || !all_seen) && r < R; ++r) {
            const View view = views.of((row + r) / p_.group());
            if (adjust) adjust_scores(scores[r], kKeys, adjust, (row + r) % p_.group(), view.distance);
            const float hidden = factors ? std::max(kHidden / factors[r], kLowest) : -INFINITY;
            for (int64_t i = 0; i < view.begin && i < kKeys; ++i) scores[r][i] = hidden;
            for (int64_t i = view.end < 0 ? 0 : view.end; i < kKeys; ++i) scores[r][i] = hidden;
        }
    }

    const Paged<Cached>& p_;
    const int64_t kv_begin_, rows_, each_ = Keys::query_numbers(p_.head_dim);
    Keys keys_;
    float* factors_;  // of scores
    Number* q_;
};

}  // namespace gpt_fast
