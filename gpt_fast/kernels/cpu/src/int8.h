// Products with int8 weights, one float32 scale per output; x is quantized in blocks (activations.h).
//
// Packed: [tiles, blocks, 8, 16 outputs, 4 k], the last block of 32 filled up with zeros. Sums within a block of x are
// exact integers; block sums are added in float32 in ascending order of k.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int8 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTiledRows = kTiles ? 4 : 0;  // fewer are faster without
    static constexpr int64_t kManyRowsTiles = 2, kManyRowsDepth = kTiles ? 1024 : 512;
    static constexpr int tiles_at_once(int rows) { return tiles_of_integers(rows); }
    static constexpr int64_t kBlockBytes = kTile * kBlock, kRoundedBytes = kTile * kRounded;

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }

    const uint8_t* at(int64_t tile, int64_t k) const { return data + (tile * blocks * kBlock + k) * kTile; }

    void tiled(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
               const Sums& acc) const {
        tiled_integers(*this, x, row, rows, tile, tiles, k, k_end, acc);
    }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const int64_t tile_bytes = blocks * kBlockBytes;
        const uint8_t* tiles = data + tile * tile_bytes;
        QuantizedRow xs[R];
        F16 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = x.row(row + r);
        load_sums(sum, acc, acc_stride);
        for (int64_t b = k / kRounded, end = ceil_div(k_end, kRounded); b < end; ++b) {
            I16 exact[R][T];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = begin_dots16(xs[r].offset(b));
            for (int64_t part = 0; part < kParts && b * kParts + part < blocks; ++part) {
                const int64_t at = (b * kParts + part) * kBlockBytes;
                fetch_ahead<T>(tiles, tile_bytes, at, kBlockBytes);
#pragma GCC unroll 8
                for (int g = 0; g < 8; ++g) {
                    I16 wv[T];
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) wv[t] = load64(tiles + t * tile_bytes + at + g * 64);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const I16 four = splat_four(xs[r].values(b) + part * kBlock + g * 4);
#pragma GCC unroll 8
                        for (int t = 0; t < T; ++t) exact[r][t] = dot(exact[r][t], wv[t], four);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 scale = splat16(xs[r].scale(b));
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) sum[r][t] = plus_product(sum[r][t], to_floats(exact[r][t]), scale);
            }
        }
        store_sums(sum, acc, acc_stride);
    }

    // What add_tile() takes of some weights of one tile: the last block may be filled up with zeros.
    static constexpr int64_t kPreparedDepth = kChunk * kRounded;
    struct Prepared {
        const uint8_t* data;
        int64_t tile_bytes, whole;
        alignas(64) uint8_t last[kRoundedBytes];
    };

    void prepare(int64_t tile, int64_t k, int64_t k_end, Prepared& to) const {
        to.tile_bytes = blocks * kBlockBytes, to.data = at(tile, k);
        to.whole = (k_end - k) / kRounded;
        const int64_t rest = (k_end - k) % kRounded * kTile;
        if (rest == 0) return;
        std::memcpy(to.last, to.data + to.whole * kRoundedBytes, static_cast<size_t>(rest));
        std::memset(to.last + rest, 0, static_cast<size_t>(kRoundedBytes - rest));
    }

    // R rows of one panel; `fetch`: nobody has read these weights before.
    template <int R>
    static void add_tile(TileBlocks<>& registers, const QuantizedRow& x, const Prepared& w, int64_t k, int64_t k_end,
                         const Sums& acc, bool fetch) {
        const auto& chunk = x.chunk(k / kRounded);
        const int64_t first = k / kRounded % kChunk;
        const auto* values = reinterpret_cast<const uint8_t*>(chunk.values[first][x.lane]);
        const float* scales = chunk.scale[x.lane] + first;
        const uint8_t *weights = w.data, *last = w.last;
        const int64_t whole = w.whole, tile_bytes = w.tile_bytes;
        registers.shape(R, kTileBytes);
        F16 sum[R][1];
        load_sums(sum, acc.data, acc.stride);
        auto x_at = [=](int64_t b) { return values + b * kPanel * kRounded; };
        auto w_at = [=](int64_t b) {
            if (fetch) fetch_ahead<1>(weights, tile_bytes, b * kRoundedBytes, kRoundedBytes);
            return b < whole ? weights + b * kRoundedBytes : last;
        };
        auto each = [&, scales](int64_t b, const int32_t(*exact)[kTile]) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const I16 integers = load64(reinterpret_cast<const uint8_t*>(exact[r]));
                sum[r][0] = plus_product(sum[r][0], to_floats(integers), splat16(scales[r * kChunk + b]));
            }
        };
        registers.template run<kRounded / kTileBytes>(ceil_div(k_end - k, kRounded), kRounded, x_at, w_at, each);
        store_sums(sum, acc.data, acc.stride);
    }
};

}  // namespace gpt_fast
