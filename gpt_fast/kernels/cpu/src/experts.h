// A mixture of experts: pairs of token and expert, sorted by expert; each expert's rows are one product, so that its
// weights are read once. What a token gets does not depend on the other tokens: its products are the same chains of
// additions for any number of rows, and its experts are added in the order of their weights.
#pragma once

#include <cmath>

#include "elementwise.h"
#include "product.h"
#include "ranks.h"

namespace gpt_fast {

// The top_k greatest of scores [count], equal ones in ascending order, to routes: weights [top_k], then numbers. NaN
// counts as the greatest, as in torch, so that it shows in the weights.
inline void choose_experts(const float* scores, int64_t count, int64_t top_k, int64_t renormalize, float* routes) {
    float* ids = routes + top_k;
    auto greater = [](float x, float y) { return x > y || (x != x && y == y); };
    for (int64_t j = 0; j < top_k; ++j) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; ++e) {
            bool taken = false;
            for (int64_t i = 0; i < j; ++i) taken |= ids[i] == static_cast<float>(e);
            if (!taken && (best < 0 || greater(scores[e], scores[best]))) best = e;
        }
        ids[j] = static_cast<float>(best);
        routes[j] = scores[best];
    }
    const float most = routes[0];
    float sum = 0.0f;
    if (renormalize)
        for (int64_t j = 0; j < top_k; ++j) sum += std::exp(routes[j] - most);
    else
        for (int64_t e = 0; e < count; ++e) sum += std::exp(scores[e] - most);
    for (int64_t j = 0; j < top_k; ++j) routes[j] = std::exp(routes[j] - most) / sum;
}

struct ExpertsJob {
    const Linear* up;  // one for each expert
    const Linear* down;
    int64_t dim;  // columns of the inputs
    int64_t num_experts, top_k, kind, gated;
    float scale;
    Ranks* ranks;  // null; or they share the inner width, and `down` gives bare sums

    int64_t hidden() const { return gated ? up[0].n / 2 : up[0].n; }

    int64_t rounds_x() const { return rounding_of(up[0].format); }  // how
    int64_t rounds_hidden() const { return rounding_of(down[0].format); }

    // Of the places below, for n tokens.
    int64_t num_bytes(int64_t n) const {
        const int64_t pairs = n * top_k;
        return 8 * (2 * pairs + 2 * num_experts + 2) + 4 * pairs * (std::max(dim, down[0].n) + hidden()) +
               (rounds_x() ? RoundedRows::num_bytes(pairs, dim) : 0) +
               (rounds_hidden() ? RoundedRows::num_bytes(pairs, hidden()) : 0) + 9 * 64;
    }
};

class ExpertsRun {
public:
    ExpertsRun(const ExpertsJob& job, int64_t n, uint8_t* memory) : j(job), pairs(n * job.top_k) {
        auto take = [&](int64_t bytes) {
            uint8_t* at = memory;
            memory += ceil_div(bytes, 64) * 64;
            return at;
        };
        place = reinterpret_cast<int64_t*>(take(8 * pairs));
        expert_at = reinterpret_cast<int64_t*>(take(8 * pairs));
        start = reinterpret_cast<int64_t*>(take(8 * (j.num_experts + 1)));
        active = reinterpret_cast<int64_t*>(take(8 * (j.num_experts + 1)));
        parts = reinterpret_cast<float*>(take(4 * pairs * std::max(j.dim, j.down[0].n)));
        given = parts;  // which are made when these are no longer needed
        hidden = reinterpret_cast<float*>(take(4 * pairs * j.hidden()));
        auto take_rounded = [&](int64_t k) {
            return RoundedRows::in(take(RoundedRows::num_bytes(pairs, k)), pairs, k);
        };
        if (j.rounds_x()) rounded_given = take_rounded(j.dim);
        if (j.rounds_hidden()) rounded_hidden = take_rounded(j.hidden());
    }

    // Where each pair's row stands: pairs of an expert side by side, its first at start[expert].
    void sort(const float* routes, int64_t width) {
        for (int64_t e = 0; e <= j.num_experts; ++e) start[e] = 0;
        auto expert = [&](int64_t pair) {
            return static_cast<int64_t>(routes[pair / j.top_k * width + j.top_k + pair % j.top_k]);
        };
        for (int64_t pair = 0; pair < pairs; ++pair) ++start[expert(pair) + 1];
        active[0] = 0;
        for (int64_t e = 0; e < j.num_experts; ++e) {
            if (start[e + 1]) active[++active[0]] = e;
            start[e + 1] += start[e];
        }
        for (int64_t pair = 0; pair < pairs; ++pair) {
            place[pair] = start[expert(pair)]++;
            expert_at[place[pair]] = expert(pair);
        }
        for (int64_t e = j.num_experts; e > 0; --e) start[e] = start[e - 1];
        start[0] = 0;
    }

    // body(expert, its first row, its rows, tile, end): tiles of outputs `width` wide of all active experts, by the
    // whole team.
    template <class Body>
    void share_products(Team& team, int64_t width, Body body) const {
        const int64_t tiles = ceil_div(width, kTile), step = kStreamedTiles;
        const int64_t pieces = ceil_div(tiles, step);
        // No count that stands in memory: a helper that comes late would read what later operations wrote there.
        const int64_t most = std::min(j.num_experts, pairs);
        team.share(most * pieces, 1, [&](int64_t index, int64_t) {
            if (index >= active[0] * pieces) return;
            const int64_t e = active[1 + index / pieces], tile = index % pieces * step, first = start[e];
            body(e, first, start[e + 1] - first, tile, std::min(tile + step, tiles));
        });
        team.barrier();
    }

    const ExpertsJob& j;
    int64_t pairs;
    int64_t *place, *expert_at, *start, *active;
    float *given, *hidden, *parts;
    RoundedRows rounded_given{}, rounded_hidden{};
};

// out = add + scale * weighted sum of each row's experts; x [n, dim], routes [n, 2 top_k]. Ends with a barrier.
// `round`: exchanges of ranks so far.
inline void run_experts(Team& team, const ExpertsJob& job, const float* x, const float* routes, int64_t n,
                        const float* add, float* out, uint8_t* memory, int64_t& round) {
    ExpertsRun r(job, n, memory);
    const int64_t dim = job.dim, width = job.hidden(), k = job.top_k;
    team.share(1, 1, [&](int64_t, int64_t) { r.sort(routes, 2 * k); });
    team.barrier();
    team.share(r.pairs, 1, [&](int64_t pair, int64_t) {
        const float* from = x + pair / k * dim;
        if (job.rounds_x())
            round_row(job.rounds_x(), from, dim, r.rounded_given, r.place[pair]);
        else
            std::memcpy(r.given + r.place[pair] * dim, from, static_cast<size_t>(dim) * sizeof(float));
    });
    team.barrier();
    const AnyRows given{r.given, dim, r.rounded_given}, hidden{r.hidden, width, r.rounded_hidden};
    r.share_products(team, width, [&](int64_t e, int64_t first, int64_t rows, int64_t tile, int64_t end) {
        const Activated to{
            job.kind, job.gated, width, r.hidden + first * width, job.rounds_hidden(), hidden.rounded.from(first)};
        product_activated_tiles(given.from(first), rows, job.up[e], to, tile, end);
    });
    r.share_products(team, job.down[0].n, [&](int64_t e, int64_t first, int64_t rows, int64_t tile, int64_t end) {
        product_tiles(hidden.from(first), rows, job.down[e], r.parts + first * job.down[e].n, tile, end);
    });
    const int64_t outputs = job.down[0].n;
    if (job.ranks)
        sum_of_ranks(team, *job.ranks, round, r.parts, r.pairs * outputs, r.parts, [&](int64_t i, float sum) {
            return finished(sum, job.down[r.expert_at[i / outputs]], i % outputs, 0.0f);
        });
    team.share(n, 1, [&](int64_t i, int64_t) {
        for (int64_t d = 0; d < outputs; ++d) {
            float sum = 0.0f;
            for (int64_t e = 0; e < k; ++e) sum += routes[i * 2 * k + e] * r.parts[r.place[i * k + e] * outputs + d];
            out[i * outputs + d] = (add ? add[i * outputs + d] : 0.0f) + job.scale * sum;
        }
    });
    team.barrier();
}

}  // namespace gpt_fast
