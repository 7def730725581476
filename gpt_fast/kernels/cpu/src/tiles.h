// Tiles of AMX (Intel, Architecture Instruction Set Extensions): eight registers of up to 16 rows of 64 bytes, and
// products of two of them that are added to a third.
//
// Registers 0 to 3 are sums here: 0 and 1 of up to 16 rows of x with two tiles of weights, 2 and 3 of the next rows with
// the same. 4 and 5 are those rows of x, 6 and 7 the weights, packed as the formats pack them: what stands side by side
// are an output's neighbours along k.
//
// Each row of a register is summed by itself, so that a row's sums are the same bits for any number of rows. Sums of
// int8 are exact. Of bfloat16 each product of registers gives two chains, of the even and of the odd k, which are added
// to each other and then to the sum that was there.
#pragma once

#include <cmath>

#include "common.h"

namespace gpt_fast {

constexpr int64_t kTileRows = 16, kTileBytes = 64;

// The formulas of the instructions, on registers in memory.
class PlainTiles {
public:
    void shape(int number, int64_t rows, int64_t bytes) {
        registers_[number].rows = rows, registers_[number].bytes = bytes;
    }
    void begin() {}

    template <int number>
    void zero() {
        std::memset(registers_[number].data, 0, sizeof registers_[number].data);
    }
    template <int number>
    void load(const uint8_t* from, int64_t stride) {
        Register& r = registers_[number];
        for (int64_t i = 0; i < r.rows; ++i) std::memcpy(r.data[i], from + i * stride, static_cast<size_t>(r.bytes));
    }
    template <int number>
    void store(uint8_t* to, int64_t stride) {
        const Register& r = registers_[number];
        for (int64_t i = 0; i < r.rows; ++i) std::memcpy(to + i * stride, r.data[i], static_cast<size_t>(r.bytes));
    }

    // sum[m][n] += x[m][4 k + i] * w[k][4 n + i] over all k and i.
    template <int sum, int x, int w>
    void add_int8() {
        each<sum, x>([&](int64_t m, int64_t n, int64_t depth) {
            int32_t total = get<int32_t>(sum, m, n);
            for (int64_t k = 0; k < depth; ++k)
                for (int64_t i = 0; i < 4; ++i) total += get<int8_t>(x, m, 4 * k + i) * get<int8_t>(w, k, 4 * n + i);
            std::memcpy(registers_[sum].data[m] + 4 * n, &total, sizeof total);
        });
    }

    // The same with pairs of bfloat16.
    template <int sum, int x, int w>
    void add_bfloat16() {
        each<sum, x>([&](int64_t m, int64_t n, int64_t depth) {
            float chains[2] = {0.0f, 0.0f};
            for (int64_t k = 0; k < depth; ++k)
                for (int64_t i = 0; i < 2; ++i)
                    chains[i] = std::fma(to_float(get<uint16_t>(x, m, 2 * k + i)),
                                         to_float(get<uint16_t>(w, k, 2 * n + i)), chains[i]);
            const float total = get<float>(sum, m, n) + (chains[0] + chains[1]);
            std::memcpy(registers_[sum].data[m] + 4 * n, &total, sizeof total);
        });
    }

private:
    struct Register {
        int64_t rows = 0, bytes = 0;
        uint8_t data[kTileRows][kTileBytes];
    };

    template <class Value>
    Value get(int number, int64_t row, int64_t index) const {
        Value value;
        std::memcpy(&value, registers_[number].data[row] + index * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }
    template <int sum, int x, class Body>
    void each(Body body) const {
        for (int64_t m = 0; m < registers_[sum].rows; ++m)
            for (int64_t n = 0; n < registers_[sum].bytes / 4; ++n) body(m, n, registers_[x].bytes / 4);
    }

    Register registers_[8];
};

#ifdef __AMX_TILE__
// The CPU's registers, in this thread. They are given back at the end: until then a change of threads costs more.
class Tiles {
public:
    Tiles() = default;
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void shape(int number, int64_t rows, int64_t bytes) {
        layout_.rows[number] = static_cast<uint8_t>(rows), layout_.bytes[number] = static_cast<uint16_t>(bytes);
    }
    void begin() { asm volatile("ldtilecfg %0" ::"m"(layout_) : "memory"); }

    template <int number>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(number));
    }
    template <int number>
    void load(const uint8_t* from, int64_t stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(number), "r"(from), "r"(stride) : "memory");
    }
    template <int number>
    void store(uint8_t* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(number), "r"(to), "r"(stride) : "memory");
    }
    template <int sum, int x, int w>
    void add_int8() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
    }
    template <int sum, int x, int w>
    void add_bfloat16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
    }

private:
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } layout_;
};
#else
using Tiles = PlainTiles;
#endif

// Whether products use tiles. The definition may come from tests, for the formulas.
#if defined(__AMX_TILE__) || defined(GPT_FAST_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

enum class Pieces { kInt8, kBfloat16 };

// Sums of `rows` rows, at most 32, with T tiles of weights, one or two; `bytes` of x and of each output are added at a
// time.
template <Pieces kind, class Registers = Tiles>
class TileSums {
public:
    TileSums(int64_t rows, int64_t bytes) : both_(rows > kTileRows) {
        const int64_t first = both_ ? kTileRows : rows, second = both_ ? rows - kTileRows : 1;
        for (int i = 0; i < 4; ++i) registers_.shape(i, i < 2 ? first : second, kTileBytes);
        registers_.shape(4, first, bytes), registers_.shape(5, second, bytes);
        registers_.shape(6, bytes / 4, kTileBytes), registers_.shape(7, bytes / 4, kTileBytes);
        registers_.begin();
    }

    template <int T>
    void zero() {
        each_sum<T>([&](auto number, int64_t, int64_t) { registers_.template zero<number>(); });
    }

    // Sums [rows, T * 16] of 32 bits each, `stride` bytes from row to row.
    template <int T>
    void load(const void* sums, int64_t stride) {
        const auto* from = static_cast<const uint8_t*>(sums);
        each_sum<T>([&](auto number, int64_t row, int64_t byte) {
            registers_.template load<number>(from + row * stride + byte, stride);
        });
    }

    template <int T>
    void store(void* sums, int64_t stride) {
        auto* to = static_cast<uint8_t*>(sums);
        each_sum<T>([&](auto number, int64_t row, int64_t byte) {
            registers_.template store<number>(to + row * stride + byte, stride);
        });
    }

    // x: `x_stride` bytes from row to row; weights: `w_stride` bytes from tile to tile.
    template <int T>
    void add(const void* x, int64_t x_stride, const uint8_t* w, int64_t w_stride) {
        const auto* rows = static_cast<const uint8_t*>(x);
        registers_.template load<4>(rows, x_stride);
        registers_.template load<6>(w, kTileBytes);
        product<0, 4, 6>();
        if constexpr (T > 1) {
            registers_.template load<7>(w + w_stride, kTileBytes);
            product<1, 4, 7>();
        }
        if (!both_) return;
        registers_.template load<5>(rows + kTileRows * x_stride, x_stride);
        product<2, 5, 6>();
        if constexpr (T > 1) product<3, 5, 7>();
    }

private:
    template <int number>
    using Number = std::integral_constant<int, number>;

    // body(number, first row, first byte of a row) for each register of sums that is used.
    template <int T, class Body>
    void each_sum(Body body) const {
        body(Number<0>(), 0, 0);
        if constexpr (T > 1) body(Number<1>(), 0, kTileBytes);
        if (!both_) return;
        body(Number<2>(), kTileRows, 0);
        if constexpr (T > 1) body(Number<3>(), kTileRows, kTileBytes);
    }

    template <int sum, int x, int w>
    void product() {
        if constexpr (kind == Pieces::kInt8)
            registers_.template add_int8<sum, x, w>();
        else
            registers_.template add_bfloat16<sum, x, w>();
    }

    const bool both_;
    Registers registers_;
};

// Whether the registers give what the formulas say; sums of bfloat16 may differ by their rounding.
template <Pieces kind>
bool tiles_work() {
    constexpr bool exact = kind == Pieces::kInt8;
    constexpr int64_t bytes = 2 * kTileRows * kTileBytes, sums = bytes / 2;  // [32 rows, 2 * 16 sums]
    uint8_t x[bytes], w[bytes];
    for (int i = 0; i < bytes; ++i) {  // as bfloat16 numbers from 0.5 to 2 of both signs
        x[i] = static_cast<uint8_t>(exact || i % 2 == 0 ? i * 37 : 63 + i / 2 % 2 * 128);
        w[i] = static_cast<uint8_t>(exact || i % 2 == 0 ? i * 101 : 63 + i / 6 % 2 * 128);
    }
    auto add_twice = [&](auto&& tiles, auto* to) {
        tiles.template zero<2>();
        for (int i = 0; i < 2; ++i) tiles.template add<2>(x, kTileBytes, w, bytes / 2);
        tiles.template store<2>(to, 2 * kTileBytes);
    };
    for (int64_t rows : {1, 16, 19, 32}) {
        std::conditional_t<exact, int32_t, float> got[sums] = {}, wanted[sums] = {};
        add_twice(TileSums<kind>(rows, exact ? kTileBytes / 2 : kTileBytes), got);
        add_twice(TileSums<kind, PlainTiles>(rows, exact ? kTileBytes / 2 : kTileBytes), wanted);
        for (int i = 0; i < sums; ++i)
            if (std::abs(static_cast<double>(got[i]) - wanted[i]) > (exact ? 0.0 : 1e-3)) return false;
    }
    return true;
}

}  // namespace gpt_fast
