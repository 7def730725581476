// Weights rounded to int8, and to int4: the search for each group's scale and zero. quantize/rtn.py, the twin in plain
// torch, has the reasons; both compute the same bits. So no product is joined with a sum here, and sums have the twin's
// order.
//
// Lanes of a vector are eight groups of a row: what is searched for is a number for each group, so nothing is ever summed
// across lanes. Where the twin gives NaN, these give it: clamps keep it, and bytes made of it are 0.
#pragma once

#include "activations.h"
#include "linear.h"

namespace gpt_fast {

struct Quantizing {
    const uint8_t* from;  // [rows, columns] in `format`, float32 or bfloat16
    int64_t format, rows, columns, group_size;
    uint8_t *weight, *scale, *zero;  // [rows, whole groups / 2], twice [rows, groups]
    float* row_scale;                // [rows]

    int64_t groups() const { return ceil_div(columns, group_size); }
};

constexpr int kGroupsAtOnce = 8;
constexpr int64_t kLongestGroup = 128;
constexpr float kCodes = 15, kByte = 255, kZeroSteps = 8;         // the largest code and byte, steps of a zero in a code
constexpr float kShrinks[] = {1.0f, 0.93f, 0.86f, 0.8f, 0.73f};  // parts of a group's range that are tried
constexpr float kLeastStep = 1e-30f;

// Numbers that are summed side by side.
struct Two {
    F8 a, b;
};
inline Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }

// The sum of term(i) over i below `size`: four sums side by side, of every fourth term each.
template <class Term>
inline auto sum_of(int64_t size, Term term) {
    decltype(term(0)) sum[4] = {term(0), term(1), term(2), term(3)};
    for (int64_t i = 4; i < size; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[j] = sum[j] + term(i + j);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

inline F8 both(F8 mask, F8 other) { return as_floats(as_ints(mask) & as_ints(other)); }
inline F8 either(F8 mask, F8 other) { return as_floats(as_ints(mask) | as_ints(other)); }

inline F8 clamp(F8 x, float low, float high) { return smaller(splat(high), larger(splat(low), x)); }

// The nearest whole number, of two the even one, for x of 0 to 2^22: above 2^23 floats have no fractions.
inline F8 whole(F8 x) {
    const F8 large = splat(8388608.0f);
    return (x + large) - large;
}

inline F8 whole_below(F8 x) {
    const F8 n = whole(x);
    return n - choose(less(x, n), splat(1.0f), splat(0.0f));
}

// Clamped before it is rounded, which is the same as after.
inline F8 code_of(F8 in_steps, F8 zero) { return whole(clamp(in_steps + zero, 0, kCodes)); }

// What one code of each group is worth, or its scale as it is stored, and the code of the value 0.
struct Fit {
    F8 step, zero;
};

// Keeps the better of the fits it is shown; of equal ones the first.
struct Best {
    F8 error;
    Fit fit;
    bool seen = false;

    void see(F8 new_error, Fit other) {
        if (seen) {
            const F8 better = less(new_error, error);
            fit = {choose(better, other.step, fit.step), choose(better, other.zero, fit.zero)};
            error = choose(better, new_error, error);
        } else {
            fit = other, error = new_error, seen = true;
        }
    }
};

// Eight groups side by side: value i of group j is w[i * kGroupsAtOnce + j].
struct Groups {
    const float* w;
    int64_t size;
    F8 part;  // 1 / size, a power of two

    Groups(const float* values, int64_t group_size)
        : w(values), size(group_size), part(splat(1.0f / static_cast<float>(group_size))) {}

    F8 at(int64_t i) const { return load8(w + i * kGroupsAtOnce); }
};

// Step and zero that fit the codes of `old` best; where all codes are alike, `old`.
inline Fit least_squares(const Groups& g, F8 w_mean, Fit old) {
    alignas(64) float codes[kLongestGroup * kGroupsAtOnce];
    const F8 q_sum = sum_of(g.size, [&](int64_t i) {
        const F8 q = code_of(g.at(i) / old.step, old.zero);
        store8(codes + i * kGroupsAtOnce, q);
        return q;
    });
    const F8 q_mean = q_sum * g.part, none = splat(0.0f), least = splat(kLeastStep);
    auto around = [&](F8 middle) {  // mean squares of the codes, and products with the weights
        const Two sums = sum_of(g.size, [&](int64_t i) {
            const F8 centred = load8(codes + i * kGroupsAtOnce) - middle;
            return Two{centred * centred, centred * g.at(i)};
        });
        return Two{sums.a * g.part, sums.b * g.part};
    };
    const Two moments = around(q_mean);
    const F8 fitted = moments.b / moments.a;
    const F8 usable = both(less(none, moments.a), less(least, fitted));
    Fit found{choose(usable, fitted, old.step), old.zero};
    found.zero = choose(usable, q_mean - w_mean / found.step, old.zero);
    const F8 outside = either(less(found.zero, none), less(splat(kCodes), found.zero));
    if (!any(as_ints(outside))) return found;
    found.zero = clamp(found.zero, 0, kCodes);
    const Two about_zero = around(found.zero);
    const F8 alone = about_zero.b / about_zero.a;
    found.step = choose(both(outside, less(least, alone)), alone, found.step);
    return found;
}

// The step and zero with the least error, not rounded.
inline Fit find_range(const Groups& g) {
    F8 low = splat(0.0f), high = low;
    for (int64_t i = 0; i < g.size; ++i) {
        const F8 v = g.at(i), odd = is_nan(v);
        low = choose(odd, v, smaller(v, low)), high = choose(odd, v, larger(v, high));
    }
    const F8 middle = (low + high) / splat(2.0f), half = (high - low) / splat(2.0f);
    const F8 w_mean = sum_of(g.size, [&](int64_t i) { return g.at(i); }) * g.part;
    Best best;
    for (const float shrink : kShrinks) {
        const F8 wide = splat(2 * shrink) * half / splat(kCodes);
        Fit fit{larger(splat(kLeastStep), wide), splat(0.0f)};
        fit.zero = clamp((splat(shrink) * half - middle) / fit.step, 0, kCodes);
        for (int turn = 0; turn < 2; ++turn) fit = least_squares(g, w_mean, fit);
        const F8 squares = sum_of(g.size, [&](int64_t i) {
            const F8 in_steps = g.at(i) / fit.step, off = code_of(in_steps, fit.zero) - fit.zero - in_steps;
            return off * off;
        });
        best.see(squares * g.part * (fit.step * fit.step), fit);
    }
    return best.fit;
}

// Of the scales and zeros near `fit` that can be stored those with the least error; the scale in parts of `row_scale`.
inline Fit find_storable(const Groups& g, Fit fit, F8 row_scale) {
    Best best;
    for (int up = 0; up < 2; ++up) {
        const F8 scale = clamp(whole_below(fit.step / row_scale) + splat(static_cast<float>(up)), 1, kByte);
        const F8 step = scale * row_scale;
        F8 zero = fit.zero * fit.step / step;
        for (int turn = 0; turn < 2; ++turn) {
            zero = whole(clamp(zero * splat(kZeroSteps), 0, kByte)) / splat(kZeroSteps);
            const Two sums = sum_of(g.size, [&](int64_t i) {
                const F8 in_steps = g.at(i) / step, q = code_of(in_steps, zero), off = q - zero - in_steps;
                return Two{off * off, q - in_steps};
            });
            best.see(sums.a * g.part * (scale * scale), {scale, zero});
            zero = sums.b * g.part;
        }
    }
    return best.fit;
}

// Lanes as bytes of eight places, `stride` apart, of which the first `count` are written. NaN becomes 0.
inline void store_bytes(F8 v, int count, uint8_t* to, int64_t stride) {
    float lanes[kGroupsAtOnce];
    store8(lanes, larger(v, splat(0.0f)));
    for (int j = 0; j < count; ++j) to[j * stride] = static_cast<uint8_t>(lanes[j]);
}

// The codes of `count` groups, two in a byte as packing.py says.
inline void store_codes(const Groups& g, F8 step, F8 zero, int count, uint8_t* to) {
    auto code = [&](int64_t i) { return larger(code_of(g.at(i) / step, zero), splat(0.0f)); };
    for (int64_t block = 0; block < g.size; block += kBlock)
        for (int64_t i = 0; i < kBlock / 2; ++i)
            store_bytes(code(block + i) + splat(16.0f) * code(block + i + kBlock / 2), count, to + block / 2 + i,
                        g.size / 2);
}

// Eight groups of `row` from number `first`, side by side. What a row lacks is its last value, which has no say.
template <class T>
inline void lay_out(const T* row, const Quantizing& p, int64_t first, float* to) {
    for (int j = 0; j < kGroupsAtOnce; ++j) {
        const int64_t begin = (first + j) * p.group_size;
        for (int64_t i = 0; i < p.group_size; ++i)
            to[i * kGroupsAtOnce + j] = to_float(row[begin + i < p.columns ? begin + i : p.columns - 1]);
    }
}

template <class T>
inline void quantize_row(const Quantizing& p, int64_t r) {
    static thread_local Scratch scratch;
    const int64_t groups = p.groups(), filled = ceil_div(groups, kGroupsAtOnce) * kGroupsAtOnce;
    float* step = scratch.get<float>(filled * (2 + p.group_size));
    float *zero = step + filled, *values = zero + filled;
    for (int64_t i = 0; i < filled; i += kGroupsAtOnce) {
        float* w = values + i * p.group_size;
        lay_out(reinterpret_cast<const T*>(p.from) + r * p.columns, p, i, w);
        const Fit fit = find_range({w, p.group_size});
        store8(step + i, fit.step), store8(zero + i, fit.zero);
    }
    float most = step[0];
    for (int64_t i = 1; i < groups; ++i) most = step[i] > most || step[i] != step[i] ? step[i] : most;
    const float row_scale = p.row_scale[r] = most / kByte;
    for (int64_t i = 0; i < groups; i += kGroupsAtOnce) {
        const int count = static_cast<int>(groups - i < kGroupsAtOnce ? groups - i : kGroupsAtOnce);
        const Groups g(values + i * p.group_size, p.group_size);
        const Fit fit = find_storable(g, {load8(step + i), load8(zero + i)}, splat(row_scale));
        const int64_t at = r * groups + i;
        store_bytes(fit.step, count, p.scale + at, 1);
        store_bytes(fit.zero * splat(kZeroSteps), count, p.zero + at, 1);
        store_codes(g, fit.step * splat(row_scale), fit.zero, count, p.weight + at * p.group_size / 2);
    }
}

// A row to int8 and its scale. A row with NaN gets a scale of NaN, so that it is seen; codes that would be NaN are 0.
template <class T>
inline void quantize_row_to_int8(const T* row, int64_t columns, int8_t* codes, float* scale) {
    const int64_t whole_blocks = columns / kBlock * kBlock;
    float rest[kBlock] = {};
    for (int64_t i = whole_blocks; i < columns; ++i) rest[i - whole_blocks] = to_float(row[i]);
    I8 largest = splat(0);
    for (int64_t i = 0; i < kBlock; i += 8) largest = larger_magnitude(largest, load8(rest + i));
    for (int64_t i = 0; i < whole_blocks; i += 8) largest = larger_magnitude(largest, load8(row + i));
    *scale = largest_lane(largest) / 127.0f;
    if (*scale == 0.0f) *scale = 1.0f;
    auto store = [&](const auto* from, int8_t* to) {
        I8 q[4];
        for (int i = 0; i < 4; ++i) {
            const F8 v = clamp(load8(from + 8 * i) / splat(*scale), -127.0f, 127.0f);
            q[i] = nearest(choose(is_nan(v), splat(0.0f), v));
        }
        store_int8(to, q);
    };
    for (int64_t i = 0; i < whole_blocks; i += kBlock) store(row + i, codes + i);
    int8_t last[kBlock];
    store(rest, last);
    std::memcpy(codes + whole_blocks, last, static_cast<size_t>(columns - whole_blocks));
}

inline void quantize_rows_to_int8(Team& team, const uint8_t* from, int64_t format, int64_t rows, int64_t columns,
                                  int8_t* codes, float* scale) {
    team.share(rows, 1, [&](int64_t r, int64_t) {
        const int64_t at = r * columns;
        if (format == kBfloat16)
            quantize_row_to_int8(reinterpret_cast<const uint16_t*>(from) + at, columns, codes + at, scale + r);
        else
            quantize_row_to_int8(reinterpret_cast<const float*>(from) + at, columns, codes + at, scale + r);
    });
}

inline void quantize_rows(Team& team, const Quantizing& p) {
    team.share(p.rows, 1, [&](int64_t r, int64_t) {
        p.format == kBfloat16 ? quantize_row<uint16_t>(p, r) : quantize_row<float>(p, r);
    });
}

}  // namespace gpt_fast
