// A product with weights of any format: product.cpp has its kernels.
#pragma once

#include "activated.h"

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
};

// out [rows, n], by the whole team. Ends without a barrier.
void product(Team& team, const AnyRows& in, int64_t rows, const Linear& w, float* out, const float* residual);

// What an activation makes of them (activated.h).
void product_activated(Team& team, const AnyRows& in, int64_t rows, const Linear& w, const Activated& to);

// Some tiles of them, by one thread.
void product_tiles(const AnyRows& in, int64_t rows, const Linear& w, float* out, int64_t tile, int64_t tile_end);

void product_activated_tiles(const AnyRows& in, int64_t rows, const Linear& w, const Activated& to, int64_t tile,
                             int64_t tile_end);

}  // namespace gpt_fast
