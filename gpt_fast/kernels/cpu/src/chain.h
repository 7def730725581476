// Several steps of a program one after the other, each of the tokens that the one before has drawn: drafts in one call.
#pragma once

#include <numeric>
#include <vector>

#include "draw.h"
#include "program.h"

namespace gpt_fast {

// What follows a step with R wanted rows, each the last of its slot's tokens. The pages of all later tokens are in the
// page table, and the turn of a token is its position.
struct Chain {
    const Draw* draws;         // [num_steps, R]
    const int64_t* counts;     // [R] tokens to draw for each row, at most num_steps
    const int64_t* row_slots;  // [R] the slot of each row, rising
    int64_t num_steps, vocab;
    int64_t* tokens;  // [num_steps, R] what was drawn; -1: nothing could be
    // Where the tokens of the first step come from that nobody knew when it was planned: before[before_rows[i]] is the
    // token i. Null: they are the step's own.
    const int64_t* before;
    const int64_t* before_rows;
};

// Whether the tokens of the first step have been drawn, if they come from another one.
inline bool tokens_known(const Chain& chain, int64_t rows) {
    for (int64_t i = 0; chain.before && i < rows; ++i)
        if (chain.before[chain.before_rows[i]] < 0) return false;
    return true;
}

template <class RunStep>
void run_chain(Step step, const Chain& chain, int64_t page_size, int threads, RunStep run_step) {
    const int64_t rows = step.num_rows;
    std::vector<int64_t> numbers(static_cast<size_t>(6 * rows));
    int64_t *active = numbers.data(), *every = active + rows, *tokens = every + rows, *positions = tokens + rows,
            *write_slots = positions + rows, *drawn = write_slots + rows;
    std::iota(active, active + rows, 0);
    std::iota(every, every + rows, 0);
    std::vector<Draw> draws(static_cast<size_t>(rows));
    std::vector<int32_t> starts(static_cast<size_t>(step.slots + 1)), contexts(static_cast<size_t>(step.slots));
    const std::vector<int32_t> first(step.context_len, step.context_len + step.slots);
    int32_t *start = starts.data(), *context = contexts.data();
    if (chain.before) {
        for (int64_t i = 0; i < rows; ++i) tokens[i] = chain.before[chain.before_rows[i]];
        step.tokens = tokens;
    }
    for (int64_t i = 0;; ++i) {
        run_step(step);
        const int64_t count = step.num_rows;
        for (int64_t j = 0; j < count; ++j) draws[static_cast<size_t>(j)] = chain.draws[i * rows + active[j]];
        run_team(count > 1 ? threads : 1, 1,
                 [&](Team& team) { draw_rows(team, step.output, draws.data(), drawn, count, chain.vocab); });
        std::fill(starts.begin(), starts.end(), 0);
        std::fill(contexts.begin(), contexts.end(), 0);
        int64_t going_on = 0;
        for (int64_t j = 0; j < count; ++j) {
            const int64_t row = active[j], slot = chain.row_slots[row];
            chain.tokens[i * rows + row] = drawn[j];
            if (chain.counts[row] <= i + 1) continue;
            const int64_t position = first[static_cast<size_t>(slot)] + i;
            const int64_t page = step.page_table[slot * step.pages_per_slot + position / page_size];
            tokens[going_on] = std::max<int64_t>(drawn[j], 0);
            positions[going_on] = position;
            write_slots[going_on] = page * page_size + position % page_size;
            context[slot] = static_cast<int32_t>(position + 1);
            start[slot + 1] = 1;
            active[going_on++] = row;
        }
        if (going_on == 0) return;
        std::partial_sum(starts.begin(), starts.end(), start);
        step.tokens = tokens;
        step.positions = step.turns = positions;
        step.write_slots = write_slots;
        step.query_start = start;
        step.context_len = context;
        step.rows = every;
        step.num_tokens = step.num_rows = going_on;
    }
}

}  // namespace gpt_fast
