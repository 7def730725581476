// The loops around all matrix products: out[m, n] = sum over k of x[m, k] * w[n, k].
//
// Weights are packed in tiles of 16 outputs whose values for one k (or one block of k) stand side by side, so lanes
// of a vector are different outputs. Each output is then one chain of additions over ascending k, whatever the number
// of rows or threads: results do not depend on the company a row is computed in. Where ranks may share k among them, it
// is cut into parts: a chain for each, which are added as a tree. One rank adds them in the same order, so that
// results do not depend on the number of ranks either.
//
// A Format says how a tile is stored and brings micro<R, T>, which adds a range of k for R rows and T tiles. As many
// rows as micro takes: each weight is read once, from memory, and the next ones are fetched meanwhile (fetch.h). Some
// more: a tile or a piece of some is read from memory once and used for all rows out of the caches, while the next
// piece is fetched. More rows than kFewRows: a piece of x stays in the first-level cache for a group of tiles, which
// stays in the second-level cache for all rows. Of how many tiles, and of how many k, a multiple of every group size,
// Format says (kManyRowsTiles, kManyRowsDepth; kPromptDepth from kPromptRows on), and up to how many rows a product goes
// along all of k at once (kWholeRows).
//
// A format may bring ready(), which makes another format of a piece of weights, in the caches, that takes less work for
// each row and gives it the same bits. It says from how many rows on that pays (kReadyRows; 0: never).
//
// A format that can use the CPU's registers of tiles (tiles.h) says from how many rows on (kTiledRows; 0: never) and
// brings tiled, which does that for any number of rows and tiles. It gives a row the bits of micro, or is used for all.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "fetch.h"

namespace gpt_fast {

enum FormatId : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

// One linear layer. All pointers are borrowed.
struct Linear {
    int64_t format;
    int64_t n;
    int64_t k;
    int64_t group_size;   // int4
    int64_t out_stride;   // from one row of outputs to the next
    const uint8_t* data;  // packed
    const float* scale;   // integers: [n]
    const float* bias;    // [n] or null
    double factor;        // of the output, the bias included
    int64_t parts;        // of k, a power of two: chains of additions
    int64_t raw;          // the outputs are bare sums, to be added to those of other ranks
};

constexpr int64_t kTile = 16;  // outputs
// Rows of one micro kernel. Sums that do not fit the registers cost less than weights that are read twice from memory, but
// more than weights that are read again from the caches: kMostRows of a format.
constexpr int kMaxRows = 8, kCachedRows = kRegisters < 32 ? 6 : 8;
static_assert(!kSharedFetches || kSharingRows <= (kCachedRows + 1) / 2);  // of nearly equal pieces
// With 32 registers any number is few: two tiles at a time for all rows are faster than more tiles, whatever the rows.
constexpr int64_t kFewRows = kTiles ? 16 : kRegisters < 32 ? 47 : int64_t{1} << 40;
// Where one_stream(), so few read weights one tile at a time, if they are more than kStreamedRows of a format, which read
// kStreams tiles as fast or faster.
constexpr int kOneTileRows = 4;
constexpr int64_t kFewTiles = kRegisters < 32 ? 1 : 2;  // at a time for few rows; one is taken from end to end
constexpr int64_t kRowsAtOnce = 256;  // so that x and sums stay in the second-level cache

constexpr int64_t kMemoryRows = 16;  // products of more take longer than memory

// From so many rows on, a product goes along k in long pieces, and stores its sums less often. Fewer rows use each piece
// of weights too seldom for that. CPUs with few registers, or with registers of tiles, always take short pieces.
constexpr int64_t kPromptRows = 48;
constexpr bool kLongPieces = kRegisters >= 32 && !kTiles;

constexpr int64_t kKeptSums = 1 << 11;  // floats that few rows make before they are finished, in the first-level cache
constexpr int64_t kRunBytes = 1 << 18;  // of weights that a thread computes at a time with few rows

// Few rows wait for memory, and a sum some cycles for the one before; more rows need their sums in registers.
constexpr bool kFewRegisters = kRegisters < 32 && kRaisedDots;  // for what products of bytes could do meanwhile
constexpr int tiles_of_integers(int rows) {
    return rows <= (kFewRegisters ? 1 : 2) ? kStreams : kRegisters < 32 ? 1 : 2;
}

// Whether a loop of R rows along k takes two steps before it asks for its end. With few registers, or vectors in two turns,
// gcc keeps a sum or an address in memory, and the next step waits for it. Elsewhere, and with fewer rows, one step at a time
// is as fast or faster.
template <int R>
inline bool two_steps() {
    return R >= 6 && (kRegisters < 32 || half_wide());
}

// Sums of rows and tiles over each part of k: [parts, rows, stride], `part` floats from one part to the next. As long as
// they are not begun, the memory holds anything.
struct Sums {
    float* data;
    int64_t stride, parts, part;
    bool begun;
    Sums from(int64_t row, int64_t tile) const {
        return {data + row * stride + tile * kTile, stride, parts, part, begun};
    }
    Sums only(int64_t p) const { return {data + p * part, stride, 1, part, begun}; }
    Sums after(int64_t blocks) const { return {data, stride, parts, part, begun || blocks > 0}; }
};

// R rows of x from `row` on.
template <class Rows, class Row, int R>
[[gnu::always_inline]] inline void take_rows(Row (&xs)[R], const Rows& x, int64_t row) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) xs[r] = x.row(row + r);
}

// The sums of R rows and T tiles, from where they are kept between the pieces of k and back.
template <int R, int T>
inline void load_sums(F16 (&sum)[R][T], const Sums& from) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            sum[r][t] = from.begun ? load16(from.data + r * from.stride + t * kTile) : splat16(0.0f);
}

template <int R, int T>
inline void store_sums(const F16 (&sum)[R][T], const Sums& to) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) store16(to.data + r * to.stride + t * kTile, sum[r][t]);
}

// Adds blocks of k, from b to end, to the sums of R rows and T tiles: a block of `together` tiles, in turns, while the one
// that comes `ahead` blocks later is fetched. Memory has ahead * T / together times as long for it, and `together` is how
// many sums the registers hold. add(b, weights, what to fetch, sums) adds one; keep(): whether the sums are kept.
template <int R, int T, int together, int ahead, class Add, class Keep>
[[gnu::always_inline]] inline void add_in_turns(const uint8_t* tiles, int64_t tile_bytes, int64_t block_bytes, int64_t b,
                                                int64_t end, const Sums& acc, Add add, Keep keep) {
    constexpr int turns = T / together;
    const int64_t turn_bytes = together * tile_bytes;
    const Fetch following{ahead * block_bytes};
    F16 sum[turns][R][together];
    for (int turn = 0; turn < turns; ++turn) load_sums(sum[turn], acc.from(0, turn * together));
    for (; b < end; ++b) {
        const uint8_t *from = tiles + b * block_bytes,
                      *next = following.template after<T>(tiles, tile_bytes, b * block_bytes);
        for (int turn = 0; turn < turns; ++turn, from += turn_bytes, next += turn_bytes) add(b, from, next, sum[turn]);
    }
    for (int turn = 0; keep() && turn < turns; ++turn) store_sums(sum[turn], acc.from(0, turn * together));
}

// Adds [k, k_end), which is all parts of k or a piece of one. The parts of a few tiles follow each other, as they do in
// memory.
template <class Format, int R>
inline void micro_rows(const typename Format::Rows& x, int64_t row, const Format& w, int64_t tile, int64_t tiles,
                       int64_t k, int64_t k_end, const Sums& acc, const Fetch& fetch) {
    constexpr int T = Format::tiles_at_once(R);
    // Weights that come from memory.
    constexpr bool few = !kTiles && T > 1 && Format::kStreamedRows < R && R <= kOneTileRows;
    const bool one = few && fetch.tiles == 0 && one_stream();
    const int64_t depth = (k_end - k) / acc.parts;
    int64_t t = 0;
    for (; !one && t + T <= tiles; t += T)
        for (int64_t p = 0; p < acc.parts; ++p)
            w.template micro<R, T>(x, row, tile + t, k + p * depth, k + (p + 1) * depth, acc.only(p).from(0, t), fetch);
    if constexpr (T > 1)
        for (; t < tiles; ++t)
            for (int64_t p = 0; p < acc.parts; ++p)
                w.template micro<R, 1>(x, row, tile + t, k + p * depth, k + (p + 1) * depth, acc.only(p).from(0, t),
                                       fetch);
}

// Picks the micro kernel for a number of rows that is only known now.
template <class Format, int R = kMaxRows>
inline void micro_any(int64_t rows, const typename Format::Rows& x, int64_t row, const Format& w, int64_t tile,
                      int64_t tiles, int64_t k, int64_t k_end, const Sums& acc, const Fetch& fetch) {
    if constexpr (R > 1) {
        if (rows < R) return micro_any<Format, R - 1>(rows, x, row, w, tile, tiles, k, k_end, acc, fetch);
    }
    micro_rows<Format, R>(x, row, w, tile, tiles, k, k_end, acc, fetch);
}

// body(begin, count) for groups of at most `most` rows, which are whole panels but for those at the ends; `first`: where
// the rows stand in their panels.
template <class Body>
inline void each_group(int64_t first, int64_t rows, int64_t most, Body body) {
    for (int64_t begin = 0, count; begin < rows; begin += count) {
        const int64_t lane = (first + begin) % kTileRows, room = lane ? kTileRows - lane : most;
        count = rows - begin < room ? rows - begin : room;
        body(begin, count);
    }
}

// Picks add_tiles for a number of rows that is only known now.
template <class Format, int R = kTileRows, class... Arguments>
inline void add_tiles_any(int64_t rows, Arguments&&... arguments) {
    if constexpr (R > 1) {
        if (rows < R) return add_tiles_any<Format, R - 1>(rows, arguments...);
    }
    Format::template add_tiles<R>(arguments...);
}

// The sums of integer formats by tiles. A format brings prepare, which makes of some weights what registers of tiles
// take, for all rows, and add_tiles. It gets pieces that do not reach over a multiple of kPreparedDepth.
template <class Format>
inline void tiled_integers(const Format& w, const typename Format::Rows& x, int64_t row, int64_t rows, int64_t tile,
                           int64_t tiles, int64_t k, int64_t k_end, const Sums& acc) {
    constexpr int64_t most = Format::kPreparedDepth, at_once = Format::kPreparedTiles;
    typename Format::Registers registers;
    typename Format::Prepared weights[at_once];
    const int64_t depth = (k_end - k) / acc.parts;
    for (int64_t t = 0; t < tiles; t += at_once) {
        const int64_t count = tiles - t < at_once ? tiles - t : at_once;
        for (int64_t p = 0; p < acc.parts; ++p) {
            Sums to = acc.only(p).from(0, t);
            for (int64_t d = k + p * depth, end = d + depth, stop; d < end; d = stop, to.begun = true) {
                stop = d / most * most + most < end ? d / most * most + most : end;
                for (int64_t i = 0; i < count; ++i) w.prepare(tile + t + i, d, stop, weights[i]);
                FetchPieces next(w, tile + t, count, d, stop, rows);
                each_group(x.first + row, rows, kTileRows, [&](int64_t begin, int64_t group) {
                    add_tiles_any<Format>(group, registers, x.row(row + begin), weights, count, d, stop,
                                          to.from(begin, 0));
                    next.after(begin + group);
                });
            }
        }
    }
}

// How many rows of a product with kPromptRows and more one micro kernel takes: at most kMostRows.
template <class Format>
inline int64_t rows_of_prompts() {
    return Format::kMostRows;
}

// All rows of one range of k and some tiles; the rows are cut into nearly equal pieces. `next`: what is fetched between
// them.
template <class Format, int most = Format::kMostRows>
inline void all_rows(const typename Format::Rows& x, int64_t row, int64_t rows, const Format& w, int64_t tile,
                     int64_t tiles, int64_t k, int64_t k_end, const Sums& acc, const Fetch& fetch = {},
                     FetchPieces* next = nullptr) {
    if constexpr (Format::kTiledRows > 0)
        if (rows >= Format::kTiledRows) return w.tiled(x, row, rows, tile, tiles, k, k_end, acc);
    if constexpr (Format::kTiledRows > 1) {  // micro takes rows of one panel
        constexpr int fewer = Format::kTiledRows - 1;
        return each_group(x.first + row, rows, kTileRows, [&](int64_t begin, int64_t count) {
            micro_any<Format, fewer>(count, x, row + begin, w, tile, tiles, k, k_end, acc.from(begin, 0), fetch);
        });
    }
    const int64_t pieces = ceil_div(rows, rows < kPromptRows ? most : rows_of_prompts<Format>());
    for (int64_t p = 0; p < pieces; ++p) {
        const int64_t begin = rows * p / pieces, end = rows * (p + 1) / pieces;
        micro_any<Format, most>(end - begin, x, row + begin, w, tile, tiles, k, k_end, acc.from(begin, 0),
                                fetch.part(p, pieces));
        if (next) next->after(end);
    }
}

// Makes the sums of `count` rows from `row` on, of some tiles, each part of k by itself; `rows`: how many the product
// has.
template <class Format>
void sum_tiles(const typename Format::Rows& x, int64_t row, int64_t count, int64_t rows, const Format& w, int64_t tile,
               int64_t tiles, const Sums& acc) {
    const int64_t k = w.depth(), depth = k / acc.parts;
    if (rows <= Format::kWholeRows)
        return all_rows<Format, kMaxRows>(x, row, count, w, tile, tiles, 0, k, acc);
    const bool few = rows <= kFewRows;
    const int64_t most = rows < kPromptRows ? Format::kManyRowsDepth : Format::kPromptDepth;
    const int64_t group = few ? kFewTiles : tiles, piece = few && kFewTiles == 1 ? depth : most;
    for (int64_t t = 0; t < tiles; t += group)
        for (int64_t p = 0; p < acc.parts; ++p) {
            Sums to = acc.only(p).from(0, t);
            for (int64_t d = p * depth, end = d + depth, stop; d < end; d = stop, to.begun = true) {
                stop = d + piece < end ? d + piece : end;
                const int64_t now = t + group < tiles ? group : tiles - t;
                if constexpr (Format::kReadyRows > 0) {
                    if (rows >= Format::kReadyRows) {
                        const auto ready = w.ready(tile + t, now, d, stop);
                        FetchPieces next(w, tile + t, now, d, stop, count);
                        all_rows<typename Format::Ready>(x, row, count, ready, 0, now, d, stop, to, {}, &next);
                        continue;
                    }
                }
                const Fetch following = {w.tile_bytes() * (stop - d) / k, group};
                all_rows<Format>(x, row, count, w, tile + t, now, d, stop, to, following);
            }
        }
}

// Adds the parts of some sums, as a tree, to the first.
inline void add_parts(float* sums, int64_t count, int64_t parts, int64_t part) {
    for (int64_t step = 1; step < parts; step *= 2)
        for (int64_t p = 0; p < parts; p += 2 * step)
            for (int64_t i = 0; i < count; ++i) sums[p * part + i] += sums[(p + step) * part + i];
}

// A sum to an output, which is added to `add`. Fused by name: a compiler that does it here and not there would give
// ranks, which finish a sum elsewhere, other bits than one process.
inline float finished(float sum, const Linear& layer, int64_t column, float add) {
    const float scale = layer.scale ? layer.scale[column] : 1.0f, bias = layer.bias ? layer.bias[column] : 0.0f;
    return std::fma(std::fma(sum, scale, bias), static_cast<float>(layer.factor), add);
}

// The same for columns [first, first + count) of a row; `add` may be null, and may be `to`.
inline void finish_row(const float* sums, const Linear& layer, int64_t first, int64_t count, const float* add,
                       float* to) {
    const F8 one = splat(1.0f), none = splat(0.0f), factor = splat(static_cast<float>(layer.factor));
    const float *scales = layer.scale, *biases = layer.bias;  // which a compiler reads again after each store
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        const F8 scale = scales ? load8(scales + first + j) : one;
        const F8 bias = biases ? load8(biases + first + j) : none;
        store8(to + j, plus_product(add ? load8(add + j) : none, plus_product(bias, load8(sums + j), scale), factor));
    }
    for (; j < count; ++j) to[j] = finished(sums[j], layer, first + j, add ? add[j] : 0.0f);
}

// Some tiles of out [rows, n] for `count` rows from `row` on, at most kRowsAtOnce, by one thread; residual null or as
// out, which it may be itself.
template <class Format>
void linear_tiles(const typename Format::Rows& x, int64_t row, int64_t count, int64_t rows, const Format& w,
                  const Linear& layer, float* out, const float* residual, int64_t tile, int64_t tile_end) {
    static thread_local Scratch sums;
    const int64_t width = tile_end - tile, stride = width * kTile, part = count * stride;
    float* acc = sums.get<float>(layer.parts * part);
    sum_tiles<Format>(x, row, count, rows, w, tile, width, {acc, stride, layer.parts, part, false});
    const int64_t first = tile * kTile, columns = layer.n - first < stride ? layer.n - first : stride;
    for (int64_t m = 0; m < count; ++m) {
        float* from = acc + m * stride;
        const int64_t at = (row + m) * layer.out_stride + first;
        add_parts(from, columns, layer.parts, part);
        if (layer.raw)
            std::memcpy(out + at, from, static_cast<size_t>(columns) * sizeof *from);
        else
            finish_row(from, layer, first, columns, residual ? residual + at : nullptr, out + at);
    }
}

// How many tiles a thread computes at a time: few enough that threads end together, and for few rows, which wait for
// memory, a long run of it.
template <class Format>
int64_t tiles_at_a_time(const Format& w, int64_t rows, int64_t tiles, int threads) {
    const int64_t even = tiles / (4 * threads);
    const bool piped = Format::kTiledRows > 1 && rows >= Format::kTiledRows && rows <= Format::kWholeRows;
    const int64_t unit = piped ? kStreams : 1;  // what is missing of one takes as long
    if (rows > kFewRows) return std::max(unit, std::min(even, Format::kManyRowsTiles) / unit * unit);
    const int64_t run = std::min(kRunBytes / w.tile_bytes(), tiles / (8 * threads)) / kStreams * kStreams;
    return std::max(unit, std::max(run, std::min<int64_t>(even, kStreams)));
}

// The runs of tiles that threads take one after the other, multiples of `unit` but for the last. Memory is slow at the
// beginning of a run, so of few rows each thread takes half of its share at once, then a quarter and so on, down to
// `step`: long runs, and nobody waits long for a thread that was held up. Where memory is not what they wait for, the
// last ones are short.
class TileRuns {
public:
    TileRuns(int64_t tiles, int64_t step, int64_t unit, int64_t rows, int threads)
        : tiles_(tiles), step_(step), unit_(unit), threads_(threads) {
        const bool few = rows <= kFewRows;
        if (few && rows > kMemoryRows) step_ = step = std::min(step, unit);
        first_ = few ? tiles / (2 * threads) / unit * unit : 0;
        for (int64_t size = first_; size > step; size = half_of(size)) ++halvings_, rest_ += size * threads;
    }

    int64_t count() const { return halvings_ * threads_ + ceil_div(tiles_ - rest_, step_); }

    // body(begin, end) for run `index`.
    template <class Body>
    void run(int64_t index, Body body) const {
        int64_t begin = 0, size = first_, past = 0;  // of runs of other sizes, which lie before
        for (; past < halvings_ * threads_ && index - past >= threads_; past += threads_, size = half_of(size))
            begin += size * threads_;
        if (index >= halvings_ * threads_) size = step_;
        begin += (index - past) * size;
        body(begin, std::min(begin + size, tiles_));
    }

private:
    int64_t half_of(int64_t size) const { return size / 2 / unit_ * unit_; }

    int64_t tiles_, step_, unit_, threads_, first_, halvings_ = 0, rest_ = 0;
};

// body(row, count, tile, end): `count` rows from `row` on, at most kRowsAtOnce, and a run of tiles; until all are done,
// by the whole team. Ends without a barrier.
template <class Body>
void share_tiles(Team& team, int64_t rows, const TileRuns& runs, Body body) {
    team.share(ceil_div(rows, kRowsAtOnce) * runs.count(), 1, [&](int64_t index, int64_t) {
        const int64_t row = index / runs.count() * kRowsAtOnce;
        runs.run(index % runs.count(),
                 [&](int64_t tile, int64_t end) { body(row, std::min(rows - row, kRowsAtOnce), tile, end); });
    });
}

// out [rows, n], by the whole team. Ends without a barrier.
template <class Format>
void linear_packed(Team& team, const typename Format::Rows& x, int64_t rows, const Format& w, const Linear& layer,
                   float* out, const float* residual) {
    if (rows <= kMemoryRows) x.fetch(rows);
    const int64_t tiles = ceil_div(layer.n, kTile), step = tiles_at_a_time(w, rows, tiles, team.size);
    // Of few rows long runs: memory stands still while sums are finished.
    const int64_t sums = std::max<int64_t>(rows, 1) * kTile;
    const int64_t most = rows > kMemoryRows ? step : std::max(step, kKeptSums / sums / kStreams * kStreams);
    const TileRuns runs(tiles, step, rows > kMemoryRows ? kFewTiles : kStreams, rows, team.size);
    share_tiles(team, rows, runs, [&](int64_t row, int64_t count, int64_t tile, int64_t end) {
        for (; tile < end; tile += most)
            linear_tiles<Format>(x, row, count, rows, w, layer, out, residual, tile, std::min(tile + most, end));
    });
}

}  // namespace gpt_fast
