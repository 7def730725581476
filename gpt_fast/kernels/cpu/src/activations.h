// Rows of float32 to int8 in blocks of 32 with one scale each: the left side of the integer products.
#pragma once

#include "common.h"

namespace gpt_fast {

constexpr int64_t kBlock = 32;

struct QuantizedRows {
    int8_t* values;  // [rows, blocks * 32], the last block filled up with zeros
    float* scales;   // [rows, blocks]
    float* eighths;  // [rows, blocks]: an eighth of scale times the sum of the block's values, for the zeros of int4
    int64_t blocks;  // per row

    static int64_t num_bytes(int64_t rows, int64_t k) { return rows * ceil_div(k, kBlock) * (kBlock + 8); }
    static QuantizedRows in(uint8_t* memory, int64_t rows, int64_t k) {
        const int64_t blocks = ceil_div(k, kBlock);
        float* scales = reinterpret_cast<float*>(memory + rows * blocks * kBlock);
        return {reinterpret_cast<int8_t*>(memory), scales, scales + rows * blocks, blocks};
    }
};

// One block: scale = largest magnitude / 127, values rounded to nearest even. A block with NaN gets a scale of NaN.
inline void quantize_block(const float* x, int8_t* values, float* scale, float* eighth) {
    const I8 magnitude = splat(0x7fffffff);
    F8 v[4];
    I8 largest = splat(0);
    for (int i = 0; i < 4; ++i) {
        v[i] = load8(x + 8 * i);
        // As integers, because the floating-point maximum would lose a NaN.
        largest = larger(largest, as_ints(v[i]) & magnitude);
    }
    const int32_t bits = lane_max(largest);
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const F8 inverse = splat(most == 0.0f ? 0.0f : 127.0f / most);
    I8 q[4];
    for (int i = 0; i < 4; ++i) q[i] = nearest(v[i] * inverse);
    store_int8(values, q);
    *scale = most / 127.0f;
    *eighth = 0.125f * *scale * static_cast<float>(lane_sum(add(add(q[0], q[1]), add(q[2], q[3]))));
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
        quantize_block(block, to.values + at * kBlock, to.scales + at, to.eighths + at);
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
