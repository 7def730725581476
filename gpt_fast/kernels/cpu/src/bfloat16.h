// Products with bfloat16 weights, summed in float32. Where the CPU multiplies pairs of bfloat16 by itself, x is rounded to
// that as well, as torch does it; elsewhere x is float32.
//
// Packed: [tiles, blocks, 16, 16 outputs, 2 k], the last block of 32 k filled up with zeros.
#pragma once

#include "activations.h"
#include "float32.h"
#include "linear.h"

namespace gpt_fast {

struct Bfloat16 {
    using Rows = std::conditional_t<kBfloat16Dots, Bfloat16Rows, FloatRows>;
    static constexpr int64_t kTiledRows = kTiles ? 1 : 0;  // other sums than micro's
    static constexpr int64_t kReadyRows = 0, kWholeRows = kTiles ? kFewRows : kMaxRows;
    static constexpr int kStreamedRows = 0;
    static constexpr int kMostRows = kRegisters < 32 ? 5 : kCachedRows;  // whose sums and weights fit the registers
    static constexpr int64_t kManyRowsTiles = 8, kManyRowsDepth = 512;
    static constexpr int64_t kPromptDepth = kLongPieces ? 2048 : kManyRowsDepth;
    static constexpr int tiles_at_once(int rows) { return Float32::tiles_at_once(rows); }
    static constexpr int64_t kPairedRows = 4;  // so few, by tiles, read two tiles of weights faster than four
    static constexpr int64_t kBlockPairs = kBlock / 2, kPairBytes = 4 * kTile;

    const uint8_t* data;
    int64_t k_total;

    int64_t depth() const { return k_total; }
    int64_t tile_bytes() const { return ceil_div(k_total, kBlock) * kBlockPairs * kPairBytes; }

    template <int R, int T>
    void micro(const Rows& x, int64_t row, int64_t tile, int64_t k, int64_t k_end, const Sums& acc,
               const Fetch& fetch) const {
        const int64_t tile_bytes = this->tile_bytes();
        const int64_t pairs = kBfloat16Dots ? ceil_div(k_end, 2) : k_end / 2;  // rounded rows are filled up
        const uint8_t* tiles = data + tile * tile_bytes;
        decltype(x.row(0)) xs[R];
        F16 sum[R][T];
        take_rows(xs, x, row);
        load_sums(sum, acc);
        const bool two = two_steps<R>();
        for (int64_t p = k / 2; p < pairs;) {
            const uint8_t* next = fetch.template after<T>(tiles, tile_bytes, p * kPairBytes);
            const int64_t end = std::min(p + kBlockPairs, pairs);
            auto step = [&]() __attribute__((always_inline)) {
                fetch.template line<R, T>(next, tile_bytes, p);
                add<R, T, 2>(tiles + p * kPairBytes, tile_bytes, xs, 2 * p, sum);
                ++p, next += kPairBytes;
            };
            while (two && p + 1 < end) step(), step();
            while (p < end) step();
        }
        if (!kBfloat16Dots && k_end % 2) add<R, T, 1>(tiles + pairs * kPairBytes, tile_bytes, xs, k_end - 1, sum);
        store_sums(sum, acc);
    }

    // One panel of rows and four tiles of weights at a time, or two and two. A template, because rows that are not
    // rounded have no panels.
    template <class Panels>
    void tiled(const Panels& x, int64_t row, int64_t rows, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
               const Sums& acc) const {
        if (rows == 1) return by_vectors<1>(x, row, tile, tiles, k, k_end, acc);
        if (rows == 2) return by_vectors<2>(x, row, tile, tiles, k, k_end, acc);
        TileSums<> registers;
        const int64_t depth = (k_end - k) / acc.parts;
        each_group(x.first + row, rows, 2 * kTileRows, [&](int64_t begin, int64_t count) {
            registers.shape(count);
            auto add = [&](int64_t t, auto together) {
                for (int64_t p = 0; p < acc.parts; ++p) {
                    const int64_t from = k + p * depth;
                    add_tiles<together>(registers, x, row + begin, count, tile + t, from, from + depth,
                                        acc.only(p).from(begin, t), begin == 0);
                }
            };
            int64_t t = 0;
            const bool four = kPairedRows < count && count <= kTileRows;
            for (; four && t + 4 <= tiles; t += 4) add(t, std::integral_constant<int, 4>());
            for (; t + 2 <= tiles; t += 2) add(t, std::integral_constant<int, 2>());
            for (; t < tiles; ++t) add(t, std::integral_constant<int, 1>());
        });
    }

    // One and two rows by vectors. A vector can be used as soon as its line has come from memory; a register of tiles
    // waits for sixteen lines. The sums have the bits that tiles give.
    template <int R, class Panels>
    void by_vectors(const Panels& x, int64_t row, int64_t tile, int64_t tiles, int64_t k, int64_t k_end,
                    const Sums& acc) const {
        const FlushesTiny as_tiles_do;
        const int64_t depth = (k_end - k) / acc.parts;
        auto add = [&](int64_t t, auto together) {
            for (int64_t p = 0; p < acc.parts; ++p) {
                const int64_t from = k + p * depth;
                add_rows<R, together>(x, row, tile + t, from, from + depth, acc.only(p).from(0, t));
            }
        };
        int64_t t = 0;
        for (; t + kStreams <= tiles; t += kStreams) add(t, std::integral_constant<int, kStreams>());
        for (; t < tiles; ++t) add(t, std::integral_constant<int, 1>());
    }

    // T tiles in turns.
    template <int R, int T, class Panels>
    [[gnu::noinline]] void add_rows(const Panels& x, int64_t row, int64_t tile, int64_t k, int64_t k_end,
                                    const Sums& acc) const {
        decltype(x.row(0)) xs[R];
        take_rows(xs, x, row);
        alignas(64) float values[R][2][kBlockPairs];  // of a block, even and odd k
        int64_t ready = -1;
        Pace pace;
        auto add = [&](int64_t b, const uint8_t* w, const uint8_t* next, F16(&sum)[R][1])
                       __attribute__((always_inline)) {
            F16 even[R], odd[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                if (b != ready) {
                    const I16 pairs = load64(reinterpret_cast<const uint8_t*>(xs[r] + b * kBlock));
                    store16(values[r][0], low_bfloat16(pairs)), store16(values[r][1], high_bfloat16(pairs));
                }
                even[r] = odd[r] = splat16(0.0f);
            }
            ready = b;
#pragma GCC unroll 16
            for (int64_t i = 0; i < kBlockPairs; ++i) {
                prefetch(next + i * kPairBytes);
                pace.line();
                const I16 both = load64(w + i * kPairBytes);
                const F16 first = low_bfloat16(both), second = high_bfloat16(both);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    even[r] = plus_product(even[r], splat16(values[r][0][i]), first);
                    odd[r] = plus_product(odd[r], splat16(values[r][1][i]), second);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sum[r][0] = sum[r][0] + (even[r] + odd[r]);
        };
        const int64_t tile_bytes = this->tile_bytes();
        add_in_turns<R, T, 1, 1>(data + tile * tile_bytes, tile_bytes, kBlockPairs * kPairBytes, k / kBlock,
                                 ceil_div(k_end, kBlock), acc, add, [] { return true; });
    }

    template <int T, class Panels>
    void add_tiles(TileSums<>& registers, const Panels& x, int64_t row, int64_t rows, int64_t tile, int64_t k,
                   int64_t k_end, const Sums& acc, bool fetch) const {
        constexpr int64_t block_bytes = kBlockPairs * kPairBytes;
        const Fetch following{block_bytes};
        Pace pace;
        const int64_t tile_bytes = this->tile_bytes(), stride = acc.stride * 4;
        const uint8_t* tiles = data + tile * tile_bytes;
        const auto first = x.row(row), second = x.row(rows > kTileRows ? row + kTileRows : row);
        if (acc.begun)
            registers.load<T>(acc.data, stride);
        else
            registers.zero<T>();
        for (int64_t b = k / kBlock; b < ceil_div(k_end, kBlock); ++b) {
            const uint8_t* next = following.template after<T>(tiles, tile_bytes, b * block_bytes);
            registers.add<T>(first + b * kBlock, second + b * kBlock, tiles + b * block_bytes, tile_bytes, [&](int t) {
                for (int64_t i = 0; fetch && i < block_bytes; i += kLine) {
                    prefetch(next + t * tile_bytes + i);
                    pace.line();
                }
            });
        }
        registers.store<T>(acc.data, stride);
    }

    // Adds the products of N neighbours along k: a pair, or the last value of an odd k.
    template <int R, int T, int N, class Row>
    static void add(const uint8_t* w, int64_t tile_bytes, Row const (&xs)[R], int64_t k, F16 (&sum)[R][T]) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const I16 both = load64(w + t * tile_bytes);
            if constexpr (kBfloat16Dots) {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sum[r][t] = bfloat16_dot(sum[r][t], both, splat_four(xs[r] + k));
            } else {
                const F16 first = low_bfloat16(both), second = high_bfloat16(both);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    sum[r][t] = plus_product(sum[r][t], splat16(xs[r][k]), first);
                    if constexpr (N > 1) sum[r][t] = plus_product(sum[r][t], splat16(xs[r][k + 1]), second);
                }
            }
        }
    }
};

}  // namespace gpt_fast
