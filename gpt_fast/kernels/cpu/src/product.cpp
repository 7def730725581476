// Products of every format. A separate source file, so that a compiler for each makes all of them at the same time.
#include "product.h"

#include "bfloat16.h"
#include "float32.h"
#include "int4.h"
#include "int8.h"

namespace gpt_fast {

namespace {

inline void get(const AnyRows& in, FloatRows& to) { to = {in.data, in.k}; }
inline void get(const AnyRows& in, Bfloat16Rows& to) { to = in.rounded.bfloat16; }
inline void get(const AnyRows& in, QuantizedRows& to) { to = in.rounded.plain; }
inline void get(const AnyRows& in, PairedRows& to) { to = {in.rounded.dots}; }

// body(rows, weights), by the format of `w`.
template <class Body>
void by_format(const AnyRows& in, const Linear& w, Body body) {
    auto with = [&](auto weights) {
        typename decltype(weights)::Rows x;
        get(in, x);
        body(x, weights);
    };
    switch (w.format) {
        case kFloat32: return with(Float32{reinterpret_cast<const float*>(w.data), w.k});
        case kBfloat16: return with(Bfloat16{w.data, w.k});
        case kInt8: return with(Int8{w.data, ceil_div(w.k, kBlock)});
        case kInt4: return with(Int4{w.data, w.k, w.group_size});
    }
}

}  // namespace

void product(Team& team, const AnyRows& in, int64_t rows, const Linear& w, float* out, const float* residual) {
    by_format(in, w, [&](const auto& x, const auto& weights) {
        linear_packed(team, x, rows, weights, w, out, residual);
    });
}

void product_activated(Team& team, const AnyRows& in, int64_t rows, const Linear& w, const Activated& to) {
    by_format(in, w, [&](const auto& x, const auto& weights) { activated_packed(team, x, rows, weights, w, to); });
}

void product_tiles(const AnyRows& in, int64_t rows, const Linear& w, float* out, int64_t tile, int64_t tile_end) {
    by_format(in, w, [&](const auto& x, const auto& weights) {
        for (int64_t row = 0; row < rows; row += kRowsAtOnce)
            linear_tiles(x, row, std::min(rows - row, kRowsAtOnce), rows, weights, w, out, nullptr, tile, tile_end);
    });
}

void product_activated_tiles(const AnyRows& in, int64_t rows, const Linear& w, const Activated& to, int64_t tile,
                             int64_t tile_end) {
    by_format(in, w, [&](const auto& x, const auto& weights) {
        for (int64_t row = 0; row < rows; row += kRowsAtOnce)
            activated_tiles(x, row, std::min(rows - row, kRowsAtOnce), rows, weights, w, to, tile, tile_end);
    });
}

}  // namespace gpt_fast
