// Rows of float32 to int8 in blocks of 32 with one scale each: the left side of the integer products.
#pragma once

#include "common.h"

namespace gpt_fast {

constexpr int64_t kBlock = 32;

struct QuantizedRows {
    int8_t* values;  // [rows, blocks * 32], the last block filled up with zeros
    float* scales;  // [rows, blocks]
    float* sums;  // [rows, blocks]: scale times the sum of the block's values
    int64_t blocks;  // per row

    static int64_t num_bytes(int64_t rows, int64_t k) { return rows * ceil_div(k, kBlock) * (kBlock + 8); }
    static QuantizedRows in(uint8_t* memory, int64_t rows, int64_t k) {
        const int64_t blocks = ceil_div(k, kBlock);
        float* scales = reinterpret_cast<float*>(memory + rows * blocks * kBlock);
        return {reinterpret_cast<int8_t*>(memory), scales, scales + rows * blocks, blocks};
    }
};

// One block: scale = largest magnitude / 127, values rounded to nearest even. A block with NaN gets a scale of NaN.
inline void quantize_block(const float* x, int8_t* values, float* scale, float* sum) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        // As integers, because the floating-point maximum would lose a NaN.
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(top));
    const __m256 inverse = _mm256_set1_ps(most == 0.0f ? 0.0f : 127.0f / most);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    // The two packs leave groups of four in the order 0 2 4 6 1 3 5 7.
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), ordered);
    const __m256i total = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    *scale = most / 127.0f;
    *sum = *scale * static_cast<float>(_mm_cvtsi128_si32(s));
}

// Columns [begin, end) of a row of k; begin is a multiple of 32, so is end unless it is k.
inline void quantize_part(const float* x, int64_t begin, int64_t end, int64_t k, const QuantizedRows& to, int64_t row) {
    for (int64_t b = begin / kBlock; b < ceil_div(end, kBlock); ++b) {
        const float* block = x + b * kBlock;
        alignas(32) float tail[kBlock];
        if ((b + 1) * kBlock > k) {
            std::memset(tail, 0, sizeof tail);
            std::memcpy(tail, block, static_cast<size_t>(k - b * kBlock) * sizeof(float));
            block = tail;
        }
        const int64_t at = row * to.blocks + b;
        quantize_block(block, to.values + at * kBlock, to.scales + at, to.sums + at);
    }
}

inline void quantize_row(const float* x, int64_t k, const QuantizedRows& to, int64_t row) {
    quantize_part(x, 0, k, k, to, row);
}

// All rows, by the whole team; ends with a barrier.
inline void quantize_rows(Team& team, const float* x, int64_t rows, int64_t k, const QuantizedRows& to) {
    team.share(rows, 1, [&](int64_t begin, int64_t) { quantize_row(x + begin * k, k, to, begin); });
    team.barrier();
}

}  // namespace gpt_fast
