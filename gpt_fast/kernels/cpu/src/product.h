// A product with weights of any format.
#pragma once

#include "bfloat16.h"
#include "float32.h"
#include "int4.h"
#include "int8.h"

namespace gpt_fast {

// What of RoundedRows products with weights of `format` take; 0: float32.
constexpr int64_t rounding_of(int64_t format) {
    switch (format) {
        case kInt8: return kForInt8;
        case kInt4: return kForInt4;
        case kBfloat16: return kBfloat16Dots ? int64_t{kForBfloat16} : 0;
        default: return 0;
    }
}

// The rows of a product, as each format may want them.
struct AnyRows {
    const float* data;
    int64_t k;
    RoundedRows rounded;

    AnyRows from(int64_t row) const { return {data + row * k, k, rounded.from(row)}; }

    void get(FloatRows& to) const { to = {data, k}; }
    void get(Bfloat16Rows& to) const { to = rounded.bfloat16; }
    void get(QuantizedRows& to) const { to = rounded.plain; }
    void get(PairedRows& to) const { to = {rounded.dots}; }
};

// body(rows, weights), by the format of `w`.
template <class Body>
inline void by_format(const AnyRows& in, const Linear& w, Body body) {
    auto with = [&](auto weights) {
        typename decltype(weights)::Rows x;
        in.get(x);
        body(x, weights);
    };
    switch (w.format) {
        case kFloat32: return with(Float32{reinterpret_cast<const float*>(w.data), w.k});
        case kBfloat16: return with(Bfloat16{w.data, w.k});
        case kInt8: return with(Int8{w.data, ceil_div(w.k, kBlock)});
        case kInt4: return with(Int4{w.data, w.k, w.group_size});
    }
}

// out [rows, n], by the whole team. Ends without a barrier.
inline void product(Team& team, const AnyRows& in, int64_t rows, const Linear& w, float* out, const float* residual) {
    by_format(in, w, [&](const auto& x, const auto& weights) {
        linear_packed(team, x, rows, weights, w, out, residual);
    });
}

// The same for some tiles of the outputs, by one thread.
inline void product_tiles(const AnyRows& in, int64_t rows, const Linear& w, float* out, int64_t tile,
                          int64_t tile_end) {
    by_format(in, w, [&](const auto& x, const auto& weights) {
        for (int64_t row = 0; row < rows; row += kRowsAtOnce)
            linear_tiles(x, row, std::min(rows - row, kRowsAtOnce), rows, weights, w, out, nullptr, tile, tile_end);
    });
}

}  // namespace gpt_fast
