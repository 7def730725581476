// Products of few rows with 4-bit weights by tiles of AMX (int4.h has the format): what a prompt does with tiles takes more
// preparation than so few rows pay for. A register of weights is one group of kBlock codes, less 8: then the sum of its
// products fits 16 bits, and one instruction multiplies it by the group's scale and adds it.
#pragma once

#include "int4_ready.h"

namespace gpt_fast {

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

    // For so many rows at most.
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

}  // namespace gpt_fast
