// Products with 4-bit weights, value = (q - zero / 8) * scale * row scale, scale and zero bytes of a group of 32, 64 or
// 128 along K; x in int8 blocks of 32.
//
// Packed: [tiles, groups, 16 + 128 * group_size / 32] bytes: 8 scales and 8 zeros, then for every block [4, 8 outputs,
// 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTile = 8;
    static constexpr int kMaxRows = 4;
    static constexpr int64_t kManyRowsTiles = 4;
    static constexpr bool kOutputScale = true;
    static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : 2; }  // as in int8.h
    static constexpr int64_t kHeader = 16, kBlockBytes = kTile * kBlock / 2;
    static constexpr int64_t kAhead = 1280;  // bytes

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const int64_t group_blocks = group_size / kBlock, group_bytes = kHeader + group_blocks * kBlockBytes;
        const int64_t groups = k_total / group_size;
        const uint8_t* w = data + (tile * groups + k / group_size) * group_bytes;
        const int64_t next_tile = groups * group_bytes;
        const int8_t* xs[R];
        const float *scales[R], *eighths[R];
        F8 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.values + (row + r) * x.blocks * kBlock;
            scales[r] = x.scales + (row + r) * x.blocks;
            eighths[r] = x.eighths + (row + r) * x.blocks;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = load8(acc + r * acc_stride + t * kTile);
        }
        for (int64_t b = k / kBlock; b < k_end / kBlock;) {
            const uint8_t* header = w;
            w += kHeader;
            for (const int64_t end = b + group_blocks; b < end; ++b, w += kBlockBytes) {
                if (R > 1) {  // the four streams of a single row are fetched ahead by the hardware
                    for (int64_t line = 0; line < 192; line += 64) prefetch(w + kAhead + line);
                }
                I8 exact[R][T];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) exact[r][t] = splat(0);
#pragma GCC unroll 8
                for (int g = 0; g < 4; ++g) {
                    I8 first[R], second[R];
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        first[r] = splat_bytes(xs[r] + b * kBlock + g * 4);
                        second[r] = splat_bytes(xs[r] + b * kBlock + 16 + g * 4);
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const I8 both = load32(w + t * next_tile + g * 32);
                        const I8 low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r) {
                            exact[r][t] = add_nibbles(exact[r][t], low, first[r]);
                            exact[r][t] = add_nibbles(exact[r][t], high, second[r]);
                        }
                    }
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const F8 scale = load8_uint8(header + t * next_tile);
                    const F8 zero = load8_uint8(header + t * next_tile + kTile);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const F8 dot = to_floats(nibble_sums(exact[r][t])) * splat(scales[r][b]);
                        sum[r][t] = plus_product(sum[r][t], minus_product(dot, zero, splat(eighths[r][b])), scale);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) store8(acc + r * acc_stride + t * kTile, sum[r][t]);
    }
};

inline void linear_int4(Team& team, const QuantizedRows& x, int64_t rows, const Linear& layer, float* out,
                        const float* residual) {
    linear_packed<Int4>(team, x, rows, Int4{layer.data, layer.k, layer.group_size}, layer, out, residual);
}

}  // namespace gpt_fast
