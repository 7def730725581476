// Weights of 4 bits made ready for many rows: a byte each. With VNNI the bytes have their zeros taken off, so that only the
// scale of a group is left to do for each sum; without it they are the codes, whose products still fit 16 bits.
#pragma once

#include "int8.h"

namespace gpt_fast {

// Of sixteen groups: whether some zero is 128 or more, and zeros of at most 128, in `room` if so.
inline bool any_large(const uint8_t* zeros) {
    uint64_t halves[2];
    std::memcpy(halves, zeros, sizeof halves);
    return ((halves[0] | halves[1]) & 0x8080808080808080) != 0;
}
inline const uint8_t* bounded(const uint8_t* zeros, bool large, uint8_t (&room)[kTile]) {
    for (int j = 0; large && j < kTile; ++j) room[j] = zeros[j] < 128 ? zeros[j] : 128;
    return large ? room : zeros;
}

// Adds products to `codes`: of the four codes along k in `low` with x from `at` on in block b, and of those in `high` with x
// 16 further on.
template <int R, int T>
inline void add_codes(const I16 (&low)[T], const I16 (&high)[T], const QuantizedRow (&xs)[R], int64_t b, int64_t at,
                      I16 (*codes)[T]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const int8_t* four = xs[r].values(b) + at;
        const I16 first = splat_four(four), second = splat_four(four + 16);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            codes[r][t] = add_nibbles(codes[r][t], low[t], first);
            codes[r][t] = add_nibbles(codes[r][t], high[t], second);
        }
    }
}

// What the sums of codes of block b begin with.
template <int R, int T>
inline void begin_codes(const QuantizedRow (&xs)[R], int64_t b, I16 (*codes)[T]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) codes[r][t] = xs[r].begin(b);
}

// The scales and zeros of the sixteen groups that a tile has at one k. add(): sum + (codes - zero / 8 * the sum of x) *
// scale * x's scale, for block b of row x, without tiles; `codes` as add_codes() leaves them.
#ifdef GPT_FAST_PAIRED_DOTS
// What joins the halves of sums of 16 bits multiplies them as well.
struct Int4Groups {
    I16 scale;
    F16 shift;  // zeros times scales

    Int4Groups() = default;
    Int4Groups(const uint8_t* scales, const uint8_t* zeros)
        : scale(nibble_scales(scales)), shift(load16_uint8(zeros) * load16_uint8(scales)) {}

    F16 add(F16 sum, I16 codes, const QuantizedRow& x, int64_t b) const {
        const F16 whole = minus_product(scaled_nibbles(codes, scale), shift, splat16(x.sum(b)));
        return plus_product(sum, whole, splat16(x.scale(b)));
    }
};
#else
// All but the last sum is exact.
struct Int4Groups {
    F16 scale, zero;

    Int4Groups() = default;
    Int4Groups(const uint8_t* scales, const uint8_t* zeros) : scale(load16_uint8(scales)), zero(load16_uint8(zeros)) {}

    F16 add(F16 sum, I16 codes, const QuantizedRow& x, int64_t b) const {
        const auto eighth = static_cast<float>(x.sum(b));
        return plus_product(sum, minus_product(x.counted(codes, b), zero, splat16(eighth)), scale);
    }
};
#endif

// The same where kTiles, of two neighbouring parts of a block of x, all as integers. A weight is (8 (q - 8) + 64 - zero) /
// 8 * scale. The sum of the products of a part's codes less 8 fits 16 bits, so that one instruction multiplies it by the
// scale and adds it. Another one adds what is left of the zeros, of both parts.
class TiledInt4Groups {
public:
    static constexpr int32_t kMost = 192;  // of zeros that add_zeros() takes: 16 bits hold what is left of them

    // Part 0, then 1 if there is one; `header`: scales and zeros. Returns the zeros.
    template <int part>
    I16 set(const uint8_t* header) {
        const I16 scale = load16_bytes(header), zero = load16_bytes(header + kTile);
        const I16 shift = dot_words(splat16(0), minus(splat16(64), zero), scale);
        eight_scales_[part] = shift_left<3>(scale);
        shift_ = part == 0 ? lower_words(shift) : plus(shift_, shift_left<16>(shift));
        if (part == 0) headers_[1] = nullptr;
        headers_[part] = header;
        return zero;
    }

    // total + eight times the products of a row with a part, whose codes less 8 make `exact`, but for zeros.
    template <int part>
    I16 add(I16 total, I16 exact) const {
        return dot_words(total, exact, eight_scales_[part]);
    }

    // total + what is left of them; `sums`: of a row in the two parts.
    I16 add_zeros(I16 total, I16 sums) const { return dot_words(total, shift_, sums); }

    // The rest of it for zeros above kMost, for R rows; sums(r): of a row.
    template <int R, class Sums>
    [[gnu::noinline]] void add_carries(I16 (&totals)[R], Sums sums) const {
        int16_t words[kTile][2] = {};  // what 16 bits lack, in units of 2^16
        for (int part = 0; part < 2 && headers_[part]; ++part)
            for (int j = 0; j < kTile; ++j)
                words[j][part] = (64 - headers_[part][kTile + j]) * headers_[part][j] < INT16_MIN ? -1 : 0;
        const I16 carries = load64(reinterpret_cast<const uint8_t*>(words));
        for (int r = 0; r < R; ++r)
            totals[r] = plus(totals[r], shift_left<16>(dot_words(splat16(0), carries, sums(r))));
    }

private:
    I16 eight_scales_[2], shift_;
    const uint8_t* headers_[2];
};

// Without VNNI: codes in a byte each, scales and zeros as products take them.
struct CodesOfInt4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTiledRows = 0;
    static constexpr int kStreamedRows = 0;
    static constexpr int kMostRows = kPairedDots ? 5 : kCachedRows;  // sums of more do not fit the registers
    static constexpr int tiles_at_once(int) { return 1; }

    // kBlock neighbours along k of one tile.
    struct alignas(64) Block {
        uint8_t low[4][4 * kTile], high[4][4 * kTile];
        Int4Groups groups;

        // w: the block as packed (int4.h), behind the scales and zeros of its group.
        void set(const uint8_t* w, const uint8_t* scales, const uint8_t* zeros) {
            groups = {scales, zeros};
#pragma GCC unroll 4
            for (int g = 0; g < 4; ++g) {
                const I16 both = load64(w + g * 64);
                store64(low[g], low_nibbles(both)), store64(high[g], high_nibbles(both));
            }
        }
    };

    const Block* data;  // [tiles, blocks]
    int64_t first;      // block
    int64_t blocks;

    // `tile`: of those in `data`.
    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch&) const {
        QuantizedRow xs[R];
        F16 sum[R][1];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            const Block& w = data[tile * blocks + b - first];
            I16 codes[R][1];
            begin_codes(xs, b, codes);
#pragma GCC unroll 4
            for (int g = 0; g < 4; ++g) {
                const I16 low[] = {load64(w.low[g])}, high[] = {load64(w.high[g])};
                add_codes<R, 1>(low, high, xs, b, g * 4, codes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sum[r][0] = w.groups.add(sum[r][0], codes[r][0], xs[r], b);
        }
        store_sums(sum, acc);
    }
};

// With VNNI. Codes as bytes that have their zeros taken off, 8 q - zero + 128, of the sixteen groups that a tile has at one
// k. Of a zero above 128 a rest is left.
class RaisedCodes {
public:
    explicit RaisedCodes(const uint8_t* zeros) : zeros_(zeros), any_rest_(any_large(zeros)) {
        uint8_t room[kTile];
        raise_ = times(minus(splat16(128), load16_bytes(bounded(zeros, any_rest_, room))), splat16(0x01010101));
    }

    // Of the codes in the low halves of 64 bytes, and in the high ones. No byte overflows.
    I16 low(I16 both) const { return plus(shift_left<3>(low_nibbles(both)), raise_); }
    I16 high(I16 both) const { return plus(shift_left<3>(high_nibbles(both)), raise_); }

    bool any_rest() const { return any_rest_; }
    void rest(int32_t* to) const {
        for (int j = 0; j < kTile; ++j) to[j] = zeros_[j] < 128 ? 0 : zeros_[j] - 128;
    }

private:
    const uint8_t* zeros_;
    bool any_rest_;
    I16 raise_;
};

// Takes what is left of the zeros from `exact`, eight times the sums over block b of x, of tile t.
template <int R, int T>
[[gnu::always_inline]] inline void take_zero_rest(const int32_t* rest, const QuantizedRow (&xs)[R], int64_t b, int t,
                                                  I16 (&exact)[R][T]) {
    const I16 each = load64(reinterpret_cast<const uint8_t*>(rest));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) exact[r][t] = minus(exact[r][t], times(each, splat16(xs[r].total(b))));
}

// Adds block b of tile t to the sums.
template <int R, int T>
[[gnu::always_inline]] inline void add_raised(const I16 (&exact)[R][T], F16 eighth_scale, const QuantizedRow (&xs)[R],
                                              int64_t b, int t, F16 (&sum)[R][T]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        sum[r][t] = plus_product(sum[r][t], xs[r].counted(exact[r][t], b), eighth_scale);
}

struct ReadyInt4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTiledRows = 0;
    static constexpr int kStreamedRows = 0;
    static constexpr int kMostRows = 6;  // with 8 the sums do not fit the registers, which costs more than it saves
    static constexpr int tiles_at_once(int rows) { return tiles_of_integers(rows); }

    // kBlock neighbours along k of one tile. The value of a weight is (byte - 128 - rest) / 8 * scale.
    struct alignas(64) Block {
        uint8_t bytes[8][4 * kTile];
        float eighth_scale[kTile];
        int32_t rest[kTile];  // of zeros that do not fit a byte
        bool any_rest;

        // w: the block as packed (int4.h), behind the scales and zeros of its group.
        void set(const uint8_t* w, const uint8_t* scales, const uint8_t* zeros) {
            const RaisedCodes raised(zeros);
            any_rest = raised.any_rest();
            if (any_rest) raised.rest(rest);
            store16(eighth_scale, load16_uint8(scales) * splat16(0.125f));
#pragma GCC unroll 4
            for (int g = 0; g < 4; ++g) {
                const I16 both = load64(w + g * 64);
                store64(bytes[g], raised.low(both)), store64(bytes[g + 4], raised.high(both));
            }
        }
    };

    const Block* data;  // [tiles, blocks]
    int64_t first;      // block
    int64_t blocks;

    // `tile`: of those in `data`.
    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch&) const {
        const int64_t tile_bytes = blocks * static_cast<int64_t>(sizeof(Block));
        QuantizedRow xs[R];
        F16 sum[R][T];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            const Block* w = data + tile * blocks + b - first;
            I16 exact[R][T];  // eight times the sums
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = xs[r].begin_raised(b);
            add_dots<true>(w->bytes[0], tile_bytes, [&](int r) { return xs[r].values(b); }, exact, [](int) {});
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                if (w[t * blocks].any_rest) take_zero_rest(w[t * blocks].rest, xs, b, t, exact);
                add_raised(exact, load16(w[t * blocks].eighth_scale), xs, b, t, sum);
            }
        }
        store_sums(sum, acc);
    }
};

}  // namespace gpt_fast
