// How products of some rows by registers of tiles keep a core busy. Each step multiplies one register of sums, which
// the next step stores, and adds up what the step before the last one multiplied: a quarter of the rows at a time,
// between its instructions of tiles. So nothing waits for what has just been stored. Blocks of kStreams tiles follow
// each other, which share what is read of x.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

constexpr int kPipelineFrom = 6;  // rows; fewer are as fast by vectors, with the same bits

namespace steps {
template <class Body, int... numbers>
[[gnu::always_inline]] inline void each(Body body, std::integer_sequence<int, numbers...>) {
    (body(Number<numbers>()), ...);
}
}  // namespace steps

// body(Number<0>()), ..., body(Number<count - 1>())
template <int count, class Body>
[[gnu::always_inline]] inline void each_step(Body body) {
    steps::each(body, std::make_integer_sequence<int, count>());
}

// A piece of a product: `count` rows of one panel and at most kStreams tiles, along [k, k_end).
struct ProductPiece {
    int64_t row, count, tile, tiles, k, k_end;
    Sums sums;
    int64_t whole() const { return k + (k_end - k) / kRounded * kRounded; }  // the end of its last whole block
    Sums rest() const { return sums.after(whole() - k); }
};

// What a pipeline has of a piece of up to R rows.
template <int R>
struct PipelineSums {
    PipelineSums(const ProductPiece& piece, int64_t tile_bytes) {
        const Sums& from = piece.sums;
        for (int64_t t = 0; t < kStreams; ++t) {
            tile_at[t] = std::min(t, piece.tiles - 1) * tile_bytes;
            for (int64_t r = 0; r < R; ++r) {
                const bool begun = from.begun && t < piece.tiles && r < piece.count;
                sum[t][r] = begun ? load16(from.data + r * from.stride + t * kTile) : splat16(0.0f);
            }
        }
    }
    void store(const ProductPiece& piece) const {
        for (int64_t t = 0; t < piece.tiles; ++t)
            for (int64_t r = 0; r < piece.count; ++r)
                store16(piece.sums.data + r * piece.sums.stride + t * kTile, sum[t][r]);
    }

    // Part `slot` of `slots` of the lines of a block of all tiles, in turns: from several places memory is faster.
    template <int lines, int slot, int slots>
    [[gnu::always_inline]] void fetch(const uint8_t* block) const {
#pragma GCC unroll 8
        for (int i = kStreams * lines * slot / slots; i < kStreams * lines * (slot + 1) / slots; ++i)
            prefetch(block + tile_at[i % kStreams] + i / kStreams * kLine);
    }

    F16 sum[kStreams][R];
    int64_t tile_at[kStreams];  // bytes; the last one again in place of those that are missing
};

// body(piece) for all of [k, k_end) of some rows and tiles; `first`: where the rows stand in their panels.
template <class Body>
inline void each_piece(int64_t first, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
                       const Sums& acc, Body body) {
    const int64_t depth = (k_end - k) / acc.parts;
    for (int64_t t = 0; t < tiles; t += kStreams)
        each_group(first, rows, kTileRows, [&](int64_t begin, int64_t count) {
            for (int64_t p = 0; p < acc.parts; ++p)
                body(ProductPiece{row + begin, count, tile + t, std::min<int64_t>(tiles - t, kStreams), k + p * depth,
                           k + (p + 1) * depth, acc.only(p).from(begin, t)});
        });
}

}  // namespace gpt_fast
