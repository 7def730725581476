// A product and the activation behind it: a thread that has made some outputs goes on with them while they are in its
// caches. By themselves an activation's inputs are the widest rows of a model, and mostly made by other threads.
#pragma once

#include "activations.h"
#include "elementwise.h"
#include "linear.h"

namespace gpt_fast {

// out [rows, width] = activate(y, up), of outputs y [rows, width] or, `gated`, y and up [rows, 2 * width]. A gated
// width is a multiple of kTile.
struct Activated {
    int64_t kind, gated, width;
    float* out;
    int64_t rounding;  // how its rows are wanted rounded, too
    RoundedRows rounded;
};

// Tiles of `out` that one thread makes at least, since its rows are rounded in blocks.
constexpr int64_t kRoundedTiles = kRounded / kTile;

constexpr int64_t kActivatedSums = 1 << 16;  // floats, so that they stay in the second-level cache

// As linear_tiles(); tiles are those of the result.
template <class Format>
void activated_tiles(const typename Format::Rows& x, int64_t row, int64_t count, int64_t rows, const Format& w,
                     const Linear& layer, const Activated& to, int64_t tile, int64_t tile_end) {
    static thread_local Scratch sums;
    const int64_t width = (tile_end - tile) * kTile, first = tile * kTile, halves = to.gated ? 2 : 1;
    const int64_t stride = halves * width, part = count * stride, columns = std::min(to.width - first, width);
    float* acc = sums.get<float>(layer.parts * part);
    for (int64_t half = 0; half < halves; ++half)
        sum_tiles<Format>(x, row, count, rows, w, half * to.width / kTile + tile, tile_end - tile,
                          {acc + half * width, stride, layer.parts, part, false});
    for (int64_t m = 0; m < count; ++m) {
        float *sum = acc + m * stride, *out = to.out + (row + m) * to.width;
        add_parts(sum, stride, layer.parts, part);
        for (int64_t half = 0; half < halves; ++half) {
            float* of_half = sum + half * width;
            finish_row(of_half, layer, half * to.width + first, columns, nullptr, of_half);
        }
        activate(to.kind, sum, to.gated ? sum + width : nullptr, columns, out + first);
        round_part(to.rounding, out, first, first + columns, to.width, to.rounded, row + m);
    }
}

// The whole result, by the whole team. Ends without a barrier.
template <class Format>
void activated_packed(Team& team, const typename Format::Rows& x, int64_t rows, const Format& w, const Linear& layer,
                      const Activated& to) {
    const bool few = rows <= kFewRows;
    const int64_t tiles = ceil_div(to.width, kTile),
                  unit = few ? std::max<int64_t>(kStreams, kRoundedTiles) : kRoundedTiles;
    const int64_t step = tiles_at_a_time(w, rows, tiles, team.size) / (to.gated && !few ? 2 : 1);  // as many sums
    const TileRuns runs(tiles, std::max(step / unit, int64_t{1}) * unit, unit, few, team.size);
    const int64_t sums = std::min(rows, kRowsAtOnce) * (to.gated ? 2 : 1) * kTile;
    const int64_t most = few ? std::max(kActivatedSums / sums / unit, int64_t{1}) * unit : tiles;  // at a time
    share_tiles(team, rows, runs, [&](int64_t row, int64_t count, int64_t tile, int64_t end) {
        for (; tile < end; tile += most)
            activated_tiles<Format>(x, row, count, rows, w, layer, to, tile, std::min(tile + most, end));
    });
}

}  // namespace gpt_fast
