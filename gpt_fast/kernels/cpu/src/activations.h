// Rows of float32 rounded for products: to int8 in blocks with one scale each, and to bfloat16. Where the CPU has
// registers of tiles (tiles.h), the rows of one register stand side by side, in panels. A panel of fewer rows is narrower:
// blocks of one row that lie 2 kB apart are lines of the same few places of a cache, and throw each other out.
//
// Where integers are added up in 32 bits and blocks are short (kCounted), a block of x is 32 values and a scale that is a
// power of two, as in MXINT8 (Open Compute Project, Microscaling Formats). Such scales cost no products: between 2^23 and
// 2^24 scales the lowest bit of a float32 is worth one scale. A sum that begins with the bits of 1.5 * 2^23 scales, the
// base, is a float32 at its end, and less the base it is the sum times the scale, exactly.
#pragma once

#include "fetch.h"

namespace gpt_fast {

constexpr int64_t kBlock = 32;                       // neighbours along k that packed weights are a whole number of
constexpr int64_t kPanel = kTiles ? kTileRows : 1;   // rows, at most
constexpr int64_t kRounded = kTiles ? 128 : kBlock;  // values with one scale; more of them cost tiles less
constexpr int64_t kParts = kRounded / kBlock;        // blocks of weights for one of x
constexpr int64_t kChunk = kTiles ? 16 : 1;          // blocks of x: a row's scales fill a line, which one thread writes
constexpr int64_t kSums = kTiles ? kParts / 2 + kParts : 1;  // if kTiles, see QuantizedBlocks

// Sums that are added in 16 bits and then in 32 gain nothing by it.
constexpr bool kCounted = !kTiles && !kPairedDots;

// For the zeros of int4, of sums of kBlock values: two of them, 16 bits each, and what products with codes less 8 begin
// with, -8 times a sum. Without tiles an eighth of a sum, times the scale if kCounted.
using PartSum = std::conditional_t<kTiles, int32_t, float>;

// The rows of each panel where there are `rows`.
inline int64_t panel_rows(int64_t rows) { return rows < kPanel ? std::max<int64_t>(rows, 1) : kPanel; }

// kChunk blocks of the rows of a panel.
struct QuantizedBlocks {
    int8_t values[kChunk * kPanel * kRounded];  // [blocks, rows of the panel, kRounded]
    float scale[kPanel][kChunk];  // the base if kCounted
    PartSum sum[kPanel][kChunk][kSums];  // if kTiles: [kParts / 2] of two parts each, then [kParts] of one to begin with
    int32_t begin[kPanel][kChunk];  // what sums of products begin with, of weights as dot() takes them
};

// One row: its block b of kRounded values.
struct QuantizedRow {
    QuantizedBlocks* chunks;
    int64_t lane, rows;  // rows of the panel

    QuantizedBlocks& chunk(int64_t b) const { return chunks[b / kChunk]; }

    int8_t* values(int64_t b) const { return chunk(b).values + (kTiles ? (b % kChunk * rows + lane) * kRounded : 0); }
    float scale(int64_t b) const { return chunk(b).scale[lane][b % kChunk]; }
    PartSum sum(int64_t b) const { return chunk(b).sum[lane][b % kChunk][0]; }

    // What sums of products begin with: with weights as dot() and dot_raised() take them, and with unsigned ones.
    I16 begin_raised(int64_t b) const { return splat16(chunk(b).begin[lane][b % kChunk]); }
    I16 begin(int64_t b) const { return kCounted ? as_ints(splat16(scale(b))) : splat16(0); }

    // If kCounted: what such a sum is at its end, times the scale.
    F16 counted(I16 counts, int64_t b) const { return as_floats(counts) - splat16(scale(b)); }
    // If kCounted: the sum of the values.
    int32_t total(int64_t b) const {
        int32_t base;
        std::memcpy(&base, &chunk(b).scale[lane][b % kChunk], sizeof base);
        return (base - chunk(b).begin[lane][b % kChunk]) / 128;
    }
};

// sum + counts, which began with begin_raised(), times the scale of a block; `scale`: as the block has it.
inline F16 plus_scaled(F16 sum, I16 counts, F16 scale) {
    return kCounted ? sum + (as_floats(counts) - scale) : plus_product(sum, to_floats(counts), scale);
}

struct QuantizedRows {
    QuantizedBlocks* data;  // [panels, chunks], the last block of a row filled up with zeros
    int64_t chunks;         // of a panel
    int64_t rows;           // of a panel
    int64_t first;          // row

    QuantizedRow row(int64_t m) const { return {data + (first + m) / kPanel * chunks, (first + m) % kPanel, rows}; }
    QuantizedRows from(int64_t row) const { return {data, chunks, rows, first + row}; }

    // `count` rows from the first of all.
    void fetch(int64_t count) const {
        if (!kTiles) return fetch_written(data, count * chunks);
        for (int64_t c = 0; c < ceil_div(count, kPanel) * chunks; ++c) {
            fetch_written(data[c].values, rows * kChunk * kRounded);
            fetch_written(data[c].scale, rows), fetch_written(data[c].sum, rows), fetch_written(data[c].begin, rows);
        }
    }

    static int64_t num_bytes(int64_t rows, int64_t k) {
        return ceil_div(rows, kPanel) * chunks_of(k) * static_cast<int64_t>(sizeof(QuantizedBlocks));
    }
    static QuantizedRows in(uint8_t* memory, int64_t rows, int64_t k) {
        return {reinterpret_cast<QuantizedBlocks*>(memory), chunks_of(k), panel_rows(rows), 0};
    }

private:
    static int64_t chunks_of(int64_t k) { return ceil_div(k, kRounded * kChunk); }
};

// Block b of the rows of one panel, from x on: what belongs to one of them is at a constant distance from the first.
class PanelBlock {
public:
    PanelBlock(const QuantizedRow& x, int64_t b)
        : values_(x.values(b)),
          scale_(x.chunk(b).scale[x.lane] + b % kChunk),
          sum_(x.chunk(b).sum[x.lane][b % kChunk]),
          begin_(x.chunk(b).begin[x.lane] + b % kChunk) {}

    const int8_t* values(int64_t r) const { return values_ + r * kRounded; }
    float scale(int64_t r) const { return scale_[r * kChunk]; }
    I16 begin_raised(int64_t r) const { return splat16(begin_[r * kChunk]); }
    // Sums of two parts.
    I16 sums(int64_t r, int64_t two) const { return splat16(static_cast<int32_t>(sum_[r * kChunk * kSums + two])); }
    // What products with a part of codes less 8 begin with.
    I16 begin_less8(int64_t r, int64_t part) const {
        return splat16(static_cast<int32_t>(sum_[r * kChunk * kSums + kParts / 2 + part]));
    }

private:
    const int8_t* values_;
    const float* scale_;
    const PartSum* sum_;
    const int32_t* begin_;
};

// The same for dot(): other numbers where it wants sums of two neighbours to be small.
struct PairedRows : QuantizedRows {
    PairedRows from(int64_t row) const { return {QuantizedRows::from(row)}; }
};
using DotRows = std::conditional_t<kPairedDots, PairedRows, QuantizedRows>;

// A piece of the rows of one panel from `x` on, as products by tiles take it.
struct TiledPiece {
    int64_t blocks;
    int64_t step;           // bytes from block to block
    const uint8_t* values;  // [blocks, rows of the panel, kRounded]
    const float* scales;    // [rows, kChunk]
    const PartSum* sums;    // [rows, kChunk, kSums]

    // k and k_end are in one chunk.
    TiledPiece(const QuantizedRow& x, int64_t k, int64_t k_end)
        : blocks(ceil_div(k_end - k, kRounded)), step(x.rows * kRounded) {
        const QuantizedBlocks& chunk = x.chunk(k / kRounded);
        const int64_t first = k / kRounded % kChunk;
        values = reinterpret_cast<const uint8_t*>(x.values(k / kRounded));
        scales = chunk.scale[x.lane] + first;
        sums = chunk.sum[x.lane][first];
    }
    const uint8_t* at(int64_t b) const { return values + b * step; }
    // Of one part of a block of a row.
    int32_t sum(int64_t r, int64_t b, int64_t part) const {
        const auto two = static_cast<uint32_t>(sums[(r * kChunk + b) * kSums + part / 2]);
        return static_cast<int16_t>(two >> part % 2 * 16);
    }
};

// A scale that is a power of two: the least with which a block's largest magnitude is at most 127. NaN if that is NaN or
// 2^111 and more; a block below 2^-120 counts as zero.
class PowerScale {
public:
    // Of the bits of the largest magnitude. Unsigned, because those of a NaN may be the largest integer.
    explicit PowerScale(int32_t magnitude)
        : exponent_(static_cast<int32_t>((static_cast<uint32_t>(magnitude) + 0x1ffffu) >> 23)) {}

    float scale() const { return from_bits(bounded() - 6, 0); }
    float base() const { return from_bits(bounded() + 17, 0x400000); }
    float inverse() const { return exponent_ < kLeast ? 0.0f : from_bits(260 - bounded(), 0); }

private:
    static constexpr int32_t kLeast = 7, kMost = 237;  // so that the exponents of all three are those of numbers

    int32_t bounded() const { return exponent_ < kLeast ? kLeast : exponent_; }
    float from_bits(int32_t exponent, int32_t fraction) const {
        if (exponent_ > kMost) return NAN;
        const int32_t bits = exponent << 23 | fraction;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    int32_t exponent_;  // 127 more than that of a power of two
};

// Block b of a row: values rounded to nearest even. `paired`: sums of two neighbours count for the largest magnitude as
// well; rounded, they are 128 at most. A scale that is no power of two is the largest magnitude / 127, NaN in a block with
// NaN.
template <bool paired>
inline void quantize_block(const float* x, const QuantizedRow& row, int64_t b) {
    constexpr int registers = kRounded / 8, each = kBlock / 8;
    const int64_t lane = row.lane, at = b % kChunk;
    QuantizedBlocks& to = row.chunk(b);
    F8 v[registers];
    I8 largest = splat(0);
    for (int i = 0; i < registers; ++i) {
        v[i] = load8(x + 8 * i);
        largest = larger_magnitude(largest, v[i]);
        if (paired) largest = larger_magnitude(largest, pair_sums(v[i]));
    }
    float inverse, eighth = 0.125f;
    if constexpr (kCounted) {
        const PowerScale power(lane_max(largest));
        inverse = power.inverse(), eighth *= power.scale();
        to.scale[lane][at] = power.base();
    } else {
        const float most = largest_lane(largest);
        inverse = steps_of(most);
        to.scale[lane][at] = most / 127.0f;
    }
    uint32_t total = 0, sums[kParts];  // unsigned, because NaNs are rounded to the least integer
    for (int part = 0; part < kParts; ++part) {
        I8 q[each];
        for (int i = 0; i < each; ++i) q[i] = nearest(v[part * each + i] * splat(inverse));
        const int32_t sum = lane_sum(add(add(q[0], q[1]), add(q[2], q[3])));
        store_int8(row.values(b) + part * kBlock, q);
        total += sums[part] = static_cast<uint32_t>(sum);
    }
    PartSum* kept = to.sum[lane][at];
    if constexpr (kTiles) {
        for (int i = 0; i < kParts; i += 2) kept[i / 2] = static_cast<int32_t>((sums[i] & 0xffff) | sums[i + 1] << 16);
        for (int i = 0; i < kParts; ++i) kept[kParts / 2 + i] = static_cast<int32_t>(-8u * sums[i]);
    } else {
        kept[0] = eighth * static_cast<float>(static_cast<int32_t>(total));
    }
    uint32_t begin = 0;
    if (kCounted) std::memcpy(&begin, &to.scale[lane][at], sizeof begin);
    to.begin[lane][at] = static_cast<int32_t>(begin + total * static_cast<uint32_t>(kRaisedTotal));
}

template <bool paired>
inline void quantize_part(const float* x, int64_t begin, int64_t end, int64_t k, const QuantizedRows& to, int64_t row) {
    for (int64_t b = begin / kRounded; b < ceil_div(end, kRounded); ++b) {
        const float* block = x + (b * kRounded - begin);
        alignas(32) float tail[kRounded];
        if ((b + 1) * kRounded > k) {
            std::memset(tail, 0, sizeof tail);
            std::memcpy(tail, block, static_cast<size_t>(k - b * kRounded) * sizeof(float));
            block = tail;
        }
        quantize_block<paired>(block, to.row(row), b);
    }
}

// bfloat16 in blocks of kBlock: [panels, blocks, rows of a panel, kBlock], each row filled up with zeros to whole blocks.
struct Bfloat16Rows {
    uint16_t* data;
    int64_t stride;  // of a row, filled up
    int64_t rows;    // of a panel
    int64_t first;   // row

    // Where a row's values are; `step`: from block to block.
    struct Row {
        uint16_t* data;
        int64_t step;
        uint16_t* operator+(int64_t k) const { return data + (kTiles ? k / kBlock * step + k % kBlock : k); }
    };
    Row row(int64_t m) const {
        const int64_t row = first + m;
        return {data + row / kPanel * rows * stride + row % kPanel * kBlock, rows * kBlock};
    }
    Bfloat16Rows from(int64_t row) const { return {data, stride, rows, first + row}; }

    void fetch(int64_t count) const { fetch_written(data, count * stride); }
};

inline void round_part(const float* x, int64_t begin, int64_t end, const Bfloat16Rows& to, int64_t row) {
    const Bfloat16Rows::Row out = to.row(row);
    for (int64_t i = begin; i < end; i += kBlock) {
        const int64_t count = end - i < kBlock ? end - i : kBlock;
        uint16_t* at = out + i;
        if (count == kBlock) {
            for (int64_t j = 0; j < kBlock; j += 16) store16_bfloat16(at + j, load16(x + (i - begin) + j));
            continue;
        }
        for (int64_t j = 0; j < kBlock; ++j) store_as(j < count ? x[i - begin + j] : 0.0f, at + j);
    }
}

// Products with which weights need rows of k columns rounded; a sum of these says what for.
enum Rounding : int64_t { kForInt8 = 1, kForBfloat16 = 2, kForInt4 = 4 };

struct RoundedRows {
    QuantizedRows plain;
    DotRows dots;  // the same memory where it may be
    Bfloat16Rows bfloat16;

    static int64_t num_bytes(int64_t rows, int64_t k) {
        const int64_t panels = ceil_div(rows, kPanel), width = ceil_div(k, kBlock) * kBlock;
        return kKinds * int8_bytes(rows, k) + panels * kPanel * width * static_cast<int64_t>(sizeof(uint16_t));
    }
    static RoundedRows in(uint8_t* memory, int64_t rows, int64_t k) {
        uint8_t *dots = memory + (kKinds - 1) * int8_bytes(rows, k), *last = dots + int8_bytes(rows, k);
        return {QuantizedRows::in(memory, rows, k),
                {QuantizedRows::in(dots, rows, k)},
                {reinterpret_cast<uint16_t*>(last), ceil_div(k, kBlock) * kBlock, panel_rows(rows), 0}};
    }
    RoundedRows from(int64_t row) const { return {plain.from(row), dots.from(row), bfloat16.from(row)}; }

private:
    static constexpr int64_t kKinds = kPairedDots ? 2 : 1;
    static int64_t int8_bytes(int64_t rows, int64_t k) { return ceil_div(QuantizedRows::num_bytes(rows, k), 64) * 64; }
};

// Columns [begin, end) of a row of k, which stand at `x`; begin is a multiple of kRounded, so is end unless it is k.
inline void round_part(int64_t how, const float* x, int64_t begin, int64_t end, int64_t k, const RoundedRows& to,
                       int64_t row) {
    if (how & (kPairedDots ? kForInt4 : kForInt4 | kForInt8)) quantize_part<false>(x, begin, end, k, to.plain, row);
    if (kPairedDots && (how & kForInt8)) quantize_part<true>(x, begin, end, k, to.dots, row);
    if (how & kForBfloat16) round_part(x, begin, end, to.bfloat16, row);
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
