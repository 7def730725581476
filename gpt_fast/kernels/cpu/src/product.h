// A product with weights of any format.
#pragma once

#include "dense.h"
#include "int4.h"
#include "int8.h"

namespace gpt_fast {

// `quantized` holds the rows of `in` where the format wants integers.
inline void product(Team& team, const float* in, int64_t rows, const Linear& w, const QuantizedRows& quantized,
                    float* out, const float* residual) {
    switch (w.format) {
        case kFloat32: return linear_dense<float>(team, in, rows, w, out, residual);
        case kBfloat16: return linear_dense<uint16_t>(team, in, rows, w, out, residual);
        case kInt8: return linear_int8(team, quantized, rows, w, out, residual);
        case kInt4: return linear_int4(team, quantized, rows, w, out, residual);
    }
}

// The same for some tiles of the outputs, by one thread; `threads` share the tiles out.
inline void product_tiles(const float* in, int64_t rows, const Linear& w, const QuantizedRows& quantized, float* out,
                          int64_t tile, int64_t tile_end) {
    switch (w.format) {
        case kFloat32: return dense_tiles<float>(in, rows, w, out, tile, tile_end);
        case kBfloat16: return dense_tiles<uint16_t>(in, rows, w, out, tile, tile_end);
        case kInt8: return linear_tiles<Int8>(quantized, rows, Int8{w.data, quantized.blocks}, w, out, nullptr, tile, tile_end);
        case kInt4: return linear_tiles<Int4>(quantized, rows, Int4{w.data, w.k, w.group_size}, w, out, nullptr, tile, tile_end);
    }
}

}  // namespace gpt_fast
