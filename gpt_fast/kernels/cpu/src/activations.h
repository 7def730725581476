// Rows of float32 rounded for products: to int8 in blocks of 32 with one scale each, and to bfloat16.
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

// Magnitudes are compared as integers, because the floating-point maximum would lose a NaN.
inline I8 larger_magnitude(I8 largest, F8 v) { return larger(largest, as_ints(v) & splat(0x7fffffff)); }

inline float largest_lane(I8 magnitudes) {
    const int32_t bits = lane_max(magnitudes);
    float most;
    std::memcpy(&most, &bits, sizeof most);
    return most;
}

// One block: scale = largest magnitude / 127, values rounded to nearest even. A block with NaN gets a scale of NaN.
inline void quantize_block(const float* x, QuantizedBlock& to) {
    F8 v[4];
    I8 largest = splat(0);
    for (int i = 0; i < 4; ++i) {
        v[i] = load8(x + 8 * i);
        largest = larger_magnitude(largest, v[i]);
    }
    const float most = largest_lane(largest);
    const F8 inverse = splat(most == 0.0f ? 0.0f : 127.0f / most);
    I8 q[4];
    for (int i = 0; i < 4; ++i) q[i] = nearest(v[i] * inverse);
    const int32_t sum = lane_sum(add(add(q[0], q[1]), add(q[2], q[3])));
    store_int8(to.values, q);
    to.scale = most / 127.0f;
    to.eighth = 0.125f * to.scale * static_cast<float>(sum);
    to.offset = sum * -128;
}

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

// bfloat16, each row filled up with zeros to whole blocks.
struct Bfloat16Rows {
    uint16_t* data;
    int64_t stride;

    const uint16_t* row(int64_t m) const { return data + m * stride; }
};

inline void round_part(const float* x, int64_t begin, int64_t end, int64_t k, const Bfloat16Rows& to, int64_t row) {
    uint16_t* out = to.data + row * to.stride;
    for (int64_t i = begin; i < end; ++i) store_as(x[i], out + i);
    if (end == k) std::memset(out + k, 0, static_cast<size_t>(to.stride - k) * sizeof *out);
}

// What products take of rows of k columns, beside their float32; a sum of these says what of it.
enum Rounding : int64_t { kToInt8 = 1, kToBfloat16 = 2 };

struct RoundedRows {
    QuantizedRows int8;
    Bfloat16Rows bfloat16;

    static int64_t num_bytes(int64_t rows, int64_t k) {
        return int8_bytes(rows, k) + rows * ceil_div(k, kBlock) * kBlock * static_cast<int64_t>(sizeof(uint16_t));
    }
    static RoundedRows in(uint8_t* memory, int64_t rows, int64_t k) {
        auto* second = reinterpret_cast<uint16_t*>(memory + int8_bytes(rows, k));
        return {QuantizedRows::in(memory, k), {second, ceil_div(k, kBlock) * kBlock}};
    }
    RoundedRows from(int64_t row) const {
        return {int8.from(row), {bfloat16.data + row * bfloat16.stride, bfloat16.stride}};
    }

private:
    static int64_t int8_bytes(int64_t rows, int64_t k) { return ceil_div(QuantizedRows::num_bytes(rows, k), 64) * 64; }
};

// Columns [begin, end) of a row of k; begin is a multiple of 32, so is end unless it is k.
inline void round_part(int64_t how, const float* x, int64_t begin, int64_t end, int64_t k, const RoundedRows& to,
                       int64_t row) {
    if (how & kToInt8) quantize_part(x, begin, end, k, to.int8, row);
    if (how & kToBfloat16) round_part(x, begin, end, k, to.bfloat16, row);
}

inline void round_row(int64_t how, const float* x, int64_t k, const RoundedRows& to, int64_t row) {
    round_part(how, x, 0, k, k, to, row);
}

// All rows, by the whole team; ends with a barrier.
inline void round_rows(Team& team, int64_t how, const float* x, int64_t rows, int64_t k, const RoundedRows& to) {
    team.share(rows, 1, [&](int64_t begin, int64_t) { round_row(how, x + begin * k, k, to, begin); });
    team.barrier();
}

}  // namespace gpt_fast
