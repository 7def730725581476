// Products with 4-bit weights, value = (q - zero / 8) * scale * row scale, scale and zero bytes of a group of 32, 64 or
// 128 along K; x in int8 blocks of 32.
//
// Packed: [tiles, groups, 32 + 256 * group_size / 32] bytes: 16 scales and 16 zeros, then for every block [4, 16
// outputs, 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTiledRows = 0;
    static constexpr int64_t kManyRowsTiles = 2;
    static constexpr int tiles_at_once(int rows) { return tiles_of_integers(rows); }
    static constexpr int64_t kHeader = 2 * kTile, kBlockBytes = kTile * kBlock / 2;

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const int64_t group_blocks = group_size / kBlock, group_bytes = kHeader + group_blocks * kBlockBytes;
        const int64_t tile_bytes = k_total / group_size * group_bytes;
        const uint8_t* tiles = data + tile * tile_bytes;
        const QuantizedBlock* xs[R];
        F16 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = x.row(row + r);
        load_sums(sum, acc, acc_stride);
        int64_t at = k / group_size * group_bytes;  // from the beginning of a tile
        for (int64_t b = k / kBlock; b < k_end / kBlock;) {
            const uint8_t* header = tiles + at;
            at += kHeader;
            for (const int64_t end = b + group_blocks; b < end; ++b, at += kBlockBytes) {
                fetch_ahead<T>(tiles, tile_bytes, at, kHeader + kBlockBytes);
                I16 exact[R][T];
                add_block<R, T>(tiles + at, tile_bytes, xs, b, exact);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const F16 scale = load16_uint8(header + t * tile_bytes);
                    const F16 zero = load16_uint8(header + t * tile_bytes + kTile);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const F16 dot = to_floats(nibble_sums(exact[r][t])) * splat16(xs[r][b].scale);
                        sum[r][t] = plus_product(sum[r][t], minus_product(dot, zero, splat16(xs[r][b].eighth)), scale);
                    }
                }
            }
        }
        store_sums(sum, acc, acc_stride);
    }

    // exact = the sums over one block of codes, as integers; the weights of each value serve all rows.
    template <int R, int T>
    static void add_block(const uint8_t* w, int64_t tile_bytes, const QuantizedBlock* const* xs, int64_t b,
                          I16 (*exact)[T]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) exact[r][t] = splat16(0);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            I16 low[T], high[T];
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const I16 both = load64(w + t * tile_bytes + g * 64);
                low[t] = low_nibbles(both), high[t] = high_nibbles(both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const int8_t* four = xs[r][b].values + g * 4;
                const I16 first = splat_four(four), second = splat_four(four + 16);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    exact[r][t] = add_nibbles(exact[r][t], low[t], first);
                    exact[r][t] = add_nibbles(exact[r][t], high[t], second);
                }
            }
        }
    }
};

}  // namespace gpt_fast
