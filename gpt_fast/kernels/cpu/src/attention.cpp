// Attention to caches of every format. A separate source file, as product.cpp is.
#include "attention.h"

#include "attention_floats.h"
#include "attention_integers.h"
#include "attention_pairs.h"
#include "fetch.h"

namespace gpt_fast {

namespace {

template <class Cached>
struct KeysOfCache {
    using Type = FloatKeys<Cached>;
};
template <>
struct KeysOfCache<uint16_t> {
    using Type = std::conditional_t<kBfloat16Dots, PairKeys<uint16_t>, FloatKeys<uint16_t>>;
};
#ifdef GPT_FAST_DPBUSD
using IntegersOfCache = IntegerKeys<Bytes>;
#else
using IntegersOfCache = IntegerKeys<Words>;
#endif
template <>
struct KeysOfCache<int8_t> {
    using Type = std::conditional_t<kTiles, PairKeys<int8_t>, IntegersOfCache>;  // nothing is as fast as tiles
};
template <class Cached>
using KeysOf = typename KeysOfCache<Cached>::Type;

// A head of a block is a few pieces of memory. Unless all heads of the next block are fetched together (Ahead), they are
// fetched so many heads before they are needed: more would not fit the first level of a core's cache.
constexpr int64_t kHeadsAhead = 2;

// Whether so many bytes are fetched into the first level of a core's cache; else they go into the second. On Zen 4, whose
// first level is small, attention took a third longer when it was fetched into.
bool fits_level1(int64_t bytes) { return !kFullLevel1 && bytes <= kLevel1Bytes; }

// What the threads share out: pieces of queries, found by walking the slots.
struct Piece {
    int64_t slot, first, last, split_begin, split_end;
};

// Keys of one sequence.
struct KeyRange {
    int64_t slot = 0, begin = 0, end = 0;
};

// Those that a piece sees of a split.
template <class Cached>
KeyRange keys_of(const Paged<Cached>& p, const Piece& piece, int64_t split) {
    const int64_t end = p.query_start[piece.slot + 1], length = p.context_len[piece.slot];
    const int64_t top = length - end + piece.last;  // positions that the last of the queries may see
    const int64_t lowest = p.window ? length - end + piece.first + 1 - p.window : 0;
    return {piece.slot, std::max(split * kSplit, lowest), std::min((split + 1) * kSplit, top)};
}

// Tokens [first, last) of a piece, heads [kv_begin, kv_end) of the cache, which `block` was made for, against keys of
// [split, split + 1) * kSplit; into states of [token - first, query head of kv_head], one for each kv_head. `then`: keys
// whose beginning is fetched, of the same heads.
template <class Cached>
void attend_split(const Paged<Cached>& p, const Piece& piece, int64_t kv_begin, int64_t kv_end, int64_t split,
                  AttentionBlock<Cached, KeysOf<Cached>>& block, float* memory, const KeyRange& then = {}) {
    constexpr int64_t kKeys = KeysOf<Cached>::kKeys;
    const int64_t first = piece.first, last = piece.last, kv_heads = kv_end - kv_begin;
    const int64_t queries = (last - first) * p.group(), dim = p.state_dim();
    auto states = [&](int64_t kv_head) {
        return States(memory + (kv_head - kv_begin) * state_floats(queries, dim), queries, dim);
    };
    const int64_t end = p.query_start[piece.slot + 1], length = p.context_len[piece.slot];
    for (int64_t kv_head = kv_begin; kv_head < kv_end; ++kv_head) clear(states(kv_head), queries);
    const KeyRange keys = keys_of(p, piece, split);
    const int64_t begin = keys.begin, key_end = keys.end;
    int64_t places[kSplit], places_then[kKeys];
    p.locate(keys.slot, begin, key_end, places);
    const int64_t count_then = std::min(then.end, then.begin / kKeys * kKeys + kKeys) - then.begin;
    if (count_then > 0) p.locate(then.slot, then.begin, then.begin + count_then, places_then);
    const int64_t head_bytes = 2 * kKeys * p.head_dim * static_cast<int64_t>(sizeof(Cached));
    const bool near = last - first == 1 && fits_level1(head_bytes * kHeadsAhead);
    for (int64_t base = begin / kKeys * kKeys; base < key_end; base += kKeys) {
        Rows<kKeys> rows;
        rows.from = std::max<int64_t>(begin - base, 0), rows.end = std::min(key_end - base, kKeys);
        for (int64_t i = 0; i < kKeys; ++i)
            rows.place[i] = places[base - begin + std::clamp(i, rows.from, rows.end - 1)];
        const Views views{length - end + first - base, rows.end, p.window};
        const bool last_block = base + kKeys >= key_end;
        const int64_t* next = last_block ? places_then : places + (base + kKeys - begin);
        const int64_t count = last_block ? count_then : std::min(key_end - base - kKeys, kKeys);
        auto ahead_of = [&](int64_t kv_head) {
            if (Ahead<Cached>::kInTurns)
                return Ahead<Cached>(p, kv_begin, kv_end, kv_head - kv_begin, kv_heads, next, count, block.work(), near);
            const int64_t later = kv_head + kHeadsAhead, of_next = std::min(later - kv_heads, kv_end - 1);
            if (later >= kv_end) return Ahead<Cached>(p, of_next, of_next + 1, 0, 1, next, count, block.work(), near);
            return Ahead<Cached>(p, later, later + 1, 0, 1, places + (base + rows.from - begin), rows.end - rows.from,
                                 block.work(), near);
        };
        for (int64_t kv_head = kv_begin; kv_head < kv_end; ++kv_head) {
            Ahead<Cached> ahead = ahead_of(kv_head);
            block.load(rows, kv_head, ahead);
            block.attend(views, kv_head, states(kv_head), ahead);
        }
    }
}

template <class Cached>
void finish(const Paged<Cached>& p, int64_t first, int64_t last, int64_t kv_head, const States& states) {
    for (int64_t token = first, row = 0; token < last; ++token)
        for (int64_t h = 0; h < p.group(); ++h, ++row) {
            const int64_t head = kv_head * p.group() + h;
            const float* values = states.values + row * states.dim;
            float* to = p.out + (token * p.heads + head) * p.out_dim;
            const float sum = states.sums[row] + (p.sinks ? exp_one(p.sinks[head] - states.maxes[row]) : 0.0f);
            for (int64_t d = 0; d < p.out_dim; ++d) to[d] = values[d] / sum;
        }
}

// Pieces of at most `size` tokens.
template <class Cached>
int64_t count_pieces(const Paged<Cached>& p, int64_t size) {
    int64_t count = 0;
    for (int64_t s = 0; s < p.slots; ++s) count += ceil_div(p.query_start[s + 1] - p.query_start[s], size);
    return count;
}

template <class Cached>
Piece find_piece(const Paged<Cached>& p, int64_t size, int64_t index) {
    int64_t slot = 0;
    for (;; ++slot) {
        const int64_t here = ceil_div(p.query_start[slot + 1] - p.query_start[slot], size);
        if (index < here) break;
        index -= here;
    }
    const int64_t first = p.query_start[slot] + index * size, end = p.query_start[slot + 1];
    const int64_t last = std::min(first + size, end);
    const int64_t length = p.context_len[slot], lowest = p.window ? length - end + first + 1 - p.window : 0;
    return {slot, first, last, lowest > 0 ? lowest / kSplit : 0, ceil_div(length - end + last, kSplit)};
}

// Tokens of a piece of prompts. Long pieces read keys less often, but their sums do not fit the first level of a core's
// cache, and they see more keys than each of their tokens: that pays where tokens see many.
template <class Cached>
int64_t tokens_of_piece(const Paged<Cached>& p, int threads) {
    int64_t tokens = kQueryPiece, most = *std::max_element(p.context_len, p.context_len + p.slots);
    if (p.window && p.window < most) most = p.window;
    if (most <= kSplit) return tokens;
    while (2 * tokens <= kLongestPiece && state_floats(2 * tokens * p.group(), p.state_dim()) <= kMostSums &&
           count_pieces(p, 2 * tokens) * p.kv_heads >= 4 * threads)
        tokens *= 2;
    return tokens;
}

}  // namespace

template <class Cached>
void paged_attention(Team& team, const Paged<Cached>& p, float* shared) {
    static thread_local Scratch own_scratch;
    const int64_t pieces = count_pieces(p, kQueryPiece), items = pieces * p.kv_heads;
    const bool decoding = pieces == p.query_start[p.slots];  // one token each
    if (!decoding && items >= 2 * team.size) {
        const int64_t tokens = tokens_of_piece(p, team.size), size = state_floats(tokens * p.group(), p.state_dim());
        float* own = own_scratch.get<float>(2 * size);
        team.share(count_pieces(p, tokens) * p.kv_heads, 1, [&](int64_t index, int64_t) {
            const Piece piece = find_piece(p, tokens, index / p.kv_heads);
            const int64_t kv_head = index % p.kv_heads, queries = (piece.last - piece.first) * p.group();
            const States all(own, queries, p.state_dim()), one(own + size, queries, p.state_dim());
            AttentionBlock<Cached, KeysOf<Cached>> block(p, piece.first, piece.last, kv_head, kv_head + 1);
            for (int64_t split = piece.split_begin; split < piece.split_end; ++split) {
                const bool begun = split > piece.split_begin;
                attend_split(p, piece, kv_head, kv_head + 1, split, block, begun ? own + size : own);
                if (begun) merge(all, one, queries);
            }
            finish(p, piece.first, piece.last, kv_head, all);
        });
        return;
    }
    const int64_t size = state_floats((decoding ? 1 : kQueryPiece) * p.group(), p.state_dim());
    int64_t most = 1;  // splits of a piece
    for (int64_t i = 0; i < pieces; ++i) {
        const Piece piece = find_piece(p, kQueryPiece, i);
        most = std::max(most, piece.split_end - piece.split_begin);
    }
    const int64_t together = decoding && pieces * most >= 2 * team.size ? p.kv_heads : 1, parts = p.kv_heads / together;
    auto part_of = [&](int64_t piece, int64_t split, int64_t kv_head) {
        return shared + ((piece * most + split) * p.kv_heads + kv_head) * size;
    };
    team.share(pieces * most * parts, 1, [&](int64_t index, int64_t) {
        const int64_t which = index / parts / most, split = index / parts % most, kv_head = index % parts * together;
        const Piece piece = find_piece(p, kQueryPiece, which);
        if (piece.split_begin + split >= piece.split_end) return;
        KeyRange then;  // threads that are as fast as each other take items in turns
        if (const int64_t later = index + team.size; parts == 1 && later < pieces * most) {
            const Piece other = find_piece(p, kQueryPiece, later / most);
            const int64_t its_split = other.split_begin + later % most;
            if (its_split < other.split_end) then = keys_of(p, other, its_split);
        }
        AttentionBlock<Cached, KeysOf<Cached>> block(p, piece.first, piece.last, kv_head, kv_head + together);
        attend_split(p, piece, kv_head, kv_head + together, piece.split_begin + split, block,
                     part_of(which, split, kv_head), then);
        if (most > 1) return;
        const int64_t queries = (piece.last - piece.first) * p.group();
        for (int64_t head = kv_head; head < kv_head + together; ++head)
            finish(p, piece.first, piece.last, head, States(part_of(which, split, head), queries, p.state_dim()));
    });
    if (most == 1) return;  // nothing to merge
    team.barrier();
    team.share(items, 1, [&](int64_t index, int64_t) {
        const int64_t which = index / p.kv_heads, kv_head = index % p.kv_heads;
        const Piece piece = find_piece(p, kQueryPiece, which);
        const int64_t queries = (piece.last - piece.first) * p.group();
        auto part = [&](int64_t split) { return States(part_of(which, split, kv_head), queries, p.state_dim()); };
        const States total = part(0);
        for (int64_t split = 1; split < piece.split_end - piece.split_begin; ++split)
            merge(total, part(split), queries);
        finish(p, piece.first, piece.last, kv_head, total);
    });
}

template void paged_attention(Team&, const Paged<float>&, float*);
template void paged_attention(Team&, const Paged<uint16_t>&, float*);
template void paged_attention(Team&, const Paged<int8_t>&, float*);

}  // namespace gpt_fast
