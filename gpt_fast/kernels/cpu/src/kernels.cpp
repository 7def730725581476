// The functions that Python calls (through ctypes): plain C signatures around the kernels of the headers here.
#include <new>

#include "ahead.h"
#include "automaton.h"
#include "chain.h"
#include "pack.h"
#include "quantize.h"

using namespace gpt_fast;

namespace {

constexpr int64_t kPhases = 4;  // calls of share() in any single operation

// Memory of the calling thread that its team works in.
Scratch& shared_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

// At some places in turns, `run` bytes at each; `fetch`: while its next ones are fetched. Not unrolled: where one instruction
// reads all lines, Intel's hardware knows what comes next (a fifth faster, Xeon with AMX).
template <int places, int64_t run, bool fetch>
int64_t read_all(const uint8_t* data, int64_t num_bytes, int threads) {
    std::atomic<int64_t> found{0};
    run_team(threads, kPhases, [&](Team& team) {
        I8 seen = splat(0);
        team.share(num_bytes, fetch ? 1 << 22 : 1 << 17, [&](int64_t begin, int64_t end) {
            const int64_t piece = (end - begin) / places;
            for (int64_t i = 0; i < piece; i += run)
                for (int64_t j = 0; j < places; ++j) {
                    const uint8_t* from = data + begin + j * piece + i;
#pragma GCC unroll 1
                    for (const uint8_t* line = from; line < from + run; line += kLine) {
                        if (fetch) prefetch(line + run);
                        seen = seen | load32(line) | load32(line + 32);
                    }
                }
        });
        found |= any(seen);  // so that the compiler cannot leave the reading out
    });
    return found;
}

}  // namespace

extern "C" {

// Rows of weights into tiles: pack.h.
void gpt_fast_pack(const uint8_t* from, uint8_t* to, int64_t rows, int64_t units, int64_t group, int64_t header,
                   int threads) {
    const Packing p{from, to, rows, units, group, header};
    run_team(threads, kPhases, [&](Team& team) { pack_tiles(team, p); });
}

// Rows of weights in `format`, float32 or bfloat16, to int4: quantize.h.
void gpt_fast_quantize(const uint8_t* from, int64_t format, int64_t rows, int64_t columns, int64_t group_size,
                       uint8_t* weight, uint8_t* scale, uint8_t* zero, float* row_scale, int threads) {
    const Quantizing p{from, format, rows, columns, group_size, weight, scale, zero, row_scale};
    run_team(threads, kPhases, [&](Team& team) { quantize_rows(team, p); });
}

// The same to int8.
void gpt_fast_quantize_int8(const uint8_t* from, int64_t format, int64_t rows, int64_t columns, int8_t* codes,
                            float* scale, int threads) {
    run_team(threads, kPhases,
             [&](Team& team) { quantize_rows_to_int8(team, from, format, rows, columns, codes, scale); });
}

// How products with weights of a format round their rows (activations.h); 0: not at all.
int64_t gpt_fast_rounding(int64_t format) { return rounding_of(format); }

// Values of a row with one scale where products round it to int8.
int64_t gpt_fast_rounded_together() { return kRounded; }

// Whether for int8 the scale covers sums of two neighbours as well.
int64_t gpt_fast_rounded_in_pairs() { return kPairedDots; }

// Whether that scale is a power of two.
int64_t gpt_fast_rounded_by_powers() { return kCounted; }

// Whether tiles, where products use them, give what their formulas say (tiles.h).
int64_t gpt_fast_tiles_work() {
    return !kTiles || tiles_work();
}

// One step of a program (program.h).
void gpt_fast_run(const Program* program, Step* step, int threads) {
    step->longest = 0;
    for (int64_t i = 0; i < step->slots; ++i)
        step->longest = step->context_len[i] > step->longest ? step->context_len[i] : step->longest;
    const Run sizes(*program, *step, threads, nullptr);
    uint8_t* memory = shared_scratch().get<uint8_t>(sizes.num_bytes());
    std::atomic<int64_t> round{0};  // the same in every thread
    run_team(threads, sizes.phases(), [&](Team& team) { round = Run(*program, *step, threads, memory).run(team); });
    if (program->ranks) program->ranks->round = round;
}

// Several steps of a program, each of the tokens that the one before has drawn (chain.h).
void gpt_fast_chain(const Program* program, const Step* step, const Chain* chain, int threads) {
    run_chain(*step, *chain, program->page_size, threads, [&](Step& each) { gpt_fast_run(program, &each, threads); });
}

// The same by another thread (ahead.h), behind what was begun before; nothing where a token that it needs was not drawn.
// Returns its number.
int64_t gpt_fast_begin(const Program* program, const Step* step, const Chain* chain, int threads) {
    return Ahead::instance().begin([=, step = *step, chain = *chain] {
        if (tokens_known(chain, step.num_rows)) gpt_fast_chain(program, &step, &chain, threads);
    });
}

// What was begun and has not started is left out: its tokens stay as they are.
void gpt_fast_hold() { Ahead::instance().hold(); }

// Until what has this number is done.
void gpt_fast_wait(int64_t number) { Ahead::instance().wait(number); }

// A token for each row of logits (draw.h).
void gpt_fast_draw(const float* logits, const Draw* draws, int64_t* tokens, int64_t rows, int64_t vocab, int threads) {
    run_team(rows > 1 ? threads : 1, kPhases,
             [&](Team& team) { draw_rows(team, logits, draws, tokens, rows, vocab); });
}

// Messages of rank 0 (ranks.h).
void gpt_fast_tell(Ranks* ranks, const int64_t* numbers, int64_t count) { tell(*ranks, numbers, count); }

const int64_t* gpt_fast_hear(Ranks* ranks) { return hear(*ranks); }

// A suffix automaton (automaton.h); null where there is no memory for it.
Automaton* gpt_fast_automaton() { return new (std::nothrow) Automaton; }

void gpt_fast_automaton_free(Automaton* automaton) { delete automaton; }

int64_t gpt_fast_automaton_bytes(const Automaton* automaton) { return automaton->num_bytes(); }

// Appends `tokens` and guesses what follows them. found [2 + most]: the length of the longest ending that occurred
// before, the number of drafts, and the drafts.
void gpt_fast_automaton_extend(Automaton* automaton, const int32_t* tokens, int64_t count, int32_t* found,
                               int64_t most) {
    automaton->extend(tokens, count);
    found[0] = automaton->match_length();
    found[1] = static_cast<int32_t>(automaton->guess(found + 2, most));
}

// The same for what follows the longest ending of `tokens` that the automaton knows, which stays as it is.
void gpt_fast_automaton_find(const Automaton* automaton, const int32_t* tokens, int64_t count, int32_t* found,
                             int64_t most) {
    found[0] = automaton->find(tokens, count, found + 2, most, found + 1);
}

// Reads all of [data, data + num_bytes), a multiple of 128 kB, and nothing else: what memory allows (roofline.py). Order 0:
// from one end to the other, 1: at eight places at once, for each of which the hardware fetches ahead, 2: at four places in
// turns, with fetches. Zen 5 reads a sixth faster in order 0 (one thread), others a fifth faster in order 1; a Xeon with AMX
// reads an eighth faster in order 2 than in any other.
int64_t gpt_fast_read(const uint8_t* data, int64_t num_bytes, int order, int threads) {
    if (order == 0) return read_all<1, kLine, false>(data, num_bytes, threads);
    if (order == 1) return read_all<8, kLine, false>(data, num_bytes, threads);
    return read_all<4, 2048, true>(data, num_bytes, threads);
}

// Sizes of the structs that Python builds, so that a mismatch is an error at load.
int64_t gpt_fast_struct_bytes(int64_t which) {
    const int64_t sizes[] = {sizeof(Linear), sizeof(Op),    sizeof(Program), sizeof(Step),
                             sizeof(Draw),   sizeof(Chain), sizeof(Ranks)};
    return sizes[which];
}

}  // extern "C"
