// Products with 4-bit weights, value = q * scale + min per group of 32, 64 or 128 along K; x in int8 blocks of 32.
//
// Packed: [tiles, groups, 32 + 128 * group_size / 32] bytes: 8 scales and 8 mins in float16, then for every block
// [4, 8 outputs, 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTile = 8;
    static constexpr int kMaxRows = 8;
    static constexpr int64_t kManyRowsTiles = 4;
    static constexpr bool kOutputScale = false;
    static constexpr int tiles_at_once(int rows) { return rows == 1 ? 4 : 1; }  // as in int8.h
    static constexpr int64_t kHeader = 32, kBlockBytes = kTile * kBlock / 2;
    static constexpr int64_t kAhead = 1280;  // bytes

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const __m256i ones = _mm256_set1_epi16(1), low_half = _mm256_set1_epi8(15);
        const int64_t group_blocks = group_size / kBlock, group_bytes = kHeader + group_blocks * kBlockBytes;
        const int64_t groups = k_total / group_size;
        const uint8_t* w = data + (tile * groups + k / group_size) * group_bytes;
        const int64_t next_tile = groups * group_bytes;
        const int8_t* xs[R];
        const float *scales[R], *sums[R];
        __m256 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            xs[r] = x.values + (row + r) * x.blocks * kBlock;
            scales[r] = x.scales + (row + r) * x.blocks;
            sums[r] = x.sums + (row + r) * x.blocks;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = _mm256_loadu_ps(acc + r * acc_stride + t * kTile);
        }
        for (int64_t b = k / kBlock; b < k_end / kBlock;) {
            const uint8_t* header = w;
            w += kHeader;
            for (const int64_t end = b + group_blocks; b < end; ++b, w += kBlockBytes) {
                if (R > 1) {  // one stream; the four of a single row are fetched ahead by the hardware
                    _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead, _MM_HINT_T0);
                    _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 64, _MM_HINT_T0);
                    _mm_prefetch(reinterpret_cast<const char*>(w) + kAhead + 128, _MM_HINT_T0);
                }
                __m256i pairs[R][T];  // at most 16 products of 15 * 127: fits 16 bits
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) pairs[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
                for (int g = 0; g < 4; ++g) {
                    __m256i first[R], second[R];
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        int32_t bytes[2];
                        std::memcpy(bytes, xs[r] + b * kBlock + g * 4, 4);
                        std::memcpy(bytes + 1, xs[r] + b * kBlock + 16 + g * 4, 4);
                        first[r] = _mm256_set1_epi32(bytes[0]);
                        second[r] = _mm256_set1_epi32(bytes[1]);
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        const __m256i both =
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + t * next_tile + g * 32));
                        const __m256i low = _mm256_and_si256(both, low_half);
                        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r) {
                            pairs[r][t] = _mm256_add_epi16(pairs[r][t], _mm256_maddubs_epi16(low, first[r]));
                            pin(pairs[r][t]);
                            pairs[r][t] = _mm256_add_epi16(pairs[r][t], _mm256_maddubs_epi16(high, second[r]));
                            pin(pairs[r][t]);
                        }
                    }
                }
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const auto* halves = reinterpret_cast<const __m128i*>(header + t * next_tile);
                    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(halves));
                    const __m256 min = _mm256_cvtph_ps(_mm_loadu_si128(halves + 1));
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[r][t], ones));
                        sum[r][t] =
                            _mm256_fmadd_ps(_mm256_mul_ps(dot, _mm256_broadcast_ss(scales[r] + b)), scale, sum[r][t]);
                        sum[r][t] = _mm256_fmadd_ps(min, _mm256_broadcast_ss(sums[r] + b), sum[r][t]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) _mm256_storeu_ps(acc + r * acc_stride + t * kTile, sum[r][t]);
    }
};

inline void linear_int4(Team& team, const QuantizedRows& x, int64_t rows, const Linear& layer, float* out,
                        const float* residual) {
    linear_packed<Int4>(team, x, rows, Int4{layer.data, layer.k, layer.group_size}, layer, out, residual);
}

}  // namespace gpt_fast
