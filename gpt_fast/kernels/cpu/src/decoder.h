// A whole step of a Llama-like decoder in one parallel region: no allocation, no dispatch, no thread asleep between two
// operations. The mathematics is model.py's Transformer.step; every product and the attention are the same functions
// that the single operations call, so the results are the same bits.
#pragma once

#include <algorithm>

#include "attention.h"
#include "dense.h"
#include "glue.h"
#include "int4.h"
#include "int8.h"

namespace gpt_fast {

// The structs below are built by Python (cpu.py, class Decoder): 8 bytes a field, in this order.
struct Layer {
    Linear wqkv, wkv, wo, w13, w2;  // wkv: n is 0 unless keys and values are apart
    const float* attention_norm;
    const float* ffn_norm;
    const float* q_norm;  // [D] or null
    const float* k_norm;
    void* k_cache;
    void* v_cache;
    float* k_scale;  // for a cache of int8
    float* v_scale;
    int64_t window;
};

struct Model {
    const Layer* layers;
    int64_t num_layers, dim, ffn_dim, heads, kv_heads, head_dim;
    double eps;
    const float* norm;
    Linear output;
    Embedding embedding;
    int64_t cache_format;  // kFloat32, kBfloat16 or kInt8
    int64_t page_size;
};

struct Step {
    const int64_t* tokens;  // [N]
    int64_t num_tokens;
    const float* cos;  // [N, D / 2]
    const float* sin;
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    const int64_t* write_slots;
    int64_t slots, pages_per_slot, longest;  // longest context of the step
    const int64_t* rows;                     // [R] tokens whose logits are wanted
    int64_t num_rows;
    float* logits;  // [R, V]
};

constexpr int64_t kPiece = 1024;  // columns of one row that a thread takes of elementwise work; whole blocks

// Weights of any format; `quantized` holds the rows of `in` where the format wants integers.
inline void product(Team& team, const float* in, int64_t rows, const Linear& w, const QuantizedRows& quantized,
                    float* out, const float* residual) {
    switch (w.format) {
        case kFloat32: return linear_dense<float>(team, in, rows, w, out, residual);
        case kBfloat16: return linear_dense<uint16_t>(team, in, rows, w, out, residual);
        case kInt8: return linear_int8(team, quantized, rows, w, out, residual);
        case kInt4: return linear_int4(team, quantized, rows, w, out, residual);
    }
}

class Decoder {
public:
    Decoder(const Model& model, const Step& step, int threads, uint8_t* memory) : m(model), s(step) {
        const int64_t n = s.num_tokens, q_dim = m.heads * m.head_dim;
        const int64_t widest = std::max({m.dim, m.ffn_dim, q_dim});
        width = q_dim + 2 * m.kv_heads * m.head_dim;
        auto take = [&](int64_t bytes) {
            uint8_t* at = memory ? memory + used : nullptr;
            used += ceil_div(bytes, 64) * 64;
            return at;
        };
        auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
        x = floats(n * m.dim);
        h = floats(n * widest);
        qkv = floats(n * width);
        gate_up = floats(n * 2 * m.ffn_dim);
        attention = floats(attention_scratch(threads, s.slots, s.longest, m.heads, m.kv_heads, m.head_dim));
        q_memory = take(QuantizedRows::num_bytes(n, widest));
    }

    int64_t num_bytes() const { return used; }

    // Calls of share() in run(), at most: twelve a layer, three in the head, the embedding.
    static int64_t phases(const Model& model) { return 12 * model.num_layers + 4; }

    void run(Team& team) {
        team.share(s.num_tokens, 1,
                   [&](int64_t i, int64_t) { embedding_row(m.embedding, s.tokens[i], m.dim, x + i * m.dim); });
        team.barrier();
        for (int64_t l = 0; l < m.num_layers; ++l) {
            const Layer& layer = m.layers[l];
            normed_product(team, layer.attention_norm, layer.wqkv, layer.wkv, qkv);
            switch (m.cache_format) {
                case kBfloat16: attend<uint16_t>(team, layer); break;
                case kInt8: attend<int8_t>(team, layer); break;
                default: attend<float>(team, layer);
            }
            plain_product(team, m.heads * m.head_dim, layer.wo);
            normed_product(team, layer.ffn_norm, layer.w13, Linear{}, gate_up);
            gated_product(team, layer.w2);
        }
        head(team);
    }

private:
    // out = w(norm(x)), and beside it in each row, where there is one, more(norm(x))
    void normed_product(Team& team, const float* norm, const Linear& w, const Linear& more, float* out) {
        const QuantizedRows q = QuantizedRows::in(q_memory, s.num_tokens, m.dim);
        team.share(s.num_tokens, 1, [&](int64_t i, int64_t) {
            rms_norm(x + i * m.dim, norm, m.dim, static_cast<float>(m.eps), h + i * m.dim);
            if (w.format >= kInt8 || more.format >= kInt8) quantize_row(h + i * m.dim, m.dim, q, i);
        });
        team.barrier();
        product(team, h, s.num_tokens, w, q, out, nullptr);
        team.barrier();
        if (more.n == 0) return;
        product(team, h, s.num_tokens, more, q, out + w.n, nullptr);
        team.barrier();
    }

    // x = x + w(h)
    void plain_product(Team& team, int64_t k, const Linear& w) {
        const QuantizedRows q = QuantizedRows::in(q_memory, s.num_tokens, k);
        if (w.format >= kInt8) quantize_rows(team, h, s.num_tokens, k, q);
        product(team, h, s.num_tokens, w, q, x, x);
        team.barrier();
    }

    // x = x + w(silu(gate) * up)
    void gated_product(Team& team, const Linear& w) {
        const int64_t f = m.ffn_dim, pieces = ceil_div(f, kPiece);
        const QuantizedRows q = QuantizedRows::in(q_memory, s.num_tokens, f);
        team.share(s.num_tokens * pieces, 1, [&](int64_t index, int64_t) {
            const int64_t i = index / pieces, begin = index % pieces * kPiece;
            const int64_t count = f - begin < kPiece ? f - begin : kPiece;
            const float* gate = gate_up + i * 2 * f + begin;
            silu_mul(gate, gate + f, count, h + i * f + begin);
            if (w.format >= kInt8) quantize_part(h + i * f, begin, begin + count, f, q, i);
        });
        team.barrier();
        product(team, h, s.num_tokens, w, q, x, x);
        team.barrier();
    }

    // h = attention of qkv, heads side by side
    template <class Cached>
    void attend(Team& team, const Layer& layer) {
        const int64_t d = m.head_dim, q_dim = m.heads * d;
        auto* k_cache = static_cast<Cached*>(layer.k_cache);
        auto* v_cache = static_cast<Cached*>(layer.v_cache);
        team.share(s.num_tokens, 1, [&](int64_t i, int64_t) {
            float* row = qkv + i * width;
            for (int64_t head = 0; head < m.heads + m.kv_heads; ++head) {
                const float* norm = head < m.heads ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(row + head * d, norm, d, static_cast<float>(m.eps), row + head * d);
                rope_head(row + head * d, s.cos + i * (d / 2), s.sin + i * (d / 2), d / 2);
            }
            write_row(row + q_dim, m.kv_heads, d, s.write_slots[i], k_cache, layer.k_scale);
            write_row(row + q_dim + m.kv_heads * d, m.kv_heads, d, s.write_slots[i], v_cache, layer.v_scale);
            if (i >= s.query_start[s.slots]) std::memset(h + i * q_dim, 0, static_cast<size_t>(q_dim) * sizeof(float));
        });
        team.barrier();
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(d));
        const Paged<Cached> p{qkv,
                              width,
                              h,
                              k_cache,
                              v_cache,
                              layer.k_scale,
                              layer.v_scale,
                              s.query_start,
                              s.context_len,
                              s.page_table,
                              s.slots,
                              s.pages_per_slot,
                              m.page_size,
                              m.heads,
                              m.kv_heads,
                              d,
                              layer.window,
                              scale};
        paged_attention(team, p, attention);
        team.barrier();
    }

    // logits of the wanted rows
    void head(Team& team) {
        const QuantizedRows q = QuantizedRows::in(q_memory, s.num_rows, m.dim);
        team.share(s.num_rows, 1, [&](int64_t i, int64_t) {
            rms_norm(x + s.rows[i] * m.dim, m.norm, m.dim, static_cast<float>(m.eps), h + i * m.dim);
            if (m.output.format >= kInt8) quantize_row(h + i * m.dim, m.dim, q, i);
        });
        team.barrier();
        product(team, h, s.num_rows, m.output, q, s.logits, nullptr);
    }

    const Model& m;
    const Step& s;
    int64_t used = 0, width;
    float *x, *h, *qkv, *gate_up, *attention;
    uint8_t* q_memory;
};

}  // namespace gpt_fast
