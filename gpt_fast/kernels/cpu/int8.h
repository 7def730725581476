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
    static constexpr int kMaxRows = 8;
    static constexpr int64_t kManyRowsTiles = 4;
    static constexpr bool kOutputScale = true;
        // Four streams: the hardware fetches ahead for each by itself, and prefetching in their place only costs.
    static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : 1; }
    static constexpr int64_t kBlockBytes = kTile * kBlock;

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const __m256i ones = _mm256_set1_epi16(1);
        const uint8_t* w[T];
        const int8_t* xs[R];
        const float* scales[R];
        __m256 sum[R][T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) w[t] = data + (tile + t) * blocks * kBlockBytes;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.values + (row + r) * x.blocks * kBlock;
            scales[r] = x.scales + (row + r) * x.blocks;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = _mm256_loadu_ps(acc + r * acc_stride + t * kTile);
        }
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            __m256i exact[R][T];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                __m256i four[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    int32_t bytes;
                    std::memcpy(&bytes, xs[r] + b * kBlock + g * 4, sizeof bytes);
                    four[r] = _mm256_set1_epi32(bytes);
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const uint8_t* at = w[t] + b * kBlockBytes + g * 32;
                    const __m256i wv = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
                    // The 16-bit products take an unsigned side: |w| * (x with w's sign), at most 2 * 127 * 127.
                    const __m256i magnitude = _mm256_abs_epi8(wv);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(four[r], wv));
                        exact[r][t] = _mm256_add_epi32(exact[r][t], _mm256_madd_epi16(pairs, ones));
                        pin(exact[r][t]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m256 scale = _mm256_broadcast_ss(scales[r] + b);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
                    sum[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r][t]), scale, sum[r][t]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) _mm256_storeu_ps(acc + r * acc_stride + t * kTile, sum[r][t]);
    }
};

inline void linear_int8(Team& team, const QuantizedRows& x, int64_t rows, const Linear& layer, float* out,
                        const float* residual) {
    linear_packed<Int8>(team, x, rows, Int8{layer.data, x.blocks}, layer, out, residual);
}

}  // namespace gpt_fast
