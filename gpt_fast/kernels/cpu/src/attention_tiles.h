// Attention's products of pairs of bfloat16 (attention_pairs.h has their layouts) by tiles of AMX. A row has the same
// bits for any number of rows.
#pragma once

#include "attention_block.h"
#include "tiles.h"

namespace gpt_fast {

template <class Registers = Tiles>
class AttentionTiles {
public:
    // scores[r][i] = q[r] . keys[i] of a whole block. q [R, D], keys [D / 2, 16, 2] for each 16; D is a multiple of 32.
    template <int R>
    void scores(const uint16_t* q, const uint16_t* const* keys, int64_t dim, float (*scores)[kKeys]) {
        static_assert(kKeys == 2 * kTileRows, "two registers of scores");
        shape(R);
        registers_.template zero<0>();
        registers_.template zero<1>();
        for (int64_t d = 0; d < dim; d += kBlockOfHead) {
            registers_.template load<4>(bytes(q + d), 2 * dim);
            registers_.template load<6>(bytes(keys[0] + d * kTileRows), kTileBytes);
            registers_.template add_bfloat16<0, 4, 6>();
            registers_.template load<7>(bytes(keys[1] + d * kTileRows), kTileBytes);
            registers_.template add_bfloat16<1, 4, 7>();
        }
        registers_.template store<0>(reinterpret_cast<uint8_t*>(scores[0]), sizeof scores[0]);
        registers_.template store<1>(reinterpret_cast<uint8_t*>(scores[0] + kTileRows), sizeof scores[0]);
    }

    // value[r] = value[r] * kept[r] + sum of weights[r][i] * values[i]. value: R rows of `columns`, `stride` floats
    // apart, weights [R, kKeys], values [kKeys / 2, columns, 2].
    template <int R>
    void add_values(float* value, int64_t stride, const float* kept, const uint16_t (*weights)[kKeys],
                    const uint16_t* values, int64_t columns) {
        static_assert(sizeof weights[0] == kTileBytes, "a register of weights");
        bool all = true;
        for (int r = 0; r < R; ++r) all &= kept[r] == 1.0f;
        for (int r = 0; !all && r < R; ++r)
            for (int64_t d = 0; d < columns; d += kTile) {
                float* at = value + r * stride + d;
                store16(at, load16(at) * splat16(kept[r]));
            }
        shape(R);
        registers_.template load<4>(bytes(weights[0]), kTileBytes);
        for (int64_t d = 0; d < columns; d += 2 * kTile) {
            product<0, 6>(values + 2 * d, columns, value + d, 4 * stride);
            if (d + kTile < columns) product<1, 7>(values + 2 * (d + kTile), columns, value + d + kTile, 4 * stride);
        }
    }

private:
    static constexpr int64_t kBlockOfHead = kTileBytes / 2, kTile = kTileRows;

    static const uint8_t* bytes(const uint16_t* at) { return reinterpret_cast<const uint8_t*>(at); }

    template <int sum, int w>
    void product(const uint16_t* values, int64_t columns, float* to, int64_t stride) {
        registers_.template load<sum>(reinterpret_cast<uint8_t*>(to), stride);
        registers_.template load<w>(bytes(values), 4 * columns);
        registers_.template add_bfloat16<sum, 4, w>();
        registers_.template store<sum>(reinterpret_cast<uint8_t*>(to), stride);
    }

    void shape(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        for (int i = 0; i < 8; ++i) registers_.shape(i, i < 6 ? rows : kTileRows, kTileBytes);
        registers_.begin();
    }

    int64_t rows_ = 0;
    Registers registers_;
};

}  // namespace gpt_fast
