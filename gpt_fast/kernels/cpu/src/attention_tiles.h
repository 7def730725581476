// Attention's products of pairs of bfloat16 (attention_pairs.h has their layouts) by tiles of AMX, and the softmax
// between them. A row has the same bits for any number of rows.
//
// What costs time, on the first CPU with AMX: to move a register of tiles takes the places of sixteen instructions of
// vectors, and to store one twice as many; products take none. So the sums of weights are products as well, with ones.
// Beside tiles a core makes one product of vectors at a time, so weights come from a table (powers() of simd.h).
#pragma once

#include "attention_block.h"
#include "tiles.h"

namespace gpt_fast {

constexpr int64_t kTileKeys = 64;  // of a block

// Weights are powers of two in steps of a 128th. They are relative to what lies kRoom steps above the largest of the
// first scores, so that later ones may be larger before a weight is 2 and all sums need another scale.
constexpr float kSteps = 128 * kLog2E;  // from one e to the next
constexpr float kRoom = 128 * 12;
constexpr float kTooLarge = kPowersBegin + 128;

// All bits that powers() took and gave.
struct TakenGiven {
    I16 taken = splat16(0), given = splat16(0);

    // Whether a weight is 2 or more, or may be wrong.
    bool too_large() const {
        constexpr int32_t sign = -0x80000000, of_two = 0x40004000;  // the latter of bfloat16 from 2 on
        return any_bit(taken, sign) || any_bit(given, sign | of_two | 0x8000);
    }
};

// R rows of a block between scores and weights.
template <int R>
class TileWeights {
public:
    alignas(64) float scores[R][kTileKeys];
    alignas(64) uint16_t weights[R][kTileKeys];
    alignas(64) float sums[2 * kTileRows] = {};  // of weights; those of R rows are used

    // Rows of which no key was seen before get a scale, from the first keys, which mostly will do for the others.
    void begin(const float* by, const States& states) {
        each_eight([&](int r) {
            const F8 max = load8(states.maxes + r), unseen = present(less(max, splat(kNothingSeen / 2)));
            find_shift(r, max);
            if (any(as_ints(unseen))) set_max(r, states.from(r), unseen, tops<16>(by, r));
        });
    }

    // One of `parts` of the rows. `by`: steps of a score, for each key. `any`: for scores of any size, and for what is
    // no number.
    [[gnu::always_inline]] void weigh(const float* by, int part, int parts, bool any, TakenGiven& bits) {
        const int begin = R * part / parts, end = R * (part + 1) / parts;
#pragma GCC unroll 4
        for (int r = begin; !any && r < end; ++r) weigh_keys<false>(by, r, bits);
#pragma GCC unroll 1
        for (int r = begin; any && r < end; ++r) weigh_keys<true>(by, r, bits);
    }

    [[gnu::noinline]] void weigh_again(const float* by) {
        TakenGiven none;
        weigh(by, 0, 1, true, none);
    }

    // Rows with a weight of 2 or more get another scale.
    [[gnu::noinline]] void raise(const float* by, const States& states) {
        each_eight([&](int r) {
            F8 steps[8];
            for (int i = 0; i < 8; ++i) {
                F16 step = splat16(0.0f);
                for (int64_t key = 0; i < kEight && key < kTileKeys; key += 16) {
                    const F16 shift = splat16(shift_[r + i]);
                    step = larger(step, plus_product(shift, load16(scores[r + i] + key), load16(by + key)));
                }
                steps[i] = larger(lower(step), upper(step));
            }
            const F8 none = splat(0.0f), one = splat(1.0f);
            const F8 fits = choose(less(lane_maxes(steps), splat(kTooLarge)), one, none);
            const F8 which = present(less(fits, one));  // also what is no number
            if (any(as_ints(which))) set_max(r, states.from(r), which, tops<kTileKeys>(by, r));
        });
    }

    void add_sums(const States& states) const {
        each_eight([&](int r) { store8(states.sums + r, load8(states.sums + r) + present(load8(sums + r))); });
    }

private:
    static constexpr int kEight = R < 8 ? R : 8;

    template <class Body>
    [[gnu::always_inline]] static void each_eight(Body body) {
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 8) body(r);
    }
    static F8 present(F8 lanes) {
        if constexpr (R < 8) return choose(first_lanes<R>(), lanes, splat(0.0f));
        return lanes;
    }

    // A whole number, as the unit is 1 there; of scores that are a million, nearly.
    void find_shift(int r, F8 max) { store8(shift_ + r, minus_product(splat(kPowersBegin), max, splat(kSteps))); }

    template <bool careful>
    [[gnu::always_inline]] void weigh_keys(const float* by, int r, TakenGiven& bits) {
        const F16 shift = splat16(shift_[r]);
#pragma GCC unroll 4
        for (int64_t key = 0; key < kTileKeys; key += 32) {
            F16 x = plus_product(shift, load16(scores[r] + key), load16(by + key));
            F16 y = plus_product(shift, load16(scores[r] + key + 16), load16(by + key + 16));
            if (careful) x = within_powers(x), y = within_powers(y);
            const I16 both = powers(x, y);
            store64(reinterpret_cast<uint8_t*>(weights[r] + key), both);
            bits.taken = bits.taken | as_ints(x) | as_ints(y), bits.given = bits.given | both;
        }
    }

    // The largest scores of eight rows from r on, among the first `keys`, in steps.
    template <int64_t keys>
    [[gnu::noinline]] F8 tops(const float* by, int r) const {
        F8 each[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            F16 top = splat16(kHidden * kSteps);
#pragma GCC unroll 4
            for (int64_t key = 0; i < kEight && key < keys; key += 16)
                top = larger(top, load16(scores[r + i] + key) * load16(by + key));
            each[i] = larger(lower(top), upper(top));
        }
        return lane_maxes(each);
    }

    // Of eight rows, those of `which` are relative to kRoom above `tops` from now on, if that is more than before.
    [[gnu::noinline]] void set_max(int r, const States& states, F8 which, F8 tops) {
        const F8 before = load8(states.maxes), one = splat(1.0f), to_whole = splat(kToWhole);
        const F8 top = (((tops + to_whole) - to_whole) + splat(kRoom)) * splat(1.0f / kSteps);
        const F8 max = choose(which, choose(less(before, top), top, before), before);
        const F8 nothing = less(before, splat(kNothingSeen / 2));  // was summed, so all of it may be kept
        const F8 kept = choose(nothing, one, choose(which, exp8(before - max), one));
        store8(states.maxes, max);
        find_shift(r, max);
        if (!any(as_ints(less(kept, one)))) return;
        store8(states.sums, load8(states.sums) * kept);
        alignas(32) float factors[8];
        store8(factors, kept);
        for (int i = 0; i < kEight; ++i)
            for (float *at = states.from(i).values, *end = at + states.dim; factors[i] != 1.0f && at < end; at += 16)
                store16(at, load16(at) * splat16(factors[i]));
    }

    alignas(32) float shift_[R < 8 ? 8 : R];
};

// One head's keys and values of a block.
struct TileBlock {
    const uint16_t* const* keys;  // of each 16 [dim / 2, 16, 2]
    const uint16_t* values;       // [kTileKeys / 2, columns, 2]
    int64_t dim, columns;         // multiples of 32 and of 16
    float factor;                 // of scores, above 0
    const float* scales;          // of scores as well, for each key; or null
};

// Three steps for R rows: scores, weights, and weights times values. Each loads what the one before has stored, which a
// core would wait for. So it makes scores of the next R rows, weights of these and values of the last ones in turns.
template <class Registers = Tiles>
class AttentionTiles {
public:
    // `rows` rows, R at a time, of q [rows, dim], to states of as many. prepare(row, scores) is called before the
    // scores [R, kTileKeys] of R rows are weighed; it may change them, and returns whether they may be -infinity.
    // `ahead` is told of the work.
    template <int R, class Cached, class Prepare>
    void attend(const TileBlock& b, const uint16_t* q, int64_t rows, const States& states, Ahead<Cached>& ahead,
                Prepare prepare) {
        TileWeights<R> two[2];
        alignas(64) float by[kTileKeys];
        for (int64_t i = 0; i < kTileKeys; i += 16) {
            const F16 factor = splat16(b.factor * kSteps);
            // Not 0, which times -infinity is no number.
            store16(by + i, b.scales ? factor * larger(splat16(1e-30f), load16(b.scales + i)) : factor);
        }
        shape(R);
        registers_.template load<4>(bytes(kOnes.all), kTileBytes);
        // Weighs rows from `row` on. `alone`: no other rows are near, so memory is asked for a few lines at a time: three
        // quarters beside products, each of which is as much work, and a quarter beside weights.
        auto turn = [&](int64_t row, auto has_last, auto has_now, auto has_next, auto alone)
                        __attribute__((always_inline)) {
            TileWeights<R>&now = two[row / R & 1], &other = two[~(row / R) & 1];
            const States these = states.from(row), last = states.from(row - R);
            bool any = false;
            if (has_now) any = prepare(row, now.scores), now.begin(by, these);
            if (!alone) ahead.fetch(R * ((has_next ? b.dim : 0) + (has_last ? b.columns : 0)));
            auto before_product = [&]() __attribute__((always_inline)) {
                if (alone) ahead.fetch(R * (kBlockOfHead * 3 / 4 / kParts));
            };
            TakenGiven bits;
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                float* sums = nullptr;
                if (has_next) add_keys(b, q + (row + R) * b.dim, part, before_product);
                if (has_last && part == 0) add_weights(other.sums);
                if (has_last && alone && kInCache<Cached>) bring_keys(b, part);
                if (has_last) sums = add_values(b, part, last, before_product);
                if (has_now && alone) ahead.fetch(R * (b.dim + b.columns) / (4 * kParts));
                if (has_now) now.weigh(by, part, kParts, any, bits);
                if (has_next) registers_.template store<0>(bytes(other.scores[0] + part * kTileRows), kScoreBytes);
                if (sums) registers_.template store<7>(bytes(sums), 4 * last.dim);
            }
            if (has_last) other.add_sums(last);
            if (!has_now) return;
            if (bits.too_large()) now.raise(by, these), now.weigh_again(by);
            load_weights(now.weights);
        };
        constexpr std::true_type yes;
        constexpr std::false_type no;
        if (rows == R) {
            turn(-R, no, no, yes, yes), turn(0, no, yes, no, yes), turn(R, yes, no, no, yes);
        } else {
            for (int64_t row = -R; row <= rows; row += R)
                turn(row, row > 0, 0 <= row && row < rows, row + R < rows, no);
        }
    }

private:
    static constexpr int64_t kBlockOfHead = kTileBytes / 2, kScoreBytes = 4 * kTileKeys;
    static constexpr int kParts = kTileKeys / kTileRows;

    static const uint8_t* bytes(const uint16_t* at) { return reinterpret_cast<const uint8_t*>(at); }
    static const uint8_t* bytes(const float* at) { return reinterpret_cast<const uint8_t*>(at); }
    static uint8_t* bytes(float* at) { return reinterpret_cast<uint8_t*>(at); }

    // Of `rows` rows. Registers: 0 sums of scores, 1 and 2 two steps of x, 3 what is multiplied by, 4 ones, 5 and 6
    // weights, 7 sums of values, and of weights.
    void shape(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        for (int i = 0; i < 8; ++i) registers_.shape(i, i == 3 || i == 4 ? kTileRows : rows, kTileBytes);
        registers_.begin();
    }

    // Whether a block's keys are where the cache has them.
    template <class Cached>
    static constexpr bool kInCache = std::is_same_v<Cached, uint16_t>;

    // Brings a part of the next head's keys, which lie behind this one's, into the first level of the CPU's cache.
    static void bring_keys(const TileBlock& b, int part) {
        const int64_t numbers = kTileRows * b.dim;
        for (int64_t i = 0; i < numbers; i += kLine / 2) prefetch(b.keys[part] + numbers + i);
    }

    // Scores of a part of the keys, to be stored.
    template <class Before>
    [[gnu::always_inline]] void add_keys(const TileBlock& b, const uint16_t* q, int part, Before before_product) {
        const bool there = part > 0 && b.dim <= 2 * kBlockOfHead;  // x, in its registers
        const uint16_t* keys = b.keys[part];
        registers_.template zero<0>();
        for (int64_t d = 0; d < b.dim; d += 2 * kBlockOfHead) {
            if (!there) registers_.template load<1>(bytes(q + d), 2 * b.dim);
            before_product();
            add<0, 1>(keys + d * kTileRows, kTileBytes);
            const int64_t next = d + kBlockOfHead;
            if (next == b.dim) break;
            if (!there) registers_.template load<2>(bytes(q + next), 2 * b.dim);
            before_product();
            add<0, 2>(keys + next * kTileRows, kTileBytes);
        }
    }

    void load_weights(const uint16_t (*weights)[kTileKeys]) {
        registers_.template load<5>(bytes(weights[0]), sizeof weights[0]);
        registers_.template load<6>(bytes(weights[0] + kBlockOfHead), sizeof weights[0]);
    }

    // Sums of the loaded weights of each row: products with ones, of which all sixteen lanes are the same. Rows are
    // stored one lane apart, the last one at last, which leaves one lane of each.
    void add_weights(float* sums) {
        registers_.template zero<7>();
        registers_.template add_bfloat16<7, 5, 4>();
        registers_.template add_bfloat16<7, 6, 4>();
        registers_.template store<7>(bytes(sums), sizeof *sums);
    }

    // Of a part of the columns: what stands there and the loaded weights times values. Returns where the last sums are
    // to be stored, or null.
    template <class Before>
    [[gnu::always_inline]] float* add_values(const TileBlock& b, int part, const States& states, Before before_product) {
        const int64_t all = b.columns / kTileRows, end = all * (part + 1) / kParts;
        float* sums = nullptr;
        for (int64_t i = all * part / kParts; i < end; ++i) {
            if (sums) registers_.template store<7>(bytes(sums), 4 * states.dim);
            sums = states.values + i * kTileRows;
            const uint16_t* values = b.values + 2 * i * kTileRows;
            registers_.template load<7>(bytes(sums), 4 * states.dim);
            before_product();
            add<7, 5>(values, 4 * b.columns);
            before_product();
            add<7, 6>(values + kBlockOfHead * b.columns, 4 * b.columns);
        }
        return sums;
    }

    template <int sum, int x>
    void add(const uint16_t* w, int64_t stride) {
        registers_.template load<3>(bytes(w), stride);
        registers_.template add_bfloat16<sum, x, 3>();
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
