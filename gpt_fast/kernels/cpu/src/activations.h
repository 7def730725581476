// Rows of float32 to int8 in blocks of 32 with one scale each: the left side of the integer products.
#pragma once

#include "common.h"

namespace gpt_fast {

constexpr int64_t kBlock = 32;

struct QuantizedBlock {
    int8_t values[kBlock];
    float scale;
    float eighth;    // an eighth of scale times the sum of the values, for the zeros of int4
    int32_t offset;  // -128 times the sum of the values, for begin_dots16()
};

struct QuantizedRows {
    QuantizedBlock* data;  // [rows, blocks], the last block of a row filled up with zeros
    int64_t blocks;        // per row

    const QuantizedBlock* row(int64_t m) const { return data + m * blocks; }
    QuantizedRows from(int64_t row) const { return {data + row * blocks, blocks}; }

    static int64_t num_bytes(int64_t rows, int64_t k) {
        return rows * ceil_div(k, kBlock) * static_cast<int64_t>(sizeof(QuantizedBlock));
    }
    static QuantizedRows in(uint8_t* memory, int64_t k) {
        return {reinterpret_cast<QuantizedBlock*>(memory), ceil_div(k, kBlock)};
    }
};

// One block: scale = largest magnitude / 127, values rounded to nearest even. A block with NaN gets a scale of NaN.
inline void quantize_block(const float* x, QuantizedBlock& to) {
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
    const int32_t sum = lane_sum(add(add(q[0], q[1]), add(q[2], q[3])));
    store_int8(to.values, q);
    to.scale = most / 127.0f;
    to.eighth = 0.125f * to.scale * static_cast<float>(sum);
    to.offset = sum * -128;
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
        quantize_block(block, to.data[row * to.blocks + b]);
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
