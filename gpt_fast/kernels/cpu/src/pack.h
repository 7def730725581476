// Weights from rows to the tiles that the kernels stream (packing.py describes them): a transpose of kTile rows at a
// time, in units of 4 bytes: a float32, two bfloat16, four int8, eight int4. Rows that the last tile lacks become zeros.
#pragma once

#include "linear.h"

namespace gpt_fast {

struct Packing {
    const uint8_t* from;  // [rows, units], rows side by side
    uint8_t* to;
    int64_t rows, units;
    int64_t group;   // units between two headers; without headers: units
    int64_t header;  // bytes left free before each group
};

// Unit u of row j of a tile becomes number j of the kTile at u.
inline void pack_tiles(Team& team, const Packing& p) {
    using Unit = uint32_t;
    const int64_t group_bytes = p.header + p.group * kTile * static_cast<int64_t>(sizeof(Unit));
    const int64_t groups = p.units / p.group, tile_bytes = groups * group_bytes;
    team.share(ceil_div(p.rows, kTile), 1, [&](int64_t tile, int64_t) {
        const Unit* row[kTile];
        bool there[kTile];
        for (int j = 0; j < kTile; ++j) {
            there[j] = tile * kTile + j < p.rows;
            row[j] = reinterpret_cast<const Unit*>(p.from) + (there[j] ? tile * kTile + j : 0) * p.units;
        }
        for (int64_t g = 0; g < groups; ++g) {
            Unit* to = reinterpret_cast<Unit*>(p.to + tile * tile_bytes + g * group_bytes + p.header);
            // A cache line of one row after the other: lines of many rows would all want the same place in the cache.
            constexpr int64_t line = 64 / sizeof(Unit);
            for (int64_t u = g * p.group; u < (g + 1) * p.group; u += line) {
                const int64_t count = (g + 1) * p.group - u < line ? (g + 1) * p.group - u : line;
                for (int j = 0; j < kTile; ++j, to -= count * kTile)
                    for (int64_t i = 0; i < count; ++i, to += kTile) to[j] = there[j] ? row[j][u + i] : Unit{0};
                to += count * kTile;
            }
        }
    });
}

}  // namespace gpt_fast
