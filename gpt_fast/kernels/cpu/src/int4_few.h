// Products of few rows with 4-bit weights where the CPU has registers of tiles: up to eight rows by vectors, up to 32 by
// tiles, with the same bits. What a prompt does with tiles (int4.h) takes more preparation than so few rows pay for.
#pragma once

#include "int4_ready.h"

namespace gpt_fast {

// Packed: [tiles, groups, 32 + 256 * group_size / 32] bytes: 16 scales and 16 zeros, then for every block [4, 16
// outputs, 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
struct PackedInt4 {
    static constexpr int64_t kHeader = 2 * kTile, kBlockBytes = kTile * kBlock / 2, kBlockLines = kBlockBytes / kLine,
                             kRoundedBytes = kTile * kRounded;

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }
    int64_t group_bytes() const { return kHeader + group_size / kBlock * kBlockBytes; }
    int64_t tile_bytes() const { return k_total / group_size * group_bytes(); }

    const uint8_t* at(int64_t tile, int64_t k) const {
        return data + tile * tile_bytes() + k / group_size * group_bytes();
    }
    // Of a block of x.
    int64_t rounded_bytes() const { return kRounded / group_size * group_bytes(); }

    // Both halves of a line of each of T tiles: codes at the same four k, and those 16 further on.
    template <int T>
    [[gnu::always_inline]] static void take_codes(const uint8_t* w, int64_t tile_bytes, I16 (&low)[T], I16 (&high)[T]) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const I16 both = load64(w + t * tile_bytes);
            low[t] = low_nibbles(both), high[t] = high_nibbles(both);
        }
    }
};

// By tiles: a register of weights is one group of kBlock codes, less 8.
template <class Registers = Tiles>
class FewInt4Rows {
public:
    static constexpr int64_t kGroupBytes = kTile * kBlock;

    // A block of one tile of weights.
    struct Weights {
        alignas(64) int8_t codes[kParts][kGroupBytes];
        TiledInt4Groups groups[ceil_div(kParts, 2)];
        int64_t parts;
        bool carries;

        // `count` parts of `w`, where groups of `group_parts` begin with `header` bytes. `next`: what to fetch meanwhile.
        void take(const uint8_t* w, const uint8_t* next, int64_t count, int64_t group_parts, int64_t header) {
            parts = count, carries = false;
            const uint8_t* scales = w;
            for (int64_t part = 0; part < parts; ++part, w += kGroupBytes / 2, next += kGroupBytes / 2) {
                if (part % group_parts == 0) scales = w, w += header, next += header;
                if (part % 2)
                    groups[part / 2].template set<1>(scales);
                else
                    groups[part / 2].template set<0>(scales);
                carries |= any_large(scales + kTile);
                prefetch(next + kGroupBytes / 2);  // of the header that may lie between two parts
#pragma GCC unroll 4
                for (int64_t g = 0; g < 4; ++g) {
                    prefetch(next + g * kLine);
                    const I16 both = load64(w + g * kLine);
                    store64(reinterpret_cast<uint8_t*>(codes[part] + g * kLine), low_nibbles_less8(both));
                    store64(reinterpret_cast<uint8_t*>(codes[part] + (g + 4) * kLine), high_nibbles_less8(both));
                }
            }
        }
    };

    // Adds a block of some rows of one panel, from `x` on.
    using Add = void (FewInt4Rows::*)(const PanelBlock& x, const Weights& w, const Sums& to);

    template <int R = kTileRows>
    static Add adder(int64_t rows) {
        if constexpr (R > 1) {
            if (rows < R) return adder<R - 1>(rows);
        }
        return &FewInt4Rows::add<R>;
    }

    // Sets the registers up for products of at most `rows` rows.
    void shape(int64_t rows) {
        registers_.shape(0, rows, kTileBytes), registers_.shape(1, rows, kBlock);
        registers_.shape(2, kBlock / 4, kTileBytes);
        registers_.begin();
    }

private:
    template <int R>
    void add(const PanelBlock& x, const Weights& w, const Sums& acc) {
        alignas(64) int32_t exact[kParts][kTileRows][kTile];
        for (int64_t part = 0; part < w.parts; ++part) {
            registers_.template zero<0>();
            registers_.template load<1>(reinterpret_cast<const uint8_t*>(x.values(0) + part * kBlock), kRounded);
            registers_.template load<2>(reinterpret_cast<const uint8_t*>(w.codes[part]), kTileBytes);
            registers_.template add_int8<0, 1, 2>();
            registers_.template store<0>(reinterpret_cast<uint8_t*>(exact[part]), kTileBytes);
        }
        I16 inner[R];  // eight times the sums over the block
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) inner[r] = splat16(0);
        auto add_part = [&](int64_t two, auto part) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                inner[r] = w.groups[two].template add<part>(
                    inner[r], load64(reinterpret_cast<const uint8_t*>(exact[2 * two + part][r])));
        };
        for (int64_t two = 0; 2 * two < w.parts; ++two) {
            add_part(two, std::integral_constant<int, 0>());
            if (2 * two + 1 < w.parts) add_part(two, std::integral_constant<int, 1>());
            auto row_sums = [&](int64_t r) { return x.sums(r, two); };
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) inner[r] = w.groups[two].add_zeros(inner[r], row_sums(r));
            if (!w.carries) continue;
            I16 totals[R];  // a copy, so that the others need not be in memory
            std::memcpy(totals, inner, sizeof totals);
            w.groups[two].add_carries(totals, row_sums);
            std::memcpy(inner, totals, sizeof totals);
        }
        F16 sum[R][1];
        load_sums(sum, acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            sum[r][0] = plus_product(sum[r][0], to_floats(inner[r]), splat16(x.scale(r) * 0.125f));
        store_sums(sum, acc);
    }

    Registers registers_;
};

struct FewInt4 : PackedInt4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kMostTiledRows = 2 * kTileRows;

    // Tiles in turns: two, which memory gives faster, or as many as give more rows time between their blocks.
    static constexpr int few_rows_tiles(int rows) { return rows <= 2 ? 2 : kStreams; }

    // Up to kMostTiledRows: a block of four tiles in turns, while their next ones are fetched.
    void add_by_tiles(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
                      const Sums& acc) const {
        struct Group {
            FewInt4Rows<>::Add add;
            QuantizedRow x;
            int64_t begin;
        } groups[3];
        int64_t num_groups = 0, most = 0;
        each_group(x.first + row, rows, kTileRows, [&](int64_t begin, int64_t count) {
            groups[num_groups++] = {FewInt4Rows<>::adder(count), x.row(row + begin), begin};
            most = std::max(most, count);
        });
        FewInt4Rows<> few;
        few.shape(most);
        FewInt4Rows<>::Weights weights;
        const int64_t depth = (k_end - k) / acc.parts, block_bytes = rounded_bytes();
        const Fetch following{block_bytes};
        for (int64_t t = 0; t < tiles; t += kStreams)
            for (int64_t p = 0; p < acc.parts; ++p) {
                const int64_t from = k + p * depth, end = from + depth;
                for (int64_t b = from / kRounded; b < ceil_div(end, kRounded); ++b)
                    for (int64_t i = t; i < std::min<int64_t>(t + kStreams, tiles); ++i) {
                        const uint8_t* w = at(tile + i, 0);
                        weights.take(w + b * block_bytes, following.after<kStreams>(w, tile_bytes(), b * block_bytes),
                                     std::min(kParts, end / kBlock - b * kParts), group_size / kBlock, kHeader);
                        const Sums to = acc.only(p).from(0, i).after(b * kRounded - from);
                        for (int64_t g = 0; g < num_groups; ++g)
                            (few.*groups[g].add)(PanelBlock(groups[g].x, b), weights, to.from(groups[g].begin, 0));
                    }
            }
    }

    // By vectors, R rows of one panel and T tiles. What is rare would cost many rows their registers, and is left to
    // exact_row().
    template <int R, int T>
    void exact_blocks(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc) const {
        const int64_t whole = k + (k_end - k) / kRounded * kRounded;
        const bool carries = add_whole_blocks<R, T>(x, row, tile, k, whole, acc);
        if (!carries && whole == k_end) return;
        const Sums to = carries ? acc : acc.after(whole - k);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) exact_row(x, row + r, tile + t, carries ? k : whole, k_end, to.from(r, t));
    }

    // Returns whether a zero was met that 16 bits do not hold; then the sums are as they were.
    template <int R, int T>
    bool add_whole_blocks(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc) const {
        const QuantizedRow first = x.row(row);
        I16 largest = splat16(0);  // zeros
        bool carries = false;
        constexpr int together = T < kStreams ? 1 : 2, ahead = T < kStreams ? 2 : 1;
        add_in_turns<R, T, together, ahead>(
            data + tile * tile_bytes(), tile_bytes(), rounded_bytes(), k / kRounded,
            k_end / kRounded, acc,
            [&](int64_t b, const uint8_t* w, const uint8_t* next, auto& sum) __attribute__((always_inline)) {
                add_whole_block(w, next, PanelBlock(first, b), sum, largest);
            },
            [&] { return !(carries = any_above(largest, TiledInt4Groups::kMost)); });
        return carries;
    }

    // A block of R rows and T tiles; `next`: what to fetch meanwhile.
    template <int R, int T>
    [[gnu::always_inline]] void add_whole_block(const uint8_t* w, const uint8_t* next, const PanelBlock& x,
                                                F16 (&sum)[R][T], I16& largest) const {
        const int64_t group_blocks = group_size / kBlock, tile_bytes = this->tile_bytes();
        const uint8_t* header = w;
        int64_t left = 0;  // of a group
        I16 inner[T][R];   // eight times the sums
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) inner[t][r] = splat16(0);
        for (int64_t two = 0; two < kParts / 2; ++two) {
            TiledInt4Groups groups[T];
            auto add_part = [&](auto number) __attribute__((always_inline)) {
                constexpr int part = number;
                if (left == 0) header = w, w += kHeader, next += kHeader, left = group_blocks;
                I16 exact[T][R];
                sum_part<R, T>(w, next, tile_bytes, x, 2 * two + part, exact);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    largest = larger(largest, groups[t].template set<part>(header + t * tile_bytes));
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) inner[t][r] = groups[t].template add<part>(inner[t][r], exact[t][r]);
                }
                --left, w += kBlockBytes, next += kBlockBytes;
            };
            add_part(std::integral_constant<int, 0>());
            add_part(std::integral_constant<int, 1>());
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) inner[t][r] = groups[t].add_zeros(inner[t][r], x.sums(r, two));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16 scale = splat16(x.scale(r) * 0.125f);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = plus_product(sum[r][t], to_floats(inner[t][r]), scale);
        }
    }

    // One row and one tile: blocks that are not whole, and any zeros.
    void exact_row(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc) const {
        F16 sum[1][1];
        load_sums(sum, acc);
        for (int64_t b = k / kBlock, end = k_end / kBlock; b < end;) {
            const PanelBlock block(x.row(row), b / kParts);
            I16 inner[] = {splat16(0)};
            for (int64_t two = 0; two < kParts / 2 && b < end; ++two) {
                TiledInt4Groups groups;
                auto add_part = [&](auto part) {
                    const uint8_t* header = at(tile, b * kBlock);
                    I16 exact[1][1];
                    const uint8_t* w = header + kHeader + b * kBlock % group_size / kBlock * kBlockBytes;
                    sum_part<1, 1>(w, w, 0, block, 2 * two + part, exact);
                    groups.set<part>(header);
                    inner[0] = groups.add<part>(inner[0], exact[0][0]);
                    ++b;
                };
                add_part(std::integral_constant<int, 0>());
                if (b < end) add_part(std::integral_constant<int, 1>());
                inner[0] = groups.add_zeros(inner[0], block.sums(0, two));
                groups.add_carries(inner, [&](int64_t) { return block.sums(0, two); });
            }
            sum[0][0] = plus_product(sum[0][0], to_floats(inner[0]), splat16(block.scale(0) * 0.125f));
        }
        store_sums(sum, acc);
    }

    // The sums of one part of a block of x. The weights of each value serve all rows.
    template <int R, int T>
    [[gnu::always_inline]] static void sum_part(const uint8_t* w, const uint8_t* next, int64_t tile_bytes,
                                                const PanelBlock& x, int64_t part, I16 (&exact)[T][R]) {
        auto fetch_line = [&](int64_t i) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) prefetch(next + t * tile_bytes + i * kLine);
        };
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) exact[t][r] = x.begin_less8(r, part);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            fetch_line(g);
            I16 low[T], high[T];
            take_codes(w + g * kLine, tile_bytes, low, high);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const int8_t* four = x.values(r) + part * kBlock + g * 4;
                const I16 first = splat_four(four), second = splat_four(four + kBlock / 2);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[t][r] = add_nibbles(exact[t][r], low[t], first);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[t][r] = add_nibbles(exact[t][r], high[t], second);
            }
        }
        fetch_line(kBlockLines);  // of the header that may lie between two blocks
    }
};

}  // namespace gpt_fast
