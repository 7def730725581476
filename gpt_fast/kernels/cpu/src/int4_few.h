// Products of few rows with 4-bit weights by tiles of AMX (int4.h has the format): what a prompt does with tiles takes more
// preparation than so few rows pay for. A register of weights is one group of kBlock codes, less 8: then the sum of its
// products fits 16 bits, and one instruction multiplies it by the group's scale and adds it.
#pragma once

#include "int4_ready.h"

namespace gpt_fast {

template <class Registers = Tiles>
class FewInt4Rows {
public:
    // R rows of one panel from `x` on, times a tile of k's [k, k_end), which begins at `w`; sums to `sums`, `stride`
    // floats from row to row, or added to them. Groups of `group_blocks` blocks begin with `header` bytes.
    template <int R>
    void add(const QuantizedRow& x, const uint8_t* w, int64_t group_blocks, int64_t header, int64_t k, int64_t k_end,
             bool begun, float* sums, int64_t stride) {
        shape(R);
        alignas(64) int32_t exact[kParts][R][kTile];
        Weights weights;
        Reader reader{w, w, k / kBlock, k_end / kBlock, k / kBlock, group_blocks, header};
        for (int64_t block = k / kRounded; reader.block < reader.end; ++block, begun = true) {
            weights.take(reader);
            for (int64_t part = 0; part < weights.parts; ++part) {
                registers_.template zero<0>();
                registers_.template load<1>(bytes(x.values(block) + part * kBlock), kRounded);
                registers_.template load<2>(bytes(weights.codes[part]), kTileBytes);
                registers_.template add_int8<0, 1, 2>();
                registers_.template store<0>(reinterpret_cast<uint8_t*>(exact[part]), kTileBytes);
            }
            const PanelBlock rounded(x, block);
            I16 inner[R];  // eight times the sums over the block
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) inner[r] = splat16(0);
            auto add_part = [&](int64_t two, auto part) __attribute__((always_inline)) {
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
                    inner[r] = weights.groups[two].template add<part>(
                        inner[r], load64(reinterpret_cast<const uint8_t*>(exact[2 * two + part][r])));
            };
            for (int64_t two = 0; 2 * two < weights.parts; ++two) {
                add_part(two, std::integral_constant<int, 0>());
                if (2 * two + 1 < weights.parts) add_part(two, std::integral_constant<int, 1>());
                auto row_sums = [&](int64_t r) { return rounded.sums(r, two); };
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) inner[r] = weights.groups[two].add_zeros(inner[r], row_sums(r));
                if (!weights.carries) continue;
                I16 totals[R];  // a copy, so that the others need not be in memory
                std::memcpy(totals, inner, sizeof totals);
                weights.groups[two].add_carries(totals, row_sums);
                std::memcpy(inner, totals, sizeof totals);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                float* to = sums + r * stride;
                const F16 before = begun ? load16(to) : splat16(0.0f);
                store16(to, plus_product(before, to_floats(inner[r]), splat16(rounded.scale(r) * 0.125f)));
            }
        }
    }

private:
    // What is left of a tile.
    struct Reader {
        const uint8_t *at, *scales;
        int64_t block, end, group_end, group_blocks, header;
    };

    // A block of x long.
    struct Weights {
        alignas(64) int8_t codes[kParts][kTile * kBlock];
        TiledInt4Groups groups[ceil_div(kParts, 2)];
        int64_t parts;
        bool carries;

        void take(Reader& from) {
            const int64_t left = from.end - from.block;
            parts = left < kParts ? left : kParts, carries = false;
            for (int64_t part = 0; part < parts; ++part, ++from.block, from.at += kTile * kBlock / 2) {
                if (from.block == from.group_end)
                    from.scales = from.at, from.at += from.header, from.group_end += from.group_blocks;
                if (part % 2)
                    groups[part / 2].set<1>(from.scales);
                else
                    groups[part / 2].set<0>(from.scales);
                carries |= any_large(from.scales + kTile);
#pragma GCC unroll 4
                for (int64_t g = 0; g < 4; ++g) {
                    prefetch(from.at + kAhead + g * kLine);
                    const I16 both = load64(from.at + g * kLine);
                    store64(reinterpret_cast<uint8_t*>(codes[part] + g * kLine), low_nibbles_less8(both));
                    store64(reinterpret_cast<uint8_t*>(codes[part] + (g + 4) * kLine), high_nibbles_less8(both));
                }
            }
        }
    };

    static const uint8_t* bytes(const int8_t* at) { return reinterpret_cast<const uint8_t*>(at); }

    void shape(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        registers_.shape(0, rows, kTileBytes), registers_.shape(1, rows, kBlock);
        registers_.shape(2, kBlock / 4, kTileBytes);
        registers_.begin();
    }

    int64_t rows_ = 0;
    Registers registers_;
};

}  // namespace gpt_fast
