// Products with 4-bit weights, value = (q - zero / 8) * scale * row scale, scale and zero bytes of a group of 32, 64 or
// 128 along K; x is quantized in blocks (activations.h). What is added within a block of x is exact but for the scale of
// its group, where a block has one; where it has several (kTiles, int4_few.h), everything is, as an integer.
#pragma once

#include "int4_few.h"

namespace gpt_fast {

struct Int4 : FewInt4 {
    static constexpr int64_t kTiledRows = kTiles ? kPipelineFrom : 0, kWholeRows = kTiles ? kPipelineRows : kMaxRows;
    static constexpr int64_t kReadyRows = kTiles ? 0 : kRaisedDots ? 48 : 24;  // fewer are as fast without
    static constexpr int kStreamedRows = 0;
    static constexpr int kMostRows = kCachedRows;
    static constexpr int64_t kManyRowsTiles = 16, kShortDepth = 512, kLongDepth = 2048;
    // Where eight rows go through one tile at a time, x is read again and again: long pieces store their sums less often.
    static inline const int64_t kManyRowsDepth = half_wide() && !kTiles ? kLongDepth : kShortDepth;
    static constexpr int64_t kPromptDepth = kLongPieces ? kLongDepth : kShortDepth;
    // Without registers of tiles two at once, or one, and fetches are faster than four streams: headers and halves take
    // more work than int8, which hides what the fetches cost.
    static constexpr int tiles_at_once(int rows) {
        if (kFewRegisters) return 1;
        if (kTiles) return few_rows_tiles(rows);
        return kRegisters < 32 ? tiles_of_integers(rows) : 2;
    }

    // A template, so that it is made for CPUs with tiles only.
    template <class Sum>
    void tiled(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
               const Sum& acc) const {
        if (rows > kPipelineRows) return tiled_integers(*this, x, row, rows, tile, tiles, k, k_end, acc);
        add_by_pipeline(x, row, rows, tile, tiles, k, k_end, acc);
    }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch& fetch) const {
        if constexpr (kRaisedDots && !kTiles && R > kOneTileRows) {
            // One tile at a time: storing sums that do not fit the registers costs more than reading x again. Fewer than
            // eight rows do fit, and are faster by two tiles when these come from the caches.
            if (half_wide() && (R == kMaxRows || fetch.tiles == 0)) {
                for (int t = 0; t < T; ++t) raised<R>(x, row, tile + t, k, k_end, acc.from(0, t), fetch);
                return;
            }
        }
        if constexpr (kTiles) return exact_blocks<R, T>(x, row, tile, k, k_end, acc);
        const int64_t group_blocks = group_size / kBlock, tile_bytes = this->tile_bytes();
        const uint8_t* tiles = data + tile * tile_bytes;
        QuantizedRow xs[R];
        F16 sum[R][T];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        int64_t at = k / group_size * group_bytes();  // from the beginning of a tile
        const uint8_t* header = tiles;
        for (int64_t b = k / kBlock, group_end = b, last = k_end / kBlock - 1; b <= last;) {
            if (b == group_end) header = tiles + at, at += kHeader, group_end += group_blocks;
            // Where VNNI leaves little else to do, one loop that reads the header for each block takes less than two.
            for (const int64_t end = kRaisedDots ? b + 1 : group_end; b < end; ++b, at += kBlockBytes) {
                const uint8_t* next = fetch.template after<T>(tiles, tile_bytes, at);
                auto fetch_line = [&](int i) { fetch.template line_of<R, T, kBlockLines + 1>(next, tile_bytes, i); };
                I16 exact[R][T];
                add_block<R, T>(tiles + at, tile_bytes, xs, b, exact, fetch_line);
                fetch_line(kBlockLines);  // of the header that may lie between two blocks
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const uint8_t* scales = header + t * tile_bytes;
                    const Int4Groups groups(scales, scales + kTile);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) sum[r][t] = groups.add(sum[r][t], exact[r][t], xs[r], b);
                }
            }
        }
        store_sums(sum, acc);
    }

    // R rows of one tile, its zeros taken off before the products, as in ReadyInt4. That is one product of floats less for
    // each row, and pays where the additions of integers that it takes wait for nothing.
    template <int R>
    [[gnu::noinline]] void raised(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
                                  const Fetch& fetch) const {
        const int64_t group_blocks = group_size / kBlock, tile_bytes = this->tile_bytes();
        const uint8_t* from = data + tile * tile_bytes;
        QuantizedRow xs[R];
        F16 sum[R][1];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        int64_t at = k / group_size * group_bytes();  // from the beginning of the tile
        const uint8_t* header = from;
        for (int64_t b = k / kBlock, group_end = b; b < k_end / kBlock; ++b, at += kBlockBytes) {
            if (b == group_end) header = from + at, at += kHeader, group_end += group_blocks;
            const uint8_t* next = fetch.template after<1>(from, tile_bytes, at);
            auto fetch_line = [&](int i) { fetch.template line_of<R, 1, kBlockLines + 1>(next, tile_bytes, i); };
            const RaisedCodes codes(header + kTile);
            I16 exact[R][1];  // eight times the sums
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) exact[r][0] = xs[r].begin_raised(b);
#pragma GCC unroll 4
            for (int g = 0; g < 4; ++g) {
                fetch_line(g);
                const I16 both = load64(from + at + g * 64), low = codes.low(both), high = codes.high(both);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) exact[r][0] = dot_raised_four(exact[r][0], low, xs[r].values(b) + g * 4);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    exact[r][0] = dot_raised_four(exact[r][0], high, xs[r].values(b) + g * 4 + 16);
            }
            fetch_line(kBlockLines);  // of the header that may lie between two blocks
            if (codes.any_rest()) {
                int32_t rest[kTile];
                codes.rest(rest);
                take_zero_rest(rest, xs, b, 0, exact);
            }
            add_raised(exact, load16_uint8(header) * splat16(0.125f), xs, b, 0, sum);
        }
        store_sums(sum, acc);
    }

    // exact = the sums over one block of codes, as integers; the weights of each value serve all rows. As add_dots().
    template <int R, int T, class Before>
    [[gnu::always_inline]] static void add_block(const uint8_t* w, int64_t tile_bytes, const QuantizedRow (&xs)[R],
                                                 int64_t b, I16 (*exact)[T], Before before) {
        begin_codes(xs, b, exact);
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            before(g);
            I16 low[T], high[T];
            take_codes(w + g * kLine, tile_bytes, low, high);
            add_codes<R, T>(low, high, xs, b, g * 4, exact);
        }
    }

    // Weights of some tiles, [k, k_end), in memory of the thread.
    using Ready = std::conditional_t<kRaisedDots, ReadyInt4, CodesOfInt4>;
    Ready ready(int64_t tile, int64_t tiles, int64_t k, int64_t k_end) const {
        static thread_local Scratch scratch;
        const int64_t group_blocks = group_size / kBlock, tile_bytes = this->tile_bytes(), blocks = (k_end - k) / kBlock;
        auto* to = scratch.get<Ready::Block>(tiles * blocks);
        for (int64_t t = 0; t < tiles; ++t) {
            const uint8_t* from = data + (tile + t) * tile_bytes;
            int64_t at = k / group_size * group_bytes();  // from the beginning of a tile
            for (int64_t b = 0; b < blocks;) {
                const uint8_t* header = from + at;
                at += kHeader;
                for (const int64_t end = b + group_blocks; b < end; ++b, at += kBlockBytes) {
                    fetch_ahead<1>(from, tile_bytes, at, kHeader + kBlockBytes);
                    to[t * blocks + b].set(from + at, header, header + kTile);
                }
            }
        }
        return {to, k / kBlock, blocks};
    }

    // What add_tiles() takes of some weights of one tile: (8 q - zero) * scale in two bytes, whose products are summed
    // apart, and what of the zeros does not fit them.
    static constexpr int64_t kPreparedDepth = 512, kPreparedTiles = 2, kPreparedBlocks = kPreparedDepth / kBlock;
    struct Prepared {
        alignas(64) uint8_t high[kPreparedBlocks][2 * kBlockBytes], low[kPreparedBlocks][2 * kBlockBytes];
        alignas(64) int32_t rest[kPreparedBlocks][kTile];
        bool any_rest[kPreparedBlocks / kParts + 1];  // in a block of x
    };

    void prepare(int64_t tile, int64_t k, int64_t k_end, Prepared& to) const {
        const int64_t group_blocks = group_size / kBlock, tile_bytes = this->tile_bytes(), count = (k_end - k) / kBlock;
        const uint8_t* from = data + tile * tile_bytes;
        int64_t at = k / group_size * group_bytes();  // from the beginning of the tile
        bool any_rest = false;
        std::memset(to.any_rest, 0, sizeof to.any_rest);
        for (int64_t i = 0; i < count;) {
            const uint8_t *header = from + at, *zero = header + kTile;
            const bool more = any_large(zero);  // 128 too, which fits
            uint8_t room[kTile];
            const uint8_t* most = bounded(zero, more, room);
            if (more && !any_rest) std::memset(to.rest, 0, sizeof to.rest);
            any_rest |= more;
            const Int4Grid grid(header, most);
            at += kHeader;
            for (const int64_t end = i + group_blocks; i < end; ++i, at += kBlockBytes) {
                fetch_ahead<1>(from, tile_bytes, at, kHeader + kBlockBytes);
#pragma GCC unroll 4
                for (int g = 0; g < 4; ++g) {
                    const I16 both = load64(from + at + g * 64);
                    grid.split(low_nibbles(both), to.high[i] + g * 64, to.low[i] + g * 64);
                    grid.split(high_nibbles(both), to.high[i] + kBlockBytes + g * 64, to.low[i] + kBlockBytes + g * 64);
                }
                if (!more) continue;
                to.any_rest[i / kParts] = true;
                for (int j = 0; j < kTile; ++j) to.rest[i][j] = (zero[j] - most[j]) * header[j];
            }
        }
        // The last block of x may be longer than what there is.
        for (int64_t i = count; i % kParts; ++i)
            std::memset(to.high[i], 0, sizeof to.high[i]), std::memset(to.low[i], 0, sizeof to.low[i]);
    }

    // R rows of one panel.
    using Registers = TileBlocks<2 * kPreparedTiles>;
    template <int R>
    static void add_tiles(Registers& registers, const QuantizedRow& x, const Prepared* w, int64_t tiles, int64_t k,
                          int64_t k_end, const Sums& acc) {
        const TiledPiece piece(x, k, k_end);
        registers.shape(R);
        alignas(64) Registers::Block exact[Registers::kBlocks];
        const Prepared& second = w[tiles - 1];  // if there is one tile, it is taken twice
        for (int64_t b = 0, count; b < piece.blocks; b += count) {
            count = piece.blocks - b < Registers::kBlocks ? piece.blocks - b : Registers::kBlocks;
            const int64_t first = b * kParts;
            registers.template products<kRounded / kTileBytes>(
                count, piece.at(b), kRounded, piece.step,
                {w->high[first], w->low[first], second.high[first], second.low[first]}, kRoundedBytes, exact);
            for (int64_t t = 0; t < tiles; ++t) {
                const Sums to = acc.after(b).from(0, t);
                F16 sum[R][1];
                load_sums(sum, to);
                for (int64_t i = 0; i < count; ++i) {
                    int32_t(*high)[kTileRows] = exact[i][2 * t], (*low)[kTileRows] = exact[i][2 * t + 1];
                    if (w[t].any_rest[b + i]) take_rest(R, piece, w[t], b + i, low);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const I16 upper = load64(reinterpret_cast<const uint8_t*>(high[r]));
                        const I16 lower = load64(reinterpret_cast<const uint8_t*>(low[r]));
                        const F16 scale = splat16(0.125f * piece.scales[r * kChunk + b + i]);
                        sum[r][0] = plus_product(sum[r][0], to_floats(plus(shift_left<8>(upper), lower)), scale);
                    }
                }
                store_sums(sum, to);
            }
        }
    }

    // Takes what of the zeros of a block did not fit two bytes from its sums.
    static void take_rest(int64_t rows, const TiledPiece& piece, const Prepared& w, int64_t b,
                          int32_t (*sums)[kTileRows]) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t part = b * kParts; part < (b + 1) * kParts; ++part)
                for (int64_t j = 0; j < kTile; ++j)
                    sums[r][j] -= w.rest[part][j] * piece.sum(r, b, part % kParts);
    }
};

}  // namespace gpt_fast
