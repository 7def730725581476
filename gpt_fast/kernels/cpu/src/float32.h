// Products with float32 weights, all in float32. Packed: [tiles, K, 16].
#pragma once

#include "linear.h"

namespace gpt_fast {

struct FloatRows {
    const float* data;
    int64_t stride;
    const float* row(int64_t m) const { return data + m * stride; }
    void fetch(int64_t count) const { fetch_written(data, count * stride); }
};

struct Float32 {
    using Rows = FloatRows;
    static constexpr int64_t kTiledRows = 0, kReadyRows = 0, kWholeRows = kMaxRows;
    static constexpr int kStreamedRows = 1;
    static constexpr int kMostRows = kCachedRows;
    static constexpr int64_t kManyRowsTiles = 8, kManyRowsDepth = 512;
    static constexpr int64_t kPromptDepth = kManyRowsDepth;
    // A sum waits 4 cycles for the one before, so few rows need several tiles to keep the multipliers busy.
    static constexpr int tiles_at_once(int rows) {
        return kRegisters < 32 ? (rows == 1 ? kStreams : rows == 2 ? 2 : 1) : rows <= 2 ? kStreams : 2;
    }
    static constexpr int64_t kStretch = 16;  // values of k for which the next weights are fetched together

    const float* data;
    int64_t k_total;

    int64_t depth() const { return k_total; }
    int64_t tile_bytes() const { return k_total * kTile * static_cast<int64_t>(sizeof(float)); }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch& fetch) const {
        F16 sum[R][T];
        const float* xs[R];
        const int64_t tile_values = k_total * kTile, value_bytes = sizeof(float), tile_bytes = this->tile_bytes();
        const float* tiles = data + tile * tile_values;
        take_rows(xs, x, row);
        load_sums(sum, acc);
        const bool two = kRegisters >= 32 && two_steps<R>();
        for (int64_t i = k; i < k_end;) {
            const uint8_t* next =
                fetch.template after<T>(reinterpret_cast<const uint8_t*>(tiles), tile_bytes, i * kTile * value_bytes);
            const int64_t end = std::min(i + kStretch, k_end);
            auto step = [&]() __attribute__((always_inline)) {
                fetch.template line<R, T>(next, tile_bytes, i);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const F16 wv = load16(tiles + t * tile_values + i * kTile);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sum[r][t] = plus_product(sum[r][t], splat16(xs[r][i]), wv);
                }
                ++i, next += kTile * value_bytes;
            };
            while (two && i + 1 < end) step(), step();
            while (i < end) step();
        }
        store_sums(sum, acc);
    }
};

}  // namespace gpt_fast
