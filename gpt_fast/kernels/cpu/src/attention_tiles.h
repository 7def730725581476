// Attention's products of pairs of bfloat16 (attention_pairs.h has their layouts) by tiles of AMX, and the softmax
// between them. A row has the same bits for any number of rows.
//
// What costs time, on the first CPU with AMX: to move a register of tiles takes the places of sixteen instructions of
// vectors, and to store one twice as many; products take none. So the sums of weights are products as well, with ones.
#pragma once

#include "attention_block.h"
#include "tiles.h"

namespace gpt_fast {

constexpr int64_t kTileKeys = 64;  // of a block

// What the weights of a block may add up to before its scores are taken relative to a larger one: e^8 costs no precision,
// and what was summed up needs no other scale then.
constexpr float kMostWeights = 2981.0f;

// Scores of one query to weights as bfloat16, rounded to nearest: 2^(score * by + shift). scaled: scores are multiplied by
// k_scale before, weights by v_scale afterwards; returns the sum of the weights before that, in eight lanes.
template <bool scaled>
[[gnu::always_inline]] inline F8 weigh_keys(const float* scores, F16 by, F16 shift, const float* k_scale,
                                            const float* v_scale, uint16_t* weights) {
    constexpr int V = kTileKeys / 16;
    // The polynomial with the least relative error for 2^rest, 0 <= rest < 1: 7.5e-5. From 1 to 2 half a unit of bfloat16
    // is 2^-8, and with it cutting rounds.
    constexpr float half_unit = scaled ? 0.0f : 1.0f / 256;
    constexpr float polynomial[] = {0.0780245215f, 0.226067156f, 0.695833504f, 0.999925196f + half_unit};
    F16 x[V], whole[V], e[V], total = splat16(0.0f);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        x[v] = load16(scores + 16 * v);
        if (scaled) x[v] = x[v] * load16(k_scale + 16 * v);
        x[v] = plus_product(shift, x[v], by);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) whole[v] = take_floor(x[v]), e[v] = splat16(polynomial[0]);
#pragma GCC unroll 4
    for (int i = 1; i < 4; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) e[v] = plus_product(splat16(polynomial[i]), e[v], x[v]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        e[v] = times_power(e[v], whole[v]);
        if (!scaled) continue;
        total = total + e[v];
        e[v] = as_floats(plus(as_ints(e[v] * load16(v_scale + 16 * v)), splat16(0x8000)));
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v += 2)
        store64(reinterpret_cast<uint8_t*>(weights + 16 * v), upper_halves(e[v], e[v + 1]));
    return lower(total) + upper(total);
}

// One head's keys and values of a block; all scales null but for int8. `factor`: of scores.
struct TileBlock {
    const uint16_t* const* keys;  // of each 16 [dim / 2, 16, 2]
    const uint16_t* values;       // [kTileKeys / 2, columns, 2]
    int64_t dim, columns;         // multiples of 32 and of 16
    float factor;
    const float *k_scale, *v_scale;
};

template <bool scaled, class Registers = Tiles>
class AttentionTiles {
public:
    // `rows` rows, R at a time, of q [rows, dim], to states of as many. prepare(row, scores) is called before the scores
    // [R, kTileKeys] of R rows are weighed, and returns which scales of keys they still need. `ahead` is told of the work.
    template <int R, class Cached, class Prepare>
    void attend(const TileBlock& b, const uint16_t* q, int64_t rows, const States& states, Ahead<Cached>& ahead,
                Prepare prepare) {
        constexpr int eight = R < 8 ? R : 8;
        alignas(64) float scores[R][kTileKeys];
        alignas(64) uint16_t weights[R][kTileKeys];
        alignas(64) float sums[2 * kTileRows] = {};
        shape(R);
        registers_.template load<4>(bytes(kOnes.all), kTileBytes);
        for (int64_t row = 0; row < rows; row += R) {
            make_scores(b, q + row * b.dim, scores, ahead);
            const float* k_scale = prepare(row, scores);
            for (int r = 0; r < R; r += 8) {
                raise_first<eight>(b, k_scale, scores + r, states.from(row + r));
                weigh<eight>(b, k_scale, scores + r, states.from(row + r), weights + r, sums + r);
            }
            add_ones(weights, sums);
            bool again = false;
            for (int r = 0; r < R; r += 8) {
                if (!raise_too_small<eight>(b, k_scale, scores + r, sums + r, states.from(row + r))) continue;
                weigh<eight>(b, k_scale, scores + r, states.from(row + r), weights + r, sums + r);
                again = true;
            }
            if (again) add_ones(weights, sums);
            for (int r = 0; r < R; r += 8) {
                float* all = states.from(row + r).sums;
                store8(all, load8(all) + first_of<eight>(load8(sums + r)));
            }
            add_values(b, states.from(row).values, states.dim, ahead);
        }
    }

private:
    static constexpr int64_t kBlockOfHead = kTileBytes / 2;

    static const uint8_t* bytes(const uint16_t* at) { return reinterpret_cast<const uint8_t*>(at); }
    static const uint8_t* bytes(const float* at) { return reinterpret_cast<const uint8_t*>(at); }
    static uint8_t* bytes(float* at) { return reinterpret_cast<uint8_t*>(at); }

    // Of `rows` rows. Registers: 0 sums, 1 and 2 two steps of x, 3 what it is multiplied by, 4 ones.
    void shape(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        for (int i = 0; i < 5; ++i) registers_.shape(i, i < 3 ? rows : kTileRows, kTileBytes);
        registers_.begin();
    }

    // Sums of sixteen keys are stored before those of the next ones begin: then a core stores while it multiplies.
    template <class Cached>
    void make_scores(const TileBlock& b, const uint16_t* q, float (*scores)[kTileKeys], Ahead<Cached>& ahead) {
        for (int64_t i = 0; i < kTileKeys / kTileRows; ++i) {
            ahead.fetch(rows_ * b.dim * kTileRows / kTileKeys);
            const bool there = i > 0 && b.dim <= 2 * kBlockOfHead;  // x, in its registers
            const uint16_t* keys = b.keys[i];
            registers_.template zero<0>();
            for (int64_t d = 0; d < b.dim; d += 2 * kBlockOfHead) {
                if (!there) registers_.template load<1>(bytes(q + d), 2 * b.dim);
                add<1>(keys + d * kTileRows, kTileBytes);
                const int64_t next = d + kBlockOfHead;
                if (next == b.dim) break;
                if (!there) registers_.template load<2>(bytes(q + next), 2 * b.dim);
                add<2>(keys + next * kTileRows, kTileBytes);
            }
            registers_.template store<0>(bytes(scores[0] + i * kTileRows), sizeof scores[0]);
        }
    }

    // Loads the weights; unless they are scaled makes their sums: a column of ones more. All sixteen lanes of a row have
    // its sum. Rows are stored one lane apart, the last one at last, which leaves one lane of each.
    void add_ones(const uint16_t (*weights)[kTileKeys], float* sums) {
        registers_.template load<1>(bytes(weights[0]), sizeof weights[0]);
        registers_.template load<2>(bytes(weights[0] + kBlockOfHead), sizeof weights[0]);
        if (scaled) return;
        registers_.template zero<0>();
        registers_.template add_bfloat16<0, 1, 4>();
        registers_.template add_bfloat16<0, 2, 4>();
        registers_.template store<0>(bytes(sums), sizeof *sums);
    }

    // sums += weights, which add_ones() has loaded, * values.
    template <class Cached>
    void add_values(const TileBlock& b, float* sums, int64_t stride, Ahead<Cached>& ahead) {
        for (int64_t column = 0; column < b.columns; column += kTileRows) {
            ahead.fetch(rows_ * kTileRows);
            const uint16_t* values = b.values + 2 * column;
            registers_.template load<0>(bytes(sums + column), 4 * stride);
            add<1>(values, 4 * b.columns);
            add<2>(values + kBlockOfHead * b.columns, 4 * b.columns);
            registers_.template store<0>(bytes(sums + column), 4 * stride);
        }
    }

    template <int x>
    void add(const uint16_t* w, int64_t stride) {
        registers_.template load<3>(bytes(w), stride);
        registers_.template add_bfloat16<0, x, 3>();
    }

    template <int R>
    static F8 first_of(F8 lanes) {
        if constexpr (R < 8) return choose(first_lanes<R>(), lanes, splat(0.0f));
        return lanes;
    }

    // Scores of R rows, at most eight, are taken relative to their largest one from now on where `rows` says so.
    template <int R>
    [[gnu::noinline]] static void raise_maxes(const TileBlock& b, const float* k_scale,
                                              const float (*scores)[kTileKeys], F8 rows, const States& states) {
        F8 each[8];
        for (int r = 0; r < 8; ++r) {
            F16 top = splat16(kHidden);
            for (int64_t i = 0; r < R && i < kTileKeys; i += 16) {
                const F16 score = load16(scores[r] + i);
                top = larger(top, scaled ? score * load16(k_scale + i) : score);
            }
            each[r] = larger(lower(top), upper(top));
        }
        const F8 before = load8(states.maxes), top = lane_maxes(each) * splat(b.factor);
        const F8 max = choose(rows, choose(less(before, top), top, before), before), one = splat(1.0f);
        const F8 nothing = less(before, splat(kNothingSeen / 2));  // was summed, so all of it may be kept
        const F8 kept = choose(nothing, one, choose(rows, exp8(before - max), one));
        store8(states.maxes, max);
        store8(states.sums, load8(states.sums) * kept);
        alignas(32) float by[8];
        store8(by, kept);
        for (int r = 0; r < R; ++r)
            for (float *at = states.from(r).values, *end = at + states.dim; by[r] != 1.0f && at < end; at += 16)
                store16(at, load16(at) * splat16(by[r]));
    }

    // Where no score has been seen yet.
    template <int R>
    static void raise_first(const TileBlock& b, const float* k_scale, const float (*scores)[kTileKeys],
                            const States& states) {
        const F8 first = first_of<R>(less(load8(states.maxes), splat(kNothingSeen / 2)));
        if (any(as_ints(first))) raise_maxes<R>(b, k_scale, scores, first, states);
    }

    // Where weights add up to too much, or to no number; returns whether some do, which is seldom.
    template <int R>
    static bool raise_too_small(const TileBlock& b, const float* k_scale, const float (*scores)[kTileKeys],
                                const float* sums, const States& states) {
        const F8 none = splat(0.0f), one = splat(1.0f);
        const F8 too_large = first_of<R>(choose(less(load8(sums), splat(kMostWeights)), none, one));
        if (!any(as_ints(too_large))) return false;
        raise_maxes<R>(b, k_scale, scores, less(none, too_large), states);
        return true;
    }

    // Scores of R rows, at most eight, to weights, and if `scaled` their sums.
    template <int R>
    [[gnu::noinline]] static void weigh(const TileBlock& b, const float* k_scale, const float (*scores)[kTileKeys],
                                        const States& states, uint16_t (*weights)[kTileKeys], float* sums) {
        const F16 by = splat16(b.factor * kLog2E);
        F8 each[8];
#pragma GCC unroll 8
        for (int r = R; r < 8; ++r) each[r] = splat(0.0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            each[r] = weigh_keys<scaled>(scores[r], by, splat16(states.maxes[r] * -kLog2E), k_scale, b.v_scale,
                                         weights[r]);
        if (scaled) store8(sums, lane_sums(each));
    }

    struct alignas(64) Ones {
        uint16_t all[2 * kTileRows * kTileRows] = {};
        constexpr Ones() {
            for (uint16_t& x : all) x = 0x3f80;
        }
    };
    static constexpr Ones kOnes{};

    int64_t rows_ = 0;
    Registers registers_;
};

}  // namespace gpt_fast
