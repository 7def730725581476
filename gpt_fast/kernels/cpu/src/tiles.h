// Tiles of AMX (Intel, Architecture Instruction Set Extensions): eight registers of up to 16 rows of 64 bytes, and
// products of two of them that are added to a third.
//
// Registers 0 to 3 are sums here, 4 and 5 rows of x, 6 and 7 weights, packed as the formats pack them: what stands side
// by side are an output's neighbours along k. So that a register of x is one piece of memory, its rows stand side by
// side as well, in panels (activations.h).
//
// A core has two units that multiply vectors of 512 bits. For some 300 cycles after an instruction of tiles it uses one of
// them (measured). Additions and logic still use two. So products of few rows use vectors and no tiles.
//
// Each row of a register is summed by itself, so that a row's sums are the same bits for any number of rows. Sums of
// int8 are exact. Of bfloat16 each product of registers gives two chains, of the even and of the odd k, which are added
// to each other and then to the sum that was there.
#pragma once

#include <cmath>

#include "common.h"

namespace gpt_fast {

constexpr int64_t kTileRows = 16, kTileBytes = 64;

// Of a register, or of a step, where it has to be a constant.
template <int number>
using Number = std::integral_constant<int, number>;

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
    ~Tiles() {
        if (begun_) asm volatile("tilerelease" ::: "memory");
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void shape(int number, int64_t rows, int64_t bytes) {
        layout_.rows[number] = static_cast<uint8_t>(rows), layout_.bytes[number] = static_cast<uint16_t>(bytes);
    }
    void begin() {
        asm volatile("ldtilecfg %0" ::"m"(layout_) : "memory");
        begun_ = true;
    }

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
    bool begun_ = false;
};
#else
using Tiles = PlainTiles;
#endif

// Vectors as registers of tiles are: numbers below 2^-126 are taken as zeros, and none are given.
class FlushesTiny {
#ifdef __AMX_TILE__
public:
    FlushesTiny() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x40); }
    ~FlushesTiny() { _mm_setcsr(before_); }

private:
    const unsigned before_ = _mm_getcsr();
#endif
};

// Whether products use tiles. The definition may come from tests, for the formulas.
#if defined(__AMX_TILE__) || defined(GPT_FAST_TILES)
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

// Sums in bfloat16's products: up to 16 rows, one panel, with T tiles of weights, one, two or four, or up to 32 rows, two
// panels, with one or two.
template <class Registers = Tiles>
class TileSums {
public:
    void shape(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows, both_ = rows > kTileRows;
        const int64_t first = both_ ? kTileRows : rows, second = both_ ? rows - kTileRows : rows;
        for (int i = 0; i < 8; ++i)
            registers_.shape(i, i > 5 ? kTileRows : i == 4 || i < 2 ? first : second, kTileBytes);
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

    // x: a block of the first panel, and of the second one if there are as many rows; weights: `w_stride` bytes from tile
    // to tile. before(tile): what is done before each.
    template <int T, class Before>
    void add(const void* x, const void* second, const uint8_t* w, int64_t w_stride, Before before) {
        registers_.template load<4>(static_cast<const uint8_t*>(x), kTileBytes);
        auto add_tile = [&](auto tile) __attribute__((always_inline)) {
            constexpr int weights = 6 + tile % 2;
            before(tile);
            registers_.template load<weights>(w + tile * w_stride, kTileBytes);
            registers_.template add_bfloat16<tile, 4, weights>();
        };
        add_tile(Number<0>());
        if constexpr (T > 1) add_tile(Number<1>());
        if constexpr (T > 2) add_tile(Number<2>()), add_tile(Number<3>());
        if (T > 2 || !both_) return;
        registers_.template load<5>(static_cast<const uint8_t*>(second), kTileBytes);
        registers_.template add_bfloat16<2, 5, 6>();
        if constexpr (T > 1) registers_.template add_bfloat16<3, 5, 7>();
    }

private:
    // body(number, first row, first byte of a row) for each register of sums that is used.
    template <int T, class Body>
    void each_sum(Body body) const {
        body(Number<0>(), 0, 0);
        if constexpr (T > 1) body(Number<1>(), 0, kTileBytes);
        if constexpr (T > 2) body(Number<2>(), 0, 2 * kTileBytes), body(Number<3>(), 0, 3 * kTileBytes);
        if (T > 2 || !both_) return;
        body(Number<2>(), kTileRows, 0);
        if constexpr (T > 1) body(Number<3>(), kTileRows, kTileBytes);
    }

    int64_t rows_ = 0;
    bool both_ = false;
    Registers registers_;
};

// Products in int8 of up to 16 rows, each block of k by itself, with N registers of weights side by side, at most four:
// they share what is read of x.
template <int N, class Registers = Tiles>
class TileBlocks {
public:
    static constexpr int kBlocks = 8 / N;
    using Block = int32_t[N][kTileRows][kTileRows];  // sums [N, rows, 16]

    // `bytes` of x and of each output are added at a time.
    void shape(int64_t rows, int64_t bytes = kTileBytes) {
        if (rows == rows_) return;
        rows_ = rows;
        for (int i = 0; i < 4; ++i) registers_.shape(i, rows, kTileBytes);
        for (int i = 4; i < 6; ++i) registers_.shape(i, rows, bytes);
        for (int i = 6; i < 8; ++i) registers_.shape(i, bytes / 4, kTileBytes);
        registers_.begin();
    }

    // Sums of `count` blocks, from one to the next of which it is x_step and w_step bytes. Rows of x are `stride` bytes
    // apart; each block is added in P products, one or two. Each register of sums is stored before the next one begins:
    // then a core stores while it multiplies.
    template <int P>
    void products(int64_t count, const uint8_t* x, int64_t stride, int64_t x_step, const uint8_t* const (&w)[N],
                  int64_t w_step, Block* sums) {
        for (int64_t block = 0; block < count; ++block, x += x_step) {
            registers_.template load<4>(x, stride);
            if constexpr (P > 1) registers_.template load<5>(x + kTileBytes, stride);
            add<P, 0>(w[0] + block * w_step, sums[block]);
            if constexpr (N > 1) add<P, 1>(w[1] + block * w_step, sums[block]);
            if constexpr (N > 2) add<P, 2>(w[2] + block * w_step, sums[block]);
            if constexpr (N > 3) add<P, 3>(w[3] + block * w_step, sums[block]);
        }
    }

private:
    template <int P, int n>
    void add(const uint8_t* w, Block& sums) {
        registers_.template zero<n>();
        registers_.template load<6>(w, kTileBytes);
        registers_.template add_int8<n, 4, 6>();
        if constexpr (P > 1) {
            registers_.template load<7>(w + kTileRows * kTileBytes, kTileBytes);
            registers_.template add_int8<n, 5, 7>();
        }
        registers_.template store<n>(reinterpret_cast<uint8_t*>(sums[n]), kTileBytes);
    }

    int64_t rows_ = 0;
    Registers registers_;
};

// Whether the registers give what the formulas say; sums of bfloat16 may differ by their rounding.
inline bool tiles_work() {
    constexpr int64_t bytes = 2 * kTileRows * kTileBytes, sums = 4 * kTileRows * kTileRows;
    uint8_t x[2][bytes], w[2][bytes];  // of int8, and as bfloat16 numbers from 0.5 to 2 of both signs
    for (int i = 0; i < bytes; ++i) {
        x[0][i] = static_cast<uint8_t>(i * 37), x[1][i] = static_cast<uint8_t>(i % 2 ? 63 + i / 2 % 2 * 128 : i * 37);
        w[0][i] = static_cast<uint8_t>(i * 101), w[1][i] = static_cast<uint8_t>(i % 2 ? 63 + i / 6 % 2 * 128 : i * 101);
    }
    auto floats = [&](auto tiles, int64_t rows, float* to) {  // [32, 32]
        tiles.shape(rows);
        tiles.template zero<2>();
        for (int i = 0; i < 2; ++i) tiles.template add<2>(x[1], x[1] + bytes / 2, w[1], bytes / 2, [](int) {});
        tiles.template store<2>(to, 2 * kTileBytes);
    };
    auto integers = [&](auto tiles, int64_t rows, int32_t* to) {
        tiles.shape(rows, kTileBytes / 2);
        int32_t sum[2][2][kTileRows][kTileRows];
        for (int64_t count : {1, 2}) {
            tiles.template products<1>(count, x[0], kTileBytes, kTileBytes / 2, {w[0], w[1]}, kTileBytes, sum);
            for (int64_t i = 0; i < rows * kTileRows; ++i)
                for (int64_t b = 0; b < count; ++b) {
                    const int64_t row = i / kTileRows, lane = i % kTileRows;
                    to[i] += 5 * to[i] + sum[b][0][row][lane] + 7 * sum[b][1][row][lane];
                }
        }
    };
    for (int64_t rows : {1, 8, 16, 19, 32}) {
        float got[sums] = {}, wanted[sums] = {};
        int32_t exact[sums] = {}, exactly[sums] = {};
        floats(TileSums<>(), rows, got), floats(TileSums<PlainTiles>(), rows, wanted);
        if (rows <= kTileRows)
            integers(TileBlocks<2>(), rows, exact), integers(TileBlocks<2, PlainTiles>(), rows, exactly);
        for (int i = 0; i < sums; ++i)
            if (std::abs(got[i] - wanted[i]) > 1e-3f || exact[i] != exactly[i]) return false;
    }
    return true;
}

}  // namespace gpt_fast
