// A step of a model: a short program over buffers, in one parallel region: no allocation, no dispatch, no thread asleep
// between two operations. translation.py builds it from the model's description (model/description.py says what each
// operation means); the mathematics is that of model/transformer.py.
//
// A buffer holds one row of float32 for each token. Products may take their rows rounded (rounding_of), from one of two
// places that all of them share; `rounding` says which operation fills it. What activations make stands in the second,
// so that a product can go on with its activation while other threads still read its rows.
#pragma once

#include <algorithm>

#include "attention.h"
#include "experts.h"
#include "glue.h"
#include "product.h"
#include "ranks.h"

namespace gpt_fast {

enum OpCode : int64_t {
    kEmbed,
    kAddPositions,
    kNorm,
    kProduct,
    kHeads,
    kAttention,
    kActivation,
    kRoute,
    kExperts,
    kGate,
    kCap,
    kRows
};

// Built by Python, which reads here what fields this struct and those around it have (structs.py): int64_t, double, a
// struct or pointers, whole lines, 8 bytes each. Numbers have the names that model/description.py gives them. What an
// operation does not name is zero.
struct Op {
    int64_t code;
    int64_t x, out, add;  // buffers; add: -1 for none
    int64_t width;        // columns of x that count: of a norm, a gated activation's inner width, inputs of a product
    int64_t rounding;     // how to round the rows that this makes, too (norm, activation), or first those it takes (product)
    int64_t kind;         // norm: 0 rms, 1 layer; activation: Activation
    int64_t gated;
    const float* weight;  // norms
    const float* bias;
    double eps, scale, cap;
    const Linear* pieces;  // product: their outputs stand side by side
    int64_t num_pieces;
    int64_t place;      // of the rounded rows that this takes (product) or makes: 0 or 1
    int64_t activated;  // of a product: only the next operation reads its outputs, an activation
    // With ranks: of a product 1 where outputs are sums over all ranks, 2 where each rank has some of the outputs; of an
    // embedding 1 where each rank has some of the rows. The own part is made in the buffer `part`.
    int64_t shared, part;
    // Of an embedding: the rows here. Where ranks share it, those before `own_row` count as another rank's.
    int64_t num_rows, first_row, own_row;
    Embedding table;
    int64_t position_offset;
    int64_t num_heads, num_kv_heads, head_dim, padded_dim, rotary, rope, window;
    int64_t norm_rows;  // the norm of queries and keys: 0 of each head, 1 of all heads together
    const float* q_norm;
    const float* k_norm;
    const float* slopes;
    const float* sinks;
    void* k_cache;  // [pages, page_size, K, padded_dim]
    void* v_cache;
    float* k_scale;  // for a cache of int8
    float* v_scale;
    int64_t top_k, renormalize, num_experts;
    const Linear* up;  // one for each expert
    const Linear* down;
    int64_t routes;  // buffer
};

struct Program {
    const Op* ops;
    int64_t num_ops;
    const int64_t* widths;  // columns of each buffer
    const int64_t* slots;   // the memory that each buffer has; buffers that are not in use together share one
    int64_t num_buffers;
    const int64_t* slot_widths;
    int64_t num_slots;
    int64_t widest, widest_activated;  // columns of the rows that are rounded, in each place
    int64_t input, output;   // buffers that come from outside and go there; input: -1 for none
    int64_t cache_format;    // kFloat32, kBfloat16 or kInt8
    int64_t page_size;
    Ranks* ranks;  // null: this process has the whole model
};

struct Step {
    const int64_t* tokens;     // [N]
    const int64_t* positions;  // [N]
    int64_t num_tokens;
    const float* const* angles;  // for each rope cosines and sines, [rows, rotary / 2] each
    const int64_t* turns;        // [N] the row of angles of each token; null: i for token i
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* page_table;
    const int64_t* write_slots;
    int64_t slots, pages_per_slot, longest;  // longest context of the step
    const int64_t* rows;                     // [R] tokens whose logits are wanted
    int64_t num_rows;
    float* input;   // [N, width of the input buffer] or null
    float* output;  // [N or R, width of the output buffer]
};

constexpr int64_t kPiece = 1024;  // columns of one row that a thread takes of elementwise work; whole blocks

class Run {
public:
    Run(const Program& program, const Step& step, int threads, uint8_t* memory) : p(program), s(step) {
        if (p.ranks) round = p.ranks->round;
        const int64_t n = std::max(s.num_tokens, s.num_rows);
        int64_t scratch = 0;
        auto take = [&](int64_t bytes) {
            uint8_t* at = memory ? memory + used : nullptr;
            used += ceil_div(bytes, 64) * 64;
            return at;
        };
        float* places[kMaxBuffers];
        for (int64_t i = 0; i < p.num_slots; ++i) places[i] = reinterpret_cast<float*>(take(n * p.slot_widths[i] * 4));
        for (int64_t b = 0; b < p.num_buffers; ++b)
            buffers[b] = b == p.input ? s.input : b == p.output ? s.output : places[p.slots[b]];
        for (int64_t i = 0; i < p.num_ops; ++i) {
            const Op& op = p.ops[i];
            if (op.code == kAttention)
                scratch = std::max(scratch, 4 * attention_scratch(threads, s.slots, s.longest, op.num_heads,
                                                                  op.num_kv_heads, op.padded_dim));
            if (op.code == kExperts) scratch = std::max(scratch, experts_of(op).num_bytes(n));
        }
        shared = take(scratch);
        rounded_memory[0] = take(RoundedRows::num_bytes(n, p.widest));
        rounded_memory[1] = take(RoundedRows::num_bytes(n, p.widest_activated));
    }

    static constexpr int64_t kMaxBuffers = 64;

    int64_t num_bytes() const { return used; }

    // Calls of share(), at most. Each has counters that are cleared for every step, so they are not counted generously.
    int64_t phases() const {
        int64_t count = 0;
        for (int64_t i = 0; i < p.num_ops; ++i) {
            const Op& op = p.ops[i];
            count += op.code == kProduct ? 1 + op.num_pieces : op.code == kAttention ? 3 : op.code == kExperts ? 5 : 1;
            if (!op.shared) continue;
            const int64_t width = op.code == kExperts ? op.top_k * op.down[0].n : p.widths[op.part];
            count += 3 * num_exchanges(*p.ranks, std::max(s.num_tokens, s.num_rows) * width);
        }
        return count;
    }

    // Returns the exchanges with other ranks so far, of this step and all before it.
    int64_t run(Team& team) {
        n = s.num_tokens;
        for (int64_t i = 0; i < p.num_ops; ++i) {
            const Op& op = p.ops[i];
            switch (op.code) {
                case kEmbed: embed(team, op); break;
                case kAddPositions: add_positions(team, op); break;
                case kNorm: norm(team, op); break;
                case kProduct:
                    if (op.activated && activates(n, p.ops[i + 1].width, team.size))
                        run_activated(team, op, p.ops[++i]);
                    else
                        run_product(team, op);
                    break;
                case kHeads: by_cache([&](auto* cached) { heads(team, op, cached); }); break;
                case kAttention: by_cache([&](auto* cached) { attend(team, op, cached); }); break;
                case kActivation: activation(team, op); break;
                case kRoute: route(team, op); break;
                case kExperts: experts(team, op); break;
                case kGate: gate(team, op); break;
                case kCap: cap(team, op); break;
                case kRows: rows(team, op); break;
            }
        }
        return round;
    }

private:
    RoundedRows rounded_rows(const Op& op) const { return RoundedRows::in(rounded_memory[op.place], n, op.width); }

    float* row(int64_t buffer, int64_t i) const { return buffers[buffer] + i * p.widths[buffer]; }

    template <class Body>
    void by_cache(Body body) const {
        switch (p.cache_format) {
            case kBfloat16: return body(static_cast<uint16_t*>(nullptr));
            case kInt8: return body(static_cast<int8_t*>(nullptr));
            default: return body(static_cast<float*>(nullptr));
        }
    }

    void embed(Team& team, const Op& op) {
        team.share(n, 1, [&](int64_t i, int64_t) {
            float* out = row(op.out, i);
            const int64_t token = s.tokens[i] - op.first_row;
            if (s.tokens[i] >= op.own_row && token < op.num_rows)
                embedding_row(op.table, token, op.width, out);
            else
                std::memset(out, 0, static_cast<size_t>(op.width) * sizeof(float));
            if (op.scale != 1.0)
                for (int64_t d = 0; d < op.width; ++d) out[d] *= static_cast<float>(op.scale);
        });
        team.barrier();
        if (op.shared)
            sum_of_ranks(team, *p.ranks, round, buffers[op.out], n * op.width, buffers[op.out],
                         [](int64_t, float sum) { return sum; });
    }

    void add_positions(Team& team, const Op& op) const {
        team.share(n, 1, [&](int64_t i, int64_t) {
            float* out = row(op.x, i);
            add_embedding_row(op.table, s.positions[i] + op.position_offset, op.width, out);
        });
        team.barrier();
    }

    void norm(Team& team, const Op& op) const {
        const RoundedRows rounded = rounded_rows(op);
        team.share(n, 1, [&](int64_t i, int64_t) {
            float* out = row(op.out, i);
            const float* add = op.add >= 0 ? row(op.add, i) : nullptr;
            const float eps = static_cast<float>(op.eps);
            if (op.kind == 0)
                rms_norm(row(op.x, i), op.weight, op.width, eps, out, add);
            else
                layer_norm(row(op.x, i), op.weight, op.bias, op.width, eps, out, add);
            round_row(op.rounding, out, op.width, rounded, i);
        });
        team.barrier();
    }

    // The rows that a product takes.
    AnyRows rows_of(Team& team, const Op& op) const {
        const RoundedRows rounded = rounded_rows(op);
        if (op.rounding) round_rows(team, op.rounding, buffers[op.x], n, op.width, rounded);
        return {buffers[op.x], op.width, rounded};
    }

    void run_product(Team& team, const Op& op) {
        const AnyRows x = rows_of(team, op);
        float* out = buffers[op.shared ? op.part : op.out];
        const float* add = op.add >= 0 ? buffers[op.add] : nullptr;
        int64_t column = 0;
        for (int64_t i = 0; i < op.num_pieces; ++i) {
            product(team, x, n, op.pieces[i], out + column, add && !op.shared ? add + column : nullptr);
            team.barrier();
            column += op.pieces[i].n;
        }
        if (op.shared == 2) rows_of_ranks(team, *p.ranks, round, out, n, p.widths[op.part], buffers[op.out], p.widths[op.out]);
        if (op.shared != 1) return;
        const Linear& w = op.pieces[0];
        sum_of_ranks(team, *p.ranks, round, out, n * w.n, buffers[op.out], [&](int64_t i, float sum) {
            return finished(sum, w, i % w.n, add ? add[i] : 0.0f);
        });
    }

    void run_activated(Team& team, const Op& op, const Op& then) {
        const Activated to{then.kind, then.gated, then.width, buffers[then.out], then.rounding, rounded_rows(then)};
        product_activated(team, rows_of(team, op), n, op.pieces[0], to);
        team.barrier();
    }

    // Queries and keys normed and rotated in place, keys and values to the cache. Heads whose size is no multiple of 8
    // are filled up with zeros, into `out`. In the cache tokens share lines, and threads that write to one line
    // wait for each other: each takes some tokens together, or of few tokens a key-value head with its queries.
    template <class Cached>
    void heads(Team& team, const Op& op, Cached*) const {
        const int64_t d = op.head_dim, padded = op.padded_dim, keys = op.num_heads * padded, all_kv = op.num_kv_heads;
        auto* k_cache = static_cast<Cached*>(op.k_cache);
        auto* v_cache = static_cast<Cached*>(op.v_cache);
        const bool whole = n >= 2 * kTogether * team.size || (op.q_norm && op.norm_rows) || padded != d;
        const int64_t parts = whole ? 1 : all_kv, kv = all_kv / parts, queries = op.num_heads / parts;
        const int64_t tokens = std::clamp<int64_t>(ceil_div(n * parts, 2 * team.size), 1, kTogether);
        team.share(ceil_div(n, tokens) * parts, 1, [&](int64_t index, int64_t) {
            const int64_t part = index % parts, first = index / parts * tokens;
            for (int64_t i = first; i < std::min(first + tokens, n); ++i) {
                float* x = row(op.x, i);
                if (op.q_norm && op.norm_rows) {
                    const float eps = static_cast<float>(op.eps);
                    rms_norm(x, op.q_norm, op.num_heads * d, eps, x, nullptr);
                    rms_norm(x + op.num_heads * d, op.k_norm, all_kv * d, eps, x + op.num_heads * d, nullptr);
                }
                turn(op, x + part * queries * d, queries, op.q_norm, i);
                turn(op, x + (op.num_heads + part * kv) * d, kv, op.k_norm, i);
                if (padded != d) x = pad_heads(x, op.num_heads + 2 * all_kv, d, padded, row(op.out, i));
                write_token(x + keys, x + keys + all_kv * padded, part * kv, kv, all_kv, padded, s.write_slots[i],
                            k_cache, v_cache, op.k_scale, op.v_scale);
            }
        });
        team.barrier();
    }

    // `count` heads of token i at `x`: each normed, unless all heads of a row are together, and rotated.
    void turn(const Op& op, float* x, int64_t count, const float* norm, int64_t i) const {
        const int64_t d = op.head_dim, half = op.rotary / 2, at = (s.turns ? s.turns[i] : i) * half;
        for (int64_t head = 0; head < count; ++head, x += d) {
            if (norm && !op.norm_rows) rms_norm(x, norm, d, static_cast<float>(op.eps), x, nullptr);
            if (half) rope_head(x, s.angles[2 * op.rope] + at, s.angles[2 * op.rope + 1] + at, half);
        }
    }

    template <class Cached>
    void attend(Team& team, const Op& op, Cached*) const {
        const int64_t past = s.query_start[s.slots];  // tokens from here on only pad the step and belong to nobody
        if (past < n) {
            const int64_t width = op.num_heads * op.head_dim;
            team.share(n - past, 1, [&](int64_t i, int64_t) {
                std::memset(row(op.out, past + i), 0, static_cast<size_t>(width) * sizeof(float));
            });
            team.barrier();
        }
        const Paged<Cached> paged{buffers[op.x],
                                  p.widths[op.x],
                                  buffers[op.out],
                                  static_cast<Cached*>(op.k_cache),
                                  static_cast<Cached*>(op.v_cache),
                                  op.k_scale,
                                  op.v_scale,
                                  s.query_start,
                                  s.context_len,
                                  s.page_table,
                                  s.slots,
                                  s.pages_per_slot,
                                  p.page_size,
                                  op.num_heads,
                                  op.num_kv_heads,
                                  op.padded_dim,
                                  op.head_dim,
                                  op.window,
                                  static_cast<float>(op.scale),
                                  static_cast<float>(op.cap),
                                  op.slopes,
                                  op.sinks};
        paged_attention(team, paged, reinterpret_cast<float*>(shared));
        team.barrier();
    }

    void activation(Team& team, const Op& op) const {
        const int64_t f = op.width, pieces = ceil_div(f, kPiece);
        const RoundedRows rounded = rounded_rows(op);
        team.share(n * pieces, 1, [&](int64_t index, int64_t) {
            const int64_t i = index / pieces, begin = index % pieces * kPiece;
            const int64_t count = f - begin < kPiece ? f - begin : kPiece;
            const float* x = row(op.x, i) + begin;
            float* out = row(op.out, i);
            activate(op.kind, x, op.gated ? x + f : nullptr, count, out + begin);
            round_part(op.rounding, out + begin, begin, begin + count, f, rounded, i);
        });
        team.barrier();
    }

    void route(Team& team, const Op& op) const {
        team.share(n, 1, [&](int64_t i, int64_t) {
            choose_experts(row(op.x, i), op.num_experts, op.top_k, op.renormalize, row(op.out, i));
        });
        team.barrier();
    }

    ExpertsJob experts_of(const Op& op) const {
        return {op.up, op.down, op.width, op.num_experts, op.top_k, op.kind, op.gated, static_cast<float>(op.scale),
                op.shared ? p.ranks : nullptr};
    }

    void experts(Team& team, const Op& op) {
        run_experts(team, experts_of(op), buffers[op.x], buffers[op.routes], n, op.add >= 0 ? buffers[op.add] : nullptr,
                    buffers[op.out], shared, round);
    }

    void gate(Team& team, const Op& op) const {
        team.share(n, 1, [&](int64_t i, int64_t) {
            const float by = 1.0f / (1.0f + exp_one(-row(op.routes, i)[0]));
            const float *x = row(op.x, i), *add = row(op.add, i);
            float* out = row(op.out, i);
            for (int64_t d = 0; d < op.width; ++d) out[d] = add[d] + by * x[d];
        });
        team.barrier();
    }

    void cap(Team& team, const Op& op) const {
        const float limit = static_cast<float>(op.cap), inverse = 1.0f / limit;
        const int64_t pieces = ceil_div(op.width, kPiece);
        team.share(n * pieces, 1, [&](int64_t index, int64_t) {
            const int64_t i = index / pieces, begin = index % pieces * kPiece;
            const int64_t count = op.width - begin < kPiece ? op.width - begin : kPiece;
            cap_row(row(op.x, i) + begin, limit, inverse, count, row(op.out, i) + begin);
        });
        team.barrier();
    }

    // From here on only the wanted tokens: their rows of x, side by side in out.
    void rows(Team& team, const Op& op) {
        team.share(s.num_rows, 1, [&](int64_t i, int64_t) {
            std::memcpy(row(op.out, i), row(op.x, s.rows[i]), static_cast<size_t>(op.width) * sizeof(float));
        });
        team.barrier();
        n = s.num_rows;
    }

    const Program& p;
    const Step& s;
    int64_t used = 0, n = 0;  // bytes; rows that are computed
    int64_t round = 0;        // exchanges with other ranks so far
    float* buffers[kMaxBuffers];
    uint8_t *shared, *rounded_memory[2];
};

}  // namespace gpt_fast
