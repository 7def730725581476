// Several steps of a program one after the other, each of the tokens that the one before has drawn: drafts in one call.
#pragma once

#include <numeric>
#include <vector>

#include "draw.h"
#include "program.h"

namespace gpt_fast {

// What follows a step with R wanted rows. Positions, write slots and angles of the step's arrays go on behind its own
// tokens with those of the later steps: step by step the rows that are still drawn for, in order.
struct Chain {
    const Draw* draws;         // [num_steps, R]
    const int64_t* counts;     // [R] tokens to draw for each row, at most num_steps
    const int64_t* row_slots;  // [R] the slot of each row, rising
    const int64_t* halves;     // columns of the angles of each rope table
    int64_t num_ropes, num_steps, vocab;
    int64_t* tokens;  // [num_steps, R] what was drawn; -1: nothing could be
};

template <class RunStep>
void run_chain(Step step, const Chain& chain, int threads, RunStep run_step) {
    const int64_t rows = step.num_rows;
    std::vector<int64_t> active(static_cast<size_t>(rows)), every, tokens, drawn(active.size());
    std::iota(active.begin(), active.end(), 0);
    every = active;
    std::vector<Draw> draws(active.size());
    std::vector<const float*> angles(step.angles, step.angles + 2 * chain.num_ropes);
    std::vector<int32_t> start(static_cast<size_t>(step.slots + 1)), context(start.size());
    std::vector<int32_t> length(step.context_len, step.context_len + step.slots);
    for (int64_t i = 0;; ++i) {
        run_step(step);
        const auto count = static_cast<int64_t>(active.size());
        for (size_t j = 0; j < active.size(); ++j) draws[j] = chain.draws[i * rows + active[j]];
        run_team(count > 1 ? threads : 1, 1, [&](Team& team) {
            draw_rows(team, step.output, draws.data(), drawn.data(), count, chain.vocab);
        });
        std::vector<int64_t> going_on;
        tokens.clear();
        std::fill(context.begin(), context.end(), 0);
        std::fill(start.begin(), start.end(), 0);
        for (size_t j = 0; j < active.size(); ++j) {
            const int64_t r = active[j], slot = chain.row_slots[r];
            chain.tokens[i * rows + r] = drawn[j];
            if (chain.counts[r] <= i + 1) continue;
            going_on.push_back(r);
            tokens.push_back(std::max<int64_t>(drawn[j], 0));
            context[static_cast<size_t>(slot)] = ++length[static_cast<size_t>(slot)];
            start[static_cast<size_t>(slot) + 1] = 1;
        }
        if (going_on.empty()) return;
        std::partial_sum(start.begin(), start.end(), start.begin());
        active = going_on;
        const int64_t done = step.num_tokens;
        for (size_t t = 0; t < angles.size(); ++t) angles[t] += done * chain.halves[t / 2];
        step.positions += done;
        step.write_slots += done;
        step.angles = angles.data();
        step.tokens = tokens.data();
        step.query_start = start.data();
        step.context_len = context.data();
        step.rows = every.data();
        step.num_tokens = step.num_rows = static_cast<int64_t>(active.size());
    }
}

}  // namespace gpt_fast
