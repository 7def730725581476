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
    static constexpr int kMaxRows = 6;
    static constexpr int64_t kManyRowsTiles = 4;
    static constexpr bool kOutputScale = true;
    static constexpr int tiles_at_once(int) { return 1; }
    static constexpr int64_t kBlockBytes = kTile * kBlock;
    static constexpr int64_t kAhead = 2048;  // bytes

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        static_assert(T == 1);
        const __m256i ones = _mm256_set1_epi16(1);
        const uint8_t* w = data + tile * blocks * kBlockBytes;
        const int8_t* xs[R];
        const float* scales[R];
        __m256 sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.values + (row + r) * x.blocks * kBlock;
            scales[r] = x.scales + (row + r) * x.blocks;
            sum[r] = _mm256_loadu_ps(acc + r * acc_stride);
        }
        for (int64_t b = k / kBlock; b < k_end / kBlock; ++b) {
            __m256i exact[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) exact[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                const uint8_t* at = w + b * kBlockBytes + g * 32;
                const __m256i wv = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
                if (g % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead, _MM_HINT_T0);
                // The 16-bit products take an unsigned side: |w| * (x with w's sign), at most 2 * 127 * 127.
                const __m256i magnitude = _mm256_abs_epi8(wv);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    int32_t four;
                    std::memcpy(&four, xs[r] + b * kBlock + g * 4, sizeof four);
                    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(four), wv);
                    const __m256i pairs = _mm256_maddubs_epi16(magnitude, signed_x);
                    exact[r] = _mm256_add_epi32(exact[r], _mm256_madd_epi16(pairs, ones));
                    pin(exact[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[r]), _mm256_broadcast_ss(scales[r] + b), sum[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) _mm256_storeu_ps(acc + r * acc_stride, sum[r]);
    }
};

inline void linear_int8(Team& team, const QuantizedRows& x, int64_t rows, const Linear& layer, float* out,
                        const float* residual) {
    linear_packed<Int8>(team, x, rows, Int8{layer.data, x.blocks}, layer, out, residual);
}

}  // namespace gpt_fast
