// The small operations between the products: norms, rotary embeddings, embedding rows. All float32.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

// out = x * rsqrt(mean(x^2) + eps) * weight, one row, plus `add` unless that is null. out may be x or add.
inline void rms_norm(const float* x, const float* weight, int64_t dim, float eps, float* out, const float* add) {
    F8 squares = splat(0.0f);
    float rest = 0.0f;
    int64_t d = 0;
    for (; d + 8 <= dim; d += 8) squares = plus_product(squares, load8(x + d), load8(x + d));
    for (; d < dim; ++d) rest += x[d] * x[d];
    const float factor = 1.0f / __builtin_sqrtf((lane_sum(squares) + rest) / static_cast<float>(dim) + eps);
    if (add)
        for (d = 0; d < dim; ++d) out[d] = add[d] + x[d] * factor * weight[d];
    else
        for (d = 0; d < dim; ++d) out[d] = x[d] * factor * weight[d];
}

// out = (x - mean(x)) * rsqrt(variance(x) + eps) * weight + bias, one row, plus `add`. bias may be null.
inline void layer_norm(const float* x, const float* weight, const float* bias, int64_t dim, float eps, float* out,
                       const float* add) {
    double sum = 0.0, squares = 0.0;
    for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(x[d]);
    const float mean = static_cast<float>(sum / static_cast<double>(dim));
    for (int64_t d = 0; d < dim; ++d) squares += static_cast<double>((x[d] - mean) * (x[d] - mean));
    const float variance = static_cast<float>(squares / static_cast<double>(dim));
    const float factor = 1.0f / __builtin_sqrtf(variance + eps);
    for (int64_t d = 0; d < dim; ++d) {
        const float value = (x[d] - mean) * factor * weight[d] + (bias ? bias[d] : 0.0f);
        out[d] = add ? add[d] + value : value;
    }
}

// Rotates the first half of a head against the second (Hugging Face's layout); cos and sin [D / 2].
inline void rope_head(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

// Heads of `dim` columns to heads of `padded`, filled up with zeros.
inline float* pad_heads(const float* x, int64_t heads, int64_t dim, int64_t padded, float* out) {
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < padded; ++d) out[h * padded + d] = d < dim ? x[h * dim + d] : 0.0f;
    return out;
}

// The embedding table: plain rows [V, E], or the packed tiles of a head that shares it.
struct Embedding {
    const void* data;
    int64_t bfloat16;  // else float32
    int64_t packed;
};

inline void embedding_row(const Embedding& table, int64_t token, int64_t dim, float* out) {
    const auto* floats = static_cast<const float*>(table.data);
    const auto* halves = static_cast<const uint16_t*>(table.data);
    const int64_t tile = token / kTile, lane = token % kTile;
    if (!table.packed) {
        for (int64_t d = 0; d < dim; ++d)
            out[d] = table.bfloat16 ? to_float(halves[token * dim + d]) : floats[token * dim + d];
    } else if (table.bfloat16) {  // as in bfloat16.h
        const uint16_t* from = halves + tile * ceil_div(dim, kBlock) * kBlock * kTile + 2 * lane;
        for (int64_t d = 0; d < dim; ++d) out[d] = to_float(from[d / 2 * 2 * kTile + d % 2]);
    } else {  // as in float32.h
        for (int64_t d = 0; d < dim; ++d) out[d] = floats[(tile * dim + d) * kTile + lane];
    }
}

inline void add_embedding_row(const Embedding& table, int64_t row, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; ++d)
        out[d] += table.bfloat16 ? to_float(static_cast<const uint16_t*>(table.data)[row * dim + d])
                                 : static_cast<const float*>(table.data)[row * dim + d];
}

}  // namespace gpt_fast
