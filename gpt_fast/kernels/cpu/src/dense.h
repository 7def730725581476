// Products with float32 and bfloat16 weights; x and all arithmetic are float32.
//
// Packed: [tiles, K, 16]. bfloat16 pairs output j (low half of 32 bits) with output j + 8 (high half), because a shift
// and a mask then give two float32 vectors.
#pragma once

#include "linear.h"

namespace gpt_fast {

struct DenseRows {
    const float* data;
    int64_t stride;
    const float* row(int64_t m) const { return data + m * stride; }
};

template <class Weight>  // float or uint16_t (bfloat16)
struct Dense {
    using Rows = DenseRows;
    static constexpr int64_t kTile = 16;
    static constexpr int kMaxRows = 6;  // 6 x 2 sums, 2 weights and 1 of x: 15 of 16 registers
    static constexpr int64_t kManyRowsTiles = 8;
    static constexpr bool kOutputScale = false;
    // A sum waits 4 cycles for the one before, so one row needs several tiles to keep the multipliers busy.
    static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

    const Weight* data;
    int64_t k_total;

    int64_t depth() const { return k_total; }

    static void load16(const float* p, F8& first, F8& second) {
        first = load8(p);
        second = load8(p + 8);
    }
    static void load16(const uint16_t* p, F8& first, F8& second) {
        const I8 pairs = load32(reinterpret_cast<const uint8_t*>(p));
        first = lower_bfloat16(pairs);
        second = upper_bfloat16(pairs);
    }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        F8 sum[R][T][2];
        const float* xs[R];
        const Weight* ws[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) ws[t] = data + (tile + t) * k_total * kTile;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.row(row + r);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
                for (int h = 0; h < 2; ++h) sum[r][t][h] = load8(acc + r * acc_stride + t * kTile + h * 8);
        }
        for (int64_t i = k; i < k_end; ++i) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                F8 first, second;
                load16(ws[t] + i * kTile, first, second);
                if (T == 1 || R == 2) prefetch(reinterpret_cast<const char*>(ws[t] + i * kTile) + kAhead);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const F8 xv = splat(xs[r][i]);
                    sum[r][t][0] = plus_product(sum[r][t][0], xv, first);
                    sum[r][t][1] = plus_product(sum[r][t][1], xv, second);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
                for (int h = 0; h < 2; ++h) store8(acc + r * acc_stride + t * kTile + h * 8, sum[r][t][h]);
    }

    static constexpr int64_t kAhead = 1024;  // bytes
};

template <class Weight>
void linear_dense(Team& team, const float* x, int64_t rows, const Linear& layer, float* out, const float* residual) {
    const Dense<Weight> w{reinterpret_cast<const Weight*>(layer.data), layer.k};
    linear_packed<Dense<Weight>>(team, DenseRows{x, layer.k}, rows, w, layer, out, residual);
}

template <class Weight>
void dense_tiles(const float* x, int64_t rows, const Linear& layer, float* out, int64_t tile, int64_t tile_end) {
    const Dense<Weight> w{reinterpret_cast<const Weight*>(layer.data), layer.k};
    linear_tiles<Dense<Weight>>(DenseRows{x, layer.k}, rows, w, layer, out, nullptr, tile, tile_end);
}

}  // namespace gpt_fast
