// Products with int8 weights, one float32 scale per output; x is quantized in blocks (activations.h).
//
// Packed: [tiles, blocks, 8, 16 outputs, 4 k], the last block of 32 filled up with zeros. Sums within a block of x are
// exact integers; block sums are added in float32 in ascending order of k.
#pragma once

#include "int8_pipeline.h"

namespace gpt_fast {

// Adds the products of kBlock neighbours along k, R rows by T tiles: x(r) of row r and [8, 16 outputs, 4 k] weights of
// each tile, `tile_bytes` apart. before(g): what else is done for each eighth of them. Raised weights have had 128 added.
// Were it called, the sums would go through memory: clang has to be told.
template <bool raised, int R, int T, class X, class Before>
[[gnu::always_inline]] inline void add_dots(const uint8_t* w, int64_t tile_bytes, X x, I16 (&exact)[R][T],
                                            Before before) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        before(g);
        I16 wv[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) wv[t] = load64(w + t * tile_bytes + g * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I16 four = splat_four(x(r) + g * 4);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
                exact[r][t] = raised ? dot_raised(exact[r][t], wv[t], four) : dot(exact[r][t], wv[t], four);
        }
    }
}

struct Int8 {
    using Rows = DotRows;
    static constexpr int64_t kPipelineRows = 4 * kTileRows;  // more are faster by tiled_integers
    static constexpr int64_t kTiledRows = kTiles ? kPipelineFrom : 0, kWholeRows = kTiles ? kPipelineRows : kMaxRows;
    static constexpr int64_t kReadyRows = 0;
    static constexpr int kStreamedRows = 1;
    static constexpr int kMostRows = kCachedRows;
    static constexpr int64_t kManyRowsTiles = 8, kManyRowsDepth = kTiles ? 1024 : 512;
    static constexpr int64_t kPromptDepth = kLongPieces ? 2048 : kManyRowsDepth;
    static constexpr int tiles_at_once(int rows) {
        return kTiles ? kStreams : tiles_of_integers(rows);
    }
    static constexpr int64_t kBlockBytes = kTile * kBlock, kRoundedBytes = kTile * kRounded;

    const uint8_t* data;
    int64_t blocks;

    int64_t depth() const { return blocks * kBlock; }
    int64_t tile_bytes() const { return blocks * kBlockBytes; }

    const uint8_t* at(int64_t tile, int64_t k) const { return data + tile * tile_bytes() + k * kTile; }

    // A template, so that it is made for CPUs with tiles only.
    template <class Sum>
    void tiled(const Rows& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
               const Sum& acc) const {
        if (rows > kPipelineRows) return tiled_integers(*this, x, row, rows, tile, tiles, k, k_end, acc);
        each_piece(x.first + row, row, rows, tile, tiles, k, k_end, acc, [&](const ProductPiece& piece) {
            Int8Pipeline<kTileRows>(data, tile_bytes(), x.row(piece.row), piece.count).add(piece);
            constexpr int most = kPipelineFrom - 1;
            for (int64_t r = 0; piece.whole() < piece.k_end && r < piece.count; r += most)
                micro_any<Int8, most>(std::min<int64_t>(piece.count - r, most), x, piece.row + r, *this, piece.tile,
                                      piece.tiles, piece.whole(), piece.k_end, piece.rest().from(r, 0), {});
        });
    }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch& fetch) const {
        if constexpr (kTiles) return long_blocks<R, T>(x, row, tile, k, k_end, acc);
        const int64_t tile_bytes = this->tile_bytes();
        const uint8_t* tiles = data + tile * tile_bytes;
        QuantizedRow xs[R];
        F16 sum[R][T];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        for (int64_t b = k / kBlock, end = k_end / kBlock; b < end; ++b) {
            I16 exact[R][T];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) exact[r][t] = xs[r].begin_raised(b);
            const int64_t at = b * kBlockBytes;
            const uint8_t* next = fetch.template after<T>(tiles, tile_bytes, at);
            add_dots<false>(tiles + at, tile_bytes, [&](int r) { return xs[r].values(b); }, exact, [&](int g) {
                fetch.template line_of<R, T, kBlockBytes / kLine>(next, tile_bytes, g);
            });
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 scale = splat16(xs[r].scale(b));
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) sum[r][t] = plus_scaled(sum[r][t], exact[r][t], scale);
            }
        }
        store_sums(sum, acc);
    }

    // The same where kTiles: R rows of one panel. One and two are faster than memory and go in an even step, a tile at a
    // time; more share what they read of x between two tiles.
    template <int R, int T>
    void long_blocks(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc) const {
        constexpr bool paced = R <= 2;
        constexpr int together = paced || T < 2 ? 1 : 2;
        Pace pace;
        const int64_t tile_bytes = this->tile_bytes();
        const QuantizedRow first = x.row(row);
        auto add = [&](int64_t b, const uint8_t* w, const uint8_t* next, auto& sum) __attribute__((always_inline)) {
            const PanelBlock block(first, b);
            I16 exact[R][together];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int t = 0; t < together; ++t) exact[r][t] = block.begin_raised(r);
            const int64_t parts = std::min(kParts, k_end / kBlock - b * kParts);
            for (int64_t part = 0; part < parts; ++part, w += kBlockBytes, next += kBlockBytes)
                add_dots<false>(w, tile_bytes, [&](int r) { return block.values(r) + part * kBlock; }, exact, [&](int g) {
#pragma GCC unroll 8
                    for (int t = 0; t < together; ++t) prefetch(next + t * tile_bytes + g * kLine);
                    if (paced) pace.line();
                });
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 scale = splat16(block.scale(r));
#pragma GCC unroll 8
                for (int t = 0; t < together; ++t) sum[r][t] = plus_product(sum[r][t], to_floats(exact[r][t]), scale);
            }
        };
        add_in_turns<R, T, together, 1>(data + tile * tile_bytes, tile_bytes, kRoundedBytes, k / kRounded,
                                        ceil_div(k_end, kRounded), acc, add, [] { return true; });
    }

    // What add_tiles() takes of some weights of one tile: the last block may be filled up with zeros.
    static constexpr int64_t kPreparedDepth = 512, kPreparedTiles = 2;
    struct Prepared {
        const uint8_t* data;
        int64_t whole;  // blocks of x
        alignas(64) uint8_t last[kRoundedBytes];
    };

    void prepare(int64_t tile, int64_t k, int64_t k_end, Prepared& to) const {
        to.data = at(tile, k);
        to.whole = (k_end - k) / kRounded;
        const int64_t rest = (k_end - k) % kRounded * kTile;
        if (rest == 0) return;
        std::memcpy(to.last, to.data + to.whole * kRoundedBytes, static_cast<size_t>(rest));
        std::memset(to.last + rest, 0, static_cast<size_t>(kRoundedBytes - rest));
    }

    // R rows of one panel.
    using Registers = TileBlocks<kPreparedTiles>;
    template <int R>
    static void add_tiles(Registers& registers, const QuantizedRow& x, const Prepared* w, int64_t tiles, int64_t k,
                          int64_t k_end, const Sums& acc) {
        const TiledPiece piece(x, k, k_end);
        registers.shape(R);
        alignas(64) Registers::Block exact[Registers::kBlocks];
        auto weights = [&](int64_t t, int64_t b) { return b < w[t].whole ? w[t].data + b * kRoundedBytes : w[t].last; };
        for (int64_t b = 0, count; b < piece.blocks; b += count) {
            const int64_t whole = w->whole - b;
            count = whole < Registers::kBlocks ? std::max<int64_t>(whole, 1) : Registers::kBlocks;
            // If there is one tile, it is taken twice.
            registers.template products<kRounded / kTileBytes>(count, piece.at(b), kRounded, piece.step,
                                                               {weights(0, b), weights(tiles - 1, b)}, kRoundedBytes,
                                                               exact);
            for (int64_t t = 0; t < tiles; ++t) {
                const Sums to = acc.after(b).from(0, t);
                F16 sum[R][1];
                load_sums(sum, to);
                for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const I16 integers = load64(reinterpret_cast<const uint8_t*>(exact[i][t][r]));
                        const F16 scale = splat16(piece.scales[r * kChunk + b + i]);
                        sum[r][0] = plus_product(sum[r][0], to_floats(integers), scale);
                    }
                store_sums(sum, to);
            }
        }
    }
};

// Six rows of two tiles, whose sums fit the registers, where a sum that is stored costs products and one more weight of an
// output does not.
template <>
inline int64_t rows_of_prompts<Int8>() {
    return adds_beside() ? 6 : Int8::kMostRows;
}

}  // namespace gpt_fast
