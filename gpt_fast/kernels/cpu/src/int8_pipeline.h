// Products of some rows with int8 weights by registers of tiles, in a pipeline (pipeline.h).
#pragma once

#include "pipeline.h"

namespace gpt_fast {

// Up to R rows of one panel.
template <int R, class Registers = Tiles>
class Int8Pipeline {
public:
    // `data`: the weights, as packed (int8.h).
    Int8Pipeline(const uint8_t* data, int64_t tile_bytes, const QuantizedRow& x, int64_t rows)
        : data_(data), tile_bytes_(tile_bytes), x_(x) {
        for (int i = 0; i < 6; ++i) registers_.shape(i, i / 2 == 1 ? kTileRows : rows, kTileBytes);  // sums, weights, x
        registers_.begin();
    }

    // Adds the whole blocks of a piece.
    void add(const ProductPiece& piece) {
        const int64_t first = piece.k / kRounded, end = piece.whole() / kRounded;
        if (first == end) return;
        const Fetch following{2 * kRoundedBytes};
        const uint8_t* weights = data_ + piece.tile * tile_bytes_;
        PipelineSums<R> all(piece, tile_bytes_);

        // A quarter of the rows of what was multiplied for tile t.
        auto finish = [&](const PanelBlock& x, auto t, int quarter) __attribute__((always_inline)) {
            if (quarter * R / 4 >= piece.count) return;
#pragma GCC unroll 4
            for (int r = quarter * R / 4; r < (quarter + 1) * R / 4; ++r) {
                const I16 exact = load64(reinterpret_cast<const uint8_t*>(exact_[t % 2][r]));
                all.sum[t][r] = plus_product(all.sum[t][r], to_floats(exact), splat16(x.scale(r)));
            }
        };

        for (int64_t b = first; b < end; ++b) {
            const uint8_t* w = weights + b * kRoundedBytes;
            const uint8_t* next = following.template after<kStreams>(weights, tile_bytes_, b * kRoundedBytes);
            const PanelBlock now(x_, b), before(x_, b > first ? b - 1 : b);
            each_step<kStreams>([&](auto number) __attribute__((always_inline)) {
                constexpr int t = number, sums = t % 2;
                constexpr auto done = Number<(t + kStreams - 2) % kStreams>();
                const bool begun = t > 1 || b > first;
                auto some_vectors = [&](auto quarter) __attribute__((always_inline)) {
                    all.template fetch<kRoundedBytes / kLine, 4 * t + quarter, 4 * kStreams>(next);
                    if (begun) finish(t < 2 ? before : now, done, quarter);
                };
                registers_.template zero<sums>();
                if constexpr (t == 0) load_x<4>(now), load_x<5>(now);
                registers_.template load<2>(w + all.tile_at[t], kTileBytes);
                some_vectors(Number<0>());
                if (t > 0 || begun) store_sums_of<1 - sums>();
                registers_.template add_int8<sums, 4, 2>();
                some_vectors(Number<1>());
                registers_.template load<3>(w + all.tile_at[t] + kRoundedBytes / 2, kTileBytes);
                some_vectors(Number<2>());
                registers_.template add_int8<sums, 5, 3>();
                some_vectors(Number<3>());
            });
        }
        store_sums_of<1>();
        const PanelBlock last(x_, end - 1);
        for (int quarter = 0; quarter < 4; ++quarter)
            finish(last, Number<kStreams - 2>(), quarter), finish(last, Number<kStreams - 1>(), quarter);
        all.store(piece);
    }

private:
    static constexpr int64_t kRoundedBytes = kTile * kRounded;
    static_assert((!kTiles || kRounded == 2 * kTileBytes) && kStreams % 2 == 0);

    template <int number>
    [[gnu::always_inline]] void load_x(const PanelBlock& block) {
        registers_.template load<number>(
            reinterpret_cast<const uint8_t*>(block.values(0)) + (number - 4) * kTileBytes, kRounded);
    }
    template <int number>
    [[gnu::always_inline]] void store_sums_of() {
        registers_.template store<number>(reinterpret_cast<uint8_t*>(exact_[number]), kTileBytes);
    }

    const uint8_t* data_;
    int64_t tile_bytes_;
    QuantizedRow x_;
    alignas(64) int32_t exact_[2][R][kTile] = {};
    Registers registers_;
};

}  // namespace gpt_fast
