// The small operations between the products: norms, rotary embeddings, activation, embedding rows. All float32.
#pragma once

#include "common.h"
#include "linear.h"

namespace gpt_fast {

// out = x * rsqrt(mean(x^2) + eps) * weight, one row. out may be x.
inline void rms_norm(const float* x, const float* weight, int64_t dim, float eps, float* out) {
    F8 squares = splat(0.0f);
    float rest = 0.0f;
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) squares = plus_product(squares, load8(x + d), load8(x + d));
    for (; d < dim; ++d) rest += x[d] * x[d];
    const float factor = 1.0f / __builtin_sqrtf((lane_sum(squares) + rest) / static_cast<float>(dim) + eps);
    for (d = 0; d < dim; ++d) out[d] = x[d] * factor * weight[d];
}

// Rotates the first half of a head against the second (Hugging Face's layout); cos and sin [D / 2].
inline void rope_head(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

// out = silu(gate) * up, silu(g) = g / (1 + e^-g).
inline void silu_mul(const float* gate, const float* up, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 8) {
        alignas(32) float g[8] = {}, u[8] = {};
        const int64_t n = count - i < 8 ? count - i : 8;
        if (n < 8) {
            std::memcpy(g, gate + i, static_cast<size_t>(n) * sizeof(float));
            std::memcpy(u, up + i, static_cast<size_t>(n) * sizeof(float));
        }
        const F8 gv = n < 8 ? load8(g) : load8(gate + i), uv = n < 8 ? load8(u) : load8(up + i);
        const F8 result = gv / (splat(1.0f) + exp8(negative(gv))) * uv;
        if (n < 8) {
            store8(g, result);
            std::memcpy(out + i, g, static_cast<size_t>(n) * sizeof(float));
        } else {
            store8(out + i, result);
        }
    }
}

// The embedding table: plain rows [V, E], or the packed tiles of a head that shares it.
struct Embedding {
    const void* data;
    int64_t bfloat16;  // else float32
    int64_t packed;
};

inline void embedding_row(const Embedding& table, int64_t token, int64_t dim, float* out) {
    // Packed (dense.h): element j of a tile's 16 for one k; bfloat16 stands in pairs of j and j + 8.
    const int64_t lane = token % 16, paired = lane % 8 * 2 + lane / 8;
    const int64_t step = table.packed ? 16 : 1;
    const int64_t begin = table.packed ? token / 16 * 16 * dim + (table.bfloat16 ? paired : lane) : token * dim;
    for (int64_t d = 0; d < dim; ++d)
        out[d] = table.bfloat16 ? to_float(static_cast<const uint16_t*>(table.data)[begin + d * step])
                                : static_cast<const float*>(table.data)[begin + d * step];
}

}  // namespace gpt_fast
