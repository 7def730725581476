// Products of some rows with 4-bit weights by registers of tiles, in a pipeline (pipeline.h), which makes codes ready
// for the next tile as well.
#pragma once

#include "int4_ready.h"
#include "pipeline.h"

namespace gpt_fast {

// Packed: [tiles, groups, 32 + 256 * group_size / 32] bytes: 16 scales and 16 zeros, then for every block [4, 16
// outputs, 4] bytes, low halves the first 16 values of k and high halves the other 16. One stream to read.
struct PackedInt4 {
    static constexpr int64_t kHeader = 2 * kTile, kBlockBytes = kTile * kBlock / 2, kBlockLines = kBlockBytes / kLine,
                             kRoundedBytes = kTile * kRounded;

    const uint8_t* data;
    int64_t k_total;
    int64_t group_size;

    int64_t depth() const { return k_total; }
    int64_t group_bytes() const { return kHeader + group_size / kBlock * kBlockBytes; }
    int64_t tile_bytes() const { return k_total / group_size * group_bytes(); }

    const uint8_t* at(int64_t tile, int64_t k) const {
        return data + tile * tile_bytes() + k / group_size * group_bytes();
    }
    // Of a block of x.
    int64_t rounded_bytes() const { return kRounded / group_size * group_bytes(); }
};

// Up to R rows of one panel. A register of weights holds P groups of kBlock codes, less 8. If two, a register of x
// holds each row twice, with zeros in place of what belongs to the other group.
template <int R, int P, class Registers = Tiles>
class Int4Pipeline {
public:
    Int4Pipeline(const PackedInt4& w, const QuantizedRow& x, int64_t rows) : w_(w), x_(x), rows_(rows) {
        for (int64_t part = 0; part < kParts; ++part) {
            const int64_t k = part * kBlock;
            header_[part] = k / w.group_size * w.group_bytes();
            codes_at_[part] = header_[part] + PackedInt4::kHeader + k % w.group_size / kBlock * PackedInt4::kBlockBytes;
        }
        const int64_t height = P > 1 ? P * R : rows;
        for (int i = 0; i < 2; ++i) registers_.shape(i, height, kTileBytes);          // sums
        for (int i = 2; i < 4; ++i) registers_.shape(i, P * kBlock / 4, kTileBytes);  // weights
        for (int i = 4; i < 8; ++i) registers_.shape(i, height, P * kBlock);          // x
        registers_.begin();
    }

    // Adds the whole blocks of a piece. Returns whether a zero was met that 16 bits do not hold; then the sums are as
    // they were.
    bool add(const ProductPiece& of) {
        const int64_t tile_bytes = w_.tile_bytes(), first = of.k / kRounded, end = of.whole() / kRounded;
        const uint8_t* tiles = w_.at(of.tile, 0);
        if (first == end) return false;
        const Fetch following{2 * w_.rounded_bytes()};
        PipelineSums<R> all(of, tile_bytes);
        I16 inner[R];              // eight times the sums over a block
        I16 largest = splat16(0);  // zeros
        TiledInt4Groups groups;

        auto take_groups = [&](const uint8_t* w, auto step) __attribute__((always_inline)) {
            constexpr int part = P * (step % kPieces);
            largest = larger(largest, groups.template set<part % 2>(w + header_[part]));
            if constexpr (P > 1) largest = larger(largest, groups.template set<1>(w + header_[part + 1]));
        };
        // A quarter of the rows of what `step` multiplied.
        auto finish = [&](const Block& x, auto step, int quarter) __attribute__((always_inline)) {
            constexpr int t = step / kPieces, piece = step % kPieces, part = P * piece;
            auto exact = [&](int row) { return load64(reinterpret_cast<const uint8_t*>(exact_[step % 2][row])); };
            if (quarter * R / 4 >= rows_) return;
#pragma GCC unroll 4
            for (int r = quarter * R / 4; r < (quarter + 1) * R / 4; ++r) {
                if (piece == 0) inner[r] = splat16(0);
                inner[r] = groups.template add<part % 2>(inner[r], exact(r));
                if constexpr (P > 1) inner[r] = groups.template add<1>(inner[r], exact(R + r));
                if constexpr (P > 1 || part % 2) inner[r] = groups.add_zeros(inner[r], x.rows.sums(r, part / 2));
                if (piece == kPieces - 1)
                    all.sum[t][r] =
                        plus_product(all.sum[t][r], to_floats(inner[r]), splat16(eighth_scales_[x.parity][r]));
            }
        };

        Block before(*this, tiles, first, 1), now(*this, tiles, first, 0);
        for (int64_t r = 0; r < rows_; ++r) take_row(now, r);
        for (int line = 0; line < kLines; ++line) unpack(now.w, line, 0);
        for (int64_t b = first; b < end; ++b) {
            const Block after(*this, tiles, std::min(b + 1, end - 1), 1 - now.parity);
            const uint8_t* next = following.template after<kStreams>(tiles, tile_bytes, b * w_.rounded_bytes());
            auto step = [&](auto number) __attribute__((always_inline)) {
                constexpr int n = number, t = n / kPieces, piece = n % kPieces, sums = n % 2, weights = 2 + sums;
                constexpr auto done = Number<(n + kSteps - 2) % kSteps>();
                const bool begun = n > 1 || b > first;
                const Block& finished = n < 2 ? before : now;
                const uint8_t* coming = (t + 1 < kStreams ? now.w : after.w) + all.tile_at[(t + 1) % kStreams];
                auto some_vectors = [&](auto quarter) __attribute__((always_inline)) {
                    constexpr int lines = kLines / kPieces;
                    all.template fetch<kBlockLines, 4 * n + quarter, 4 * kSteps>(next);
#pragma GCC unroll 2
                    for (int i = quarter * lines / 4; i < (quarter + 1) * lines / 4; ++i)
                        unpack(coming, piece * lines + i, (t + 1) % 2);
                    if (begun) finish(finished, done, quarter);
                };
                if (begun) take_groups(finished.w + all.tile_at[done / kPieces], done);
                registers_.template zero<sums>();
                some_vectors(Number<0>());
                if (n > 0 || begun) store_sums_of<1 - sums>();
                if constexpr (t == 0) load_x<4 + piece>(now, piece);
                some_vectors(Number<1>());
                registers_.template load<weights>(codes_[t % 2][P * piece], kTileBytes);
                some_vectors(Number<2>());
                registers_.template add_int8<sums, 4 + piece, weights>();
                some_vectors(Number<3>());
                // Behind the steps that finish the block before.
                constexpr int rows = (n - 1) * R / (kSteps - 2);
                for (int r = (n - 2) * R / (kSteps - 2); n > 1 && r < rows && r < rows_; ++r) take_row(after, r);
            };
            each_step<kSteps>(step);
            before = now, now = after;
        }
        store_sums_of<1>();
        auto end_with = [&](auto step) {
            take_groups(before.w + all.tile_at[step / kPieces], step);
            for (int quarter = 0; quarter < 4; ++quarter) finish(before, step, quarter);
        };
        end_with(Number<kSteps - 2>()), end_with(Number<kSteps - 1>());
        if (any_above(largest, TiledInt4Groups::kMost)) return true;
        all.store(of);
        return false;
    }

private:
    static constexpr int kPieces = kParts / P;  // registers of weights of a tile's block, and steps
    static constexpr int kSteps = kStreams * kPieces, kLines = kParts * PackedInt4::kBlockLines;
    static constexpr int kBlockLines = kLines + kParts / 2;  // with headers
    static_assert(P * R <= kTileRows && P <= 2 && kStreams % 2 == 0);

    // A block of x, and of weights from the first tile on.
    struct Block {
        Block(const Int4Pipeline& of, const uint8_t* tiles, int64_t b, int parity_)
            : w(tiles + b * of.w_.rounded_bytes()), rows(of.x_, b), parity(parity_) {}
        const uint8_t* w;
        PanelBlock rows;
        int parity;  // of two neighbours
    };

    // Makes a line of a block's codes ready.
    [[gnu::always_inline]] void unpack(const uint8_t* w, int line, int tile_parity) {
        const int part = line / 4, in_part = line % 4 * kLine;
        const I16 both = load64(w + codes_at_[part] + in_part);
        uint8_t* to = codes_[tile_parity][part] + in_part;
        store64(to, low_nibbles_less8(both)), store64(to + PackedInt4::kBlockBytes, high_nibbles_less8(both));
    }

    // What products and sums take of a row.
    [[gnu::always_inline]] void take_row(const Block& block, int64_t r) {
        eighth_scales_[block.parity][r] = block.rows.scale(r) * 0.125f;
        for (int piece = 0; P > 1 && piece < kPieces; ++piece)
            for (int i = 0; i < P; ++i)
                std::memcpy(spread_[block.parity][piece][i * R + r] + i * kBlock,
                            block.rows.values(r) + (piece * P + i) * kBlock, kBlock);
    }

    template <int number>
    [[gnu::always_inline]] void load_x(const Block& block, int piece) {
        if constexpr (P > 1)
            registers_.template load<number>(spread_[block.parity][piece][0], kTileBytes);
        else
            registers_.template load<number>(reinterpret_cast<const uint8_t*>(block.rows.values(0)) + piece * kBlock,
                                             kRounded);
    }

    template <int number>
    [[gnu::always_inline]] void store_sums_of() {
        registers_.template store<number>(reinterpret_cast<uint8_t*>(exact_[number]), kTileBytes);
    }

    PackedInt4 w_;
    QuantizedRow x_;
    int64_t rows_, header_[kParts], codes_at_[kParts];  // from the beginning of a block
    alignas(64) uint8_t codes_[2][kParts][2 * PackedInt4::kBlockBytes];  // of two tiles
    alignas(64) int32_t exact_[2][P * R][kTile] = {};
    alignas(64) uint8_t spread_[2][P > 1 ? kPieces : 1][P > 1 ? P * R : 1][kTileBytes] = {};  // x of two blocks
    float eighth_scales_[2][R] = {};
    Registers registers_;
};

}  // namespace gpt_fast
