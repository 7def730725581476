// A product and the activation behind it: a thread that has made some outputs goes on with them while they are in its
// caches. By themselves an activation's inputs are the widest rows of a model, and mostly made by other threads.
#pragma once

#include "activations.h"
#include "elementwise.h"
#include "linear.h"

namespace gpt_fast {

// out [rows, width] = activate(y, up), of outputs y [rows, width] or, `gated`, y and up [rows, 2 * width].
struct Activated {
    int64_t kind, gated, width;
    float* out;
    int64_t rounding;  // how its rows are wanted rounded, too
    RoundedRows rounded;

    int64_t halves() const { return gated ? 2 : 1; }
};

// Tiles of the result that one thread makes at least: its rows are rounded in blocks, and a few stream better than one.
constexpr int64_t kRoundedTiles = kRounded / kTile, kStreamedTiles = std::max<int64_t>(kStreams, kRoundedTiles);

inline int64_t activated_unit(int64_t rows) { return rows <= kMemoryRows ? kStreamedTiles : kRoundedTiles; }

// Whether the product and the activation are worth doing as one: not where most threads would wait for the last ones.
inline bool activates(int64_t rows, int64_t width, int threads) {
    return width >= 4 * threads * activated_unit(rows) * kTile;
}

// Floats, so that they stay in the second-level cache. Those of few rows stay in the first level: from one product to the
// next more weights are read than the second level holds, so all that is kept there comes from memory again.
constexpr int64_t activated_sums(int64_t rows) { return rows <= kMemoryRows ? 1 << 13 : 1 << 16; }

// As linear_tiles(); tiles are those of the result.
template <class Format>
void activated_tiles(const typename Format::Rows& x, int64_t row, int64_t count, int64_t rows, const Format& w,
                     const Linear& layer, const Activated& to, int64_t tile, int64_t tile_end) {
    static thread_local Scratch sums;
    const int64_t first = tile * kTile, columns = std::min(to.width - first, (tile_end - tile) * kTile);
    const int64_t halves = to.halves(), most = tile_end - tile + halves - 1;  // tiles; `up` may begin within one
    const int64_t stride = halves * most * kTile, part = count * stride;
    float *acc = sums.get<float>(layer.parts * part), *half_of_acc[] = {acc, acc};
    for (int64_t half = 0; half < halves; ++half) {
        const int64_t begin = half * to.width + first, from = begin / kTile, end = ceil_div(begin + columns, kTile);
        float* at = acc + half * most * kTile;
        sum_tiles<Format>(x, row, count, rows, w, from, end - from, {at, stride, layer.parts, part, false});
        half_of_acc[half] = at + begin % kTile;
    }
    for (int64_t m = 0; m < count; ++m) {
        float *made = half_of_acc[0] + m * stride, *up = to.gated ? half_of_acc[1] + m * stride : nullptr;
        for (int64_t half = 0; half < halves; ++half) {
            float* sum = half ? up : made;
            add_parts(sum, columns, layer.parts, part);
            finish_row(sum, layer, half * to.width + first, columns, nullptr, sum);
        }
        // In place, and not read again from `out`, whose lines other threads had.
        activate(to.kind, made, up, columns, made);
        std::memcpy(to.out + (row + m) * to.width + first, made, static_cast<size_t>(columns) * sizeof *made);
        round_part(to.rounding, made, first, first + columns, to.width, to.rounded, row + m);
    }
}

// The whole result, by the whole team. Ends without a barrier.
template <class Format>
void activated_packed(Team& team, const typename Format::Rows& x, int64_t rows, const Format& w, const Linear& layer,
                      const Activated& to) {
    if (rows <= kMemoryRows) x.fetch(rows);
    const int64_t tiles = ceil_div(to.width, kTile), unit = activated_unit(rows);
    const int64_t step = tiles_at_a_time(w, rows, tiles, team.size) / (rows > kFewRows ? to.halves() : 1);
    const TileRuns runs(tiles, std::max(step / unit, int64_t{1}) * unit, unit, rows, team.size);
    const int64_t sums = std::clamp<int64_t>(rows, 1, kRowsAtOnce) * to.halves() * kTile;
    const int64_t most = std::max(activated_sums(rows) / sums / unit, int64_t{1}) * unit;  // at a time
    share_tiles(team, rows, runs, [&](int64_t row, int64_t count, int64_t tile, int64_t end) {
        for (; tile < end; tile += most)
            activated_tiles<Format>(x, row, count, rows, w, layer, to, tile, std::min(tile + most, end));
    });
}

}  // namespace gpt_fast
