// Products of few rows with 4-bit weights where the CPU has registers of tiles: up to five by vectors, more by a
// pipeline, with the same bits. What a prompt does with tiles (int4.h) takes more preparation than so few rows pay for.
#pragma once

#include "int4_pipeline.h"

namespace gpt_fast {

struct FewInt4 : PackedInt4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kPipelineRows = 6 * kTileRows;

    // Tiles in turns: two, which memory gives faster, or as many as give more rows time between their blocks.
    static constexpr int few_rows_tiles(int rows) { return rows <= 2 ? 2 : kStreams; }

    // A template, so that it is made for CPUs with tiles only.
    template <class Sum>
    void add_by_pipeline(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k,
                         int64_t k_end, const Sum& acc) const {
        each_piece(x.first + row, row, rows, tile, tiles, k, k_end, acc, [&](const ProductPiece& piece) {
            auto add_by = [&](auto pipeline) { add_rest(pipeline.add(piece), x, piece); };
            if (piece.count > kMaxRows)
                add_by(Int4Pipeline<kTileRows, 1>(*this, x.row(piece.row), piece.count));
            else
                add_by(Int4Pipeline<kMaxRows, 2>(*this, x.row(piece.row), piece.count));
        });
    }

    // What whole blocks leave of a piece: all of it, or its last block if that is not whole.
    void add_rest(bool all, const Rows& x, const ProductPiece& piece) const {
        const int64_t from = all ? piece.k : piece.whole();
        if (from == piece.k_end) return;
        const Sums to = all ? piece.sums : piece.rest();
        for (int64_t r = 0; r < piece.count; ++r)
            for (int64_t t = 0; t < piece.tiles; ++t)
                exact_row(x, piece.row + r, piece.tile + t, from, piece.k_end, to.from(r, t));
    }

    // By vectors, R rows of one panel and T tiles. What is rare would cost many rows their registers, and is left to
    // exact_row().
    template <int R, int T>
    void exact_blocks(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc) const {
        const ProductPiece piece{row, R, tile, T, k, k_end, acc};
        add_rest(add_whole_blocks<R, T>(x, row, tile, k, piece.whole(), acc), x, piece);
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

    // Both halves of a line of each of T tiles: codes at the same four k, and those 16 further on.
    template <int T>
    [[gnu::always_inline]] static void take_codes(const uint8_t* w, int64_t tile_bytes, I16 (&low)[T], I16 (&high)[T]) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const I16 both = load64(w + t * tile_bytes);
            low[t] = low_nibbles(both), high[t] = high_nibbles(both);
        }
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
