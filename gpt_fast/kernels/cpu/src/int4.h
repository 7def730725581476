// Products with 4-bit weights, value = (q - zero / 8) * scale * row scale, scale and zero bytes of a group of 32, 64 or
// 128 along K; x is quantized in blocks (activations.h). What is added within a block of x is exact but for the scale of
// its group, where a block has one; where it has several (kTiles), everything is, as an integer.
//
// Packed: [tiles, groups, 32 + 256 * group_size / 32] bytes: 16 scales and 16 zeros, then for every block [4, 16
// outputs, 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Int4 {
    using Rows = QuantizedRows;
    static constexpr int64_t kTiledRows = kTiles ? kFewRows + 1 : 0;  // fewer are faster without
    static constexpr int64_t kManyRowsTiles = 2, kManyRowsDepth = 512;
    static constexpr int tiles_at_once(int rows) { return tiles_of_integers(rows); }
    static constexpr int64_t kHeader = 2 * kTile, kBlockBytes = kTile * kBlock / 2;

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }

    const uint8_t* at(int64_t tile, int64_t k) const {
        return data + (tile * k_total + k) / group_size * (kHeader + group_size / kBlock * kBlockBytes);
    }

    void tiled(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
               const Sums& acc) const {
        tiled_integers(*this, x, row, rows, tile, tiles, k, k_end, acc);
    }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, float* acc,
               int64_t acc_stride) const {
        const int64_t group_blocks = group_size / kBlock, group_bytes = kHeader + group_blocks * kBlockBytes;
        const int64_t tile_bytes = k_total / group_size * group_bytes;
        const uint8_t* tiles = data + tile * tile_bytes;
        QuantizedRow xs[R];
        F16 sum[R][T];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = x.row(row + r);
        load_sums(sum, acc, acc_stride);
        int64_t at = k / group_size * group_bytes;  // from the beginning of a tile
        I16 inner[R][T];  // kTiles: the sums over a block of x, times 8
        for (int64_t b = k / kBlock, last = k_end / kBlock - 1; b <= last;) {
            const uint8_t* header = tiles + at;
            at += kHeader;
            for (const int64_t end = b + group_blocks; b < end; ++b, at += kBlockBytes) {
                fetch_ahead<T>(tiles, tile_bytes, at, kHeader + kBlockBytes);
                I16 exact[R][T];
                add_block<R, T>(tiles + at, tile_bytes, xs, b, exact);
                const bool begins = b % kParts == 0, ends = b % kParts == kParts - 1 || b == last;
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const uint8_t *scales = header + t * tile_bytes, *zeros = scales + kTile;
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const I16 codes = nibble_sums(exact[r][t]);
                        const PartSum values = xs[r].sum(b / kParts, b % kParts);
                        const F16 x_scale = splat16(xs[r].scale(b / kParts));
                        if constexpr (!kTiles) {
                            const F16 eighth = splat16(static_cast<float>(values));
                            const F16 whole = minus_product(to_floats(codes), load16_uint8(zeros), eighth);
                            sum[r][t] = plus_product(sum[r][t], whole * load16_uint8(scales), x_scale);
                            continue;
                        }
                        const I16 scale = load16_bytes(scales);
                        const I16 shift = times(load16_bytes(zeros), splat16(static_cast<int32_t>(values)));
                        const I16 whole = times(minus(shift_left3(codes), shift), scale);
                        inner[r][t] = begins ? whole : plus(inner[r][t], whole);
                        if (!ends) continue;
                        sum[r][t] = plus_product(sum[r][t], to_floats(inner[r][t]), x_scale * splat16(0.125f));
                    }
                }
            }
        }
        store_sums(sum, acc, acc_stride);
    }

    // exact = the sums over one block of codes, as integers; the weights of each value serve all rows.
    template <int R, int T>
    static void add_block(const uint8_t* w, int64_t tile_bytes, const QuantizedRow (&xs)[R], int64_t b,
                          I16 (*exact)[T]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) exact[r][t] = splat16(0);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            I16 low[T], high[T];
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const I16 both = load64(w + t * tile_bytes + g * 64);
                low[t] = low_nibbles(both), high[t] = high_nibbles(both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const int8_t* four = xs[r].values(b / kParts) + b % kParts * kBlock + g * 4;
                const I16 first = splat_four(four), second = splat_four(four + 16);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    exact[r][t] = add_nibbles(exact[r][t], low[t], first);
                    exact[r][t] = add_nibbles(exact[r][t], high[t], second);
                }
            }
        }
    }

    // What add_tile() takes of some weights of one tile: (8 q - zero) * scale in two bytes, whose products are summed
    // apart, and what of the zeros does not fit them.
    static constexpr int64_t kPreparedDepth = 512, kPreparedBlocks = kPreparedDepth / kBlock;
    struct Prepared {
        alignas(64) uint8_t high[kPreparedBlocks][2 * kBlockBytes], low[kPreparedBlocks][2 * kBlockBytes];
        alignas(64) int32_t rest[kPreparedBlocks][kTile];
        bool any_rest[kPreparedBlocks / kParts + 1];  // in a block of x
    };

    void prepare(int64_t tile, int64_t k, int64_t k_end, Prepared& to) const {
        const int64_t group_blocks = group_size / kBlock, group_bytes = kHeader + group_blocks * kBlockBytes;
        const int64_t tile_bytes = k_total / group_size * group_bytes, count = (k_end - k) / kBlock;
        const uint8_t* from = data + tile * tile_bytes;
        std::memset(to.any_rest, 0, sizeof to.any_rest);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t b = k / kBlock + i;
            const uint8_t *header = from + b / group_blocks * group_bytes, *zero = header + kTile;
            const int64_t at = header - from + kHeader + b % group_blocks * kBlockBytes;
            fetch_ahead<1>(from, tile_bytes, at, kHeader + kBlockBytes);
            uint8_t bounded[kTile];
            for (int j = 0; j < kTile; ++j) {
                bounded[j] = zero[j] < 128 ? zero[j] : 128;
                to.rest[i][j] = (zero[j] - bounded[j]) * header[j];
                to.any_rest[i / kParts] |= zero[j] > 128;
            }
            const Int4Grid grid(header, bounded);
#pragma GCC unroll 4
            for (int g = 0; g < 4; ++g) {
                const I16 both = load64(from + at + g * 64);
                grid.split(low_nibbles(both), to.high[i] + g * 64, to.low[i] + g * 64);
                grid.split(high_nibbles(both), to.high[i] + kBlockBytes + g * 64, to.low[i] + kBlockBytes + g * 64);
            }
        }
        // The last block of x may be longer than what there is.
        for (int64_t i = count; i % kParts; ++i) {
            std::memset(to.high[i], 0, sizeof to.high[i]), std::memset(to.low[i], 0, sizeof to.low[i]);
            std::memset(to.rest[i], 0, sizeof to.rest[i]);
        }
    }

    // R rows of one panel.
    template <int R>
    static void add_tile(TileBlocks<>& registers, const QuantizedRow& x, const Prepared& w, int64_t k, int64_t k_end,
                         const Sums& acc, bool) {
        const auto& chunk = x.chunk(k / kRounded);
        const int64_t first = k / kRounded % kChunk;
        const auto* values = reinterpret_cast<const uint8_t*>(chunk.values[first][x.lane]);
        const float* scales = chunk.scale[x.lane] + first;
        const PartSum* parts = chunk.sum[x.lane][first];
        registers.shape(R, kTileBytes);
        F16 sum[R][1];
        load_sums(sum, acc.data, acc.stride);
        auto x_at = [=](int64_t b) { return values + b * kPanel * kRounded; };
        auto w_at = [&w](int64_t b, bool low) { return low ? w.low[b * kParts] : w.high[b * kParts]; };
        auto each = [&](int64_t b, const int32_t(*high)[kTile], int32_t(*low)[kTile]) {
            if (w.any_rest[b])
                for (int r = 0; r < R; ++r)
                    for (int64_t part = b * kParts; part < (b + 1) * kParts; ++part)
                        for (int64_t j = 0; j < kTile; ++j)
                            low[r][j] -= w.rest[part][j] * parts[r * kChunk * kParts + part];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const I16 upper = load64(reinterpret_cast<const uint8_t*>(high[r]));
                const I16 whole = plus(shift_left8(upper), load64(reinterpret_cast<const uint8_t*>(low[r])));
                sum[r][0] = plus_product(sum[r][0], to_floats(whole), splat16(0.125f * scales[r * kChunk + b]));
            }
        };
        registers.template run_two<kRounded / kTileBytes>(ceil_div(k_end - k, kRounded), kRounded, x_at, w_at, each);
        store_sums(sum, acc.data, acc.stride);
    }
};

}  // namespace gpt_fast
