// Products with int8 weights, one float32 scale per output; x is quantized in blocks of 32.
//
// Packed: [tiles, blocks, 8, 8 outputs, 4 k], the last block filled up with zeros. Sums within a block are exact
// integers; block sums are added in float32 in ascending order of k.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int8 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTile = 8;
    static constexpr int kMaxRows = 4;
    static constexpr int64_t kManyRowsTiles = 4;
    static constexpr bool kOutputScale = true;
    // Several tiles, several streams: the hardware fetches ahead for each by itself; and eight sums hide each other's
    // latency.
    static constexpr int tiles_at_once(int rows) { return rows <= 2 ? 4 : 2; }
    static constexpr int64_t kBlockBytes = kTile * kBlock;

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const uint8_t* w[T];
        const int8_t* xs[R];
        const float* scales[R];
        F8 sum[R][T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) w[t] = data + (tile + t) * blocks * kBlockBytes;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.values + (row + r) * x.blocks * kBlock;
            scales[r] = x.scales + (row + r) * x.blocks;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = load8(acc + r * acc_stride + t * kTile);
        }
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            I8 exact[R][T];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = splat(0);
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                I8 four[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    four[r] = splat_bytes(xs[r] + b * kBlock + g * 4);
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const I8 wv = load32(w[t] + b * kBlockBytes + g * 32);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) exact[r][t] = dot(exact[r][t], wv, four[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F8 scale = splat(scales[r][b]);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) sum[r][t] = plus_product(sum[r][t], to_floats(exact[r][t]), scale);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) store8(acc + r * acc_stride + t * kTile, sum[r][t]);
    }
};

inline void linear_int8(Team& team, const QuantizedRows& x, int64_t rows, const Linear& layer, float* out,
                        const float* residual) {
    linear_packed<Int8>(team, x, rows, Int8{layer.data, x.blocks}, layer, out, residual);
}

}  // namespace gpt_fast
