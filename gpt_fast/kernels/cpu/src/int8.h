// Products with int8 weights, one float32 scale per output; x is quantized in blocks of 32.
//
// Packed: [tiles, blocks, 8, 16 outputs, 4 k], the last block filled up with zeros. Sums within a block are exact
// integers; block sums are added in float32 in ascending order of k.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int8 {
    using Rows = QuantizedRows;
    using Tiled = TileSums<Pieces::kInt8>;
    static constexpr int64_t kTiledRows = kTiles ? kFewRows + 1 : 0;  // fewer are faster without
    static constexpr int64_t kTiledBytes = kBlock;
    static constexpr int64_t kManyRowsTiles = 2;
    static constexpr int tiles_at_once(int rows) { return tiles_of_integers(rows); }
    static constexpr int64_t kBlockBytes = kTile * kBlock;

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const int64_t tile_bytes = blocks * kBlockBytes;
        const uint8_t* tiles = data + tile * tile_bytes;
        const QuantizedBlock* xs[R];
        F16 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = x.row(row + r);
        load_sums(sum, acc, acc_stride);
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            fetch_ahead<T>(tiles, tile_bytes, b * kBlockBytes, kBlockBytes);
            I16 exact[R][T];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = begin_dots16(xs[r][b].offset);
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                I16 wv[T];
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) wv[t] = load64(tiles + t * tile_bytes + b * kBlockBytes + g * 64);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const I16 four = splat_four(xs[r][b].values + g * 4);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) exact[r][t] = dot(exact[r][t], wv[t], four);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 scale = splat16(xs[r][b].scale);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) sum[r][t] = plus_product(sum[r][t], to_floats(exact[r][t]), scale);
            }
        }
        store_sums(sum, acc, acc_stride);
    }

    template <int T>
    void tiled(Tiled& sums, const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t k, int64_t k_end,
               const Sums& acc) const {
        const int64_t tile_bytes = blocks * kBlockBytes;
        const int64_t row_bytes = blocks * static_cast<int64_t>(sizeof(QuantizedBlock));
        const uint8_t* tiles = data + tile * tile_bytes;
        alignas(64) int32_t exact[2 * kTileRows][T * kTile];
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            sums.zero<T>();
            sums.add<T>(x.row(row)[b].values, row_bytes, tiles + b * kBlockBytes, tile_bytes);
            sums.store<T>(exact, sizeof exact[0]);
            for (int64_t r = 0; r < rows; ++r) {
                const F16 scale = splat16(x.row(row + r)[b].scale);
                float* to = acc.data + r * acc.stride;
#pragma GCC unroll 2
                for (int t = 0; t < T; ++t, to += kTile) {
                    const I16 sum = load64(reinterpret_cast<const uint8_t*>(exact[r] + t * kTile));
                    store16(to, plus_product(load16(to), to_floats(sum), scale));
                }
            }
        }
    }
};

}  // namespace gpt_fast
