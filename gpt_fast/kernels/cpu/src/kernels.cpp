// The functions that Python calls (through ctypes): plain C signatures around the kernels of the headers here.
#include "decoder.h"
#include "pack.h"

using namespace gpt_fast;

namespace {

constexpr int64_t kPhases = 4;  // calls of share() in any single operation

// Memory of the calling thread that its team works in.
Scratch& shared_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

template <class Cached>
void attention_op(const float* q, const float* k, const float* v, Paged<Cached> p, int64_t tokens, int64_t longest,
                  const int64_t* write_slots, int threads) {
    const int64_t row = p.heads * p.head_dim, kv_dim = p.kv_heads * p.head_dim;
    float* shared =
        shared_scratch().get<float>(attention_scratch(threads, p.slots, longest, p.heads, p.kv_heads, p.head_dim));
    p.q = q;
    p.q_stride = row;
    p.scale = 1.0f / __builtin_sqrtf(static_cast<float>(p.head_dim));
    run_team(threads, kPhases, [&](Team& team) {
        team.share(tokens, 8, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                write_row(k + i * kv_dim, p.kv_heads, p.head_dim, write_slots[i], const_cast<Cached*>(p.k_cache),
                          const_cast<float*>(p.k_scale));
                write_row(v + i * kv_dim, p.kv_heads, p.head_dim, write_slots[i], const_cast<Cached*>(p.v_cache),
                          const_cast<float*>(p.v_scale));
                // Rows that only pad the step belong to nobody.
                if (i >= p.query_start[p.slots])
                    std::memset(p.out + i * row, 0, static_cast<size_t>(row) * sizeof(float));
            }
        });
        team.barrier();
        paged_attention(team, p, shared);
    });
}

}  // namespace

extern "C" {

// x [rows, k] -> out [rows, n].
void gpt_fast_linear(int64_t format, const float* x, int64_t rows, int64_t k, int64_t n, int64_t group_size,
                     const uint8_t* data, const float* scale, const float* bias, float* out, int threads) {
    const Linear layer{format, n, k, group_size, n, data, scale, bias};
    QuantizedRows q{};
    if (format >= kInt8)
        q = QuantizedRows::in(shared_scratch().get<uint8_t>(QuantizedRows::num_bytes(rows, k)), rows, k);
    run_team(threads, kPhases, [&](Team& team) {
        if (format >= kInt8) quantize_rows(team, x, rows, k, q);
        product(team, x, rows, layer, q, out, nullptr);
    });
}

// attention.py's paged_attention, all tensors contiguous, head_dim a multiple of 8.
void gpt_fast_paged_attention(const float* q, const float* k, const float* v, void* k_cache, void* v_cache,
                              const float* k_scale, const float* v_scale, const int32_t* query_start,
                              const int32_t* context_len, const int32_t* page_table, const int64_t* write_slots,
                              float* out, int64_t tokens, int64_t slots, int64_t pages_per_slot, int64_t page_size,
                              int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, int64_t cache_format,
                              int threads) {
    int64_t longest = 0;
    for (int64_t i = 0; i < slots; ++i) longest = context_len[i] > longest ? context_len[i] : longest;
    auto run = [&](auto* kc, auto* vc) {
        using Cached = std::remove_pointer_t<decltype(kc)>;
        attention_op<Cached>(q, k, v,
                             {nullptr, 0, out, kc, vc, k_scale, v_scale, query_start, context_len, page_table, slots,
                              pages_per_slot, page_size, heads, kv_heads, head_dim, window, 0.0f},
                             tokens, longest, write_slots, threads);
    };
    switch (cache_format) {
        case kBfloat16: return run(static_cast<uint16_t*>(k_cache), static_cast<uint16_t*>(v_cache));
        case kInt8: return run(static_cast<int8_t*>(k_cache), static_cast<int8_t*>(v_cache));
        default: return run(static_cast<float*>(k_cache), static_cast<float*>(v_cache));
    }
}

void gpt_fast_rms_norm(const float* x, const float* weight, int64_t rows, int64_t dim, double eps, float* out,
                       int threads) {
    run_team(threads, kPhases, [&](Team& team) {
        team.share(rows, 1, [&](int64_t i, int64_t) {
            rms_norm(x + i * dim, weight, dim, static_cast<float>(eps), out + i * dim);
        });
    });
}

// x [rows, 2 * width], gate and up side by side -> out [rows, width].
void gpt_fast_silu_mul(const float* x, int64_t rows, int64_t width, float* out, int threads) {
    run_team(threads, kPhases, [&](Team& team) {
        team.share(rows, 1, [&](int64_t i, int64_t) {
            silu_mul(x + i * 2 * width, x + i * 2 * width + width, width, out + i * width);
        });
    });
}

// Rows of weights into tiles: pack.h.
void gpt_fast_pack(int64_t format, const uint8_t* from, uint8_t* to, int64_t rows, int64_t units, int64_t group,
                   int64_t header, int threads) {
    const Packing p{from, to, rows, units, group, header};
    run_team(threads, kPhases, [&](Team& team) {
        if (format == kFloat32)
            pack_tiles<uint32_t, 16>(team, p, [](int j) { return j; });
        else if (format == kBfloat16)
            pack_tiles<uint16_t, 16>(team, p, [](int j) { return j % 8 * 2 + j / 8; });
        else
            pack_tiles<uint32_t, 8>(team, p, [](int j) { return j; });
    });
}

// One step of a whole model (decoder.h).
void gpt_fast_decoder_step(const Model* model, Step* step, int threads) {
    step->longest = 0;
    for (int64_t i = 0; i < step->slots; ++i)
        step->longest = step->context_len[i] > step->longest ? step->context_len[i] : step->longest;
    const Decoder sizes(*model, *step, threads, nullptr);
    uint8_t* memory = shared_scratch().get<uint8_t>(sizes.num_bytes());
    run_team(threads, Decoder::phases(*model), [&](Team& team) { Decoder(*model, *step, threads, memory).run(team); });
}

// Reads all of [data, data + num_bytes), a multiple of 128 kB, and nothing else: what memory allows (roofline.py).
// Eight places at once, because the hardware fetches ahead for each; one after the other is a fifth slower.
int64_t gpt_fast_read(const uint8_t* data, int64_t num_bytes, int threads) {
    std::atomic<int64_t> found{0};
    run_team(threads, kPhases, [&](Team& team) {
        I8 seen = splat(0);
        constexpr int64_t piece = 1 << 14;
        team.share(num_bytes, 8 * piece, [&](int64_t begin, int64_t) {
            for (int64_t i = 0; i < piece; i += 32)
                for (int64_t j = 0; j < 8; ++j) seen = seen | load32(data + begin + j * piece + i);
        });
        found |= any(seen);  // so that the compiler cannot leave the reading out
    });
    return found;
}

// Sizes of the structs that Python builds, so that a mismatch is an error at load.
int64_t gpt_fast_struct_bytes(int64_t which) {
    const int64_t sizes[] = {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Step)};
    return sizes[which];
}

}  // extern "C"
