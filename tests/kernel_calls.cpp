// Runs one of the kernels' functions on a file of arguments: for CPUs that Python does not run on here, through an
// emulator.
//
//   kernel_calls IN OUT
//
// IN: int64 function, int64 number of integers, the integers, float64, int64 number of buffers, and for each its size
// in bytes (int64) and its bytes. OUT: the buffers' bytes after the call, one after the other. A buffer of size 0 is
// null.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.cpp"

namespace {

int64_t read_int(FILE* from) {
    int64_t value;
    if (std::fread(&value, sizeof value, 1, from) != 1) std::abort();
    return value;
}

}  // namespace

int main(int, char** argv) {
    FILE* in = std::fopen(argv[1], "rb");
    const int64_t function = read_int(in);
    std::vector<int64_t> i(static_cast<size_t>(read_int(in)));
    for (int64_t& value : i) value = read_int(in);
    double real;
    if (std::fread(&real, sizeof real, 1, in) != 1) return 1;
    struct Buffer {
        uint8_t* data;
        size_t size;
    };
    std::vector<Buffer> b(static_cast<size_t>(read_int(in)));
    for (Buffer& buffer : b) {
        buffer.size = static_cast<size_t>(read_int(in));
        buffer.data =
            buffer.size ? static_cast<uint8_t*>(std::aligned_alloc(64, (buffer.size + 63) / 64 * 64)) : nullptr;
        if (buffer.size && std::fread(buffer.data, buffer.size, 1, in) != 1) return 1;
    }
    auto floats = [&](size_t at) { return reinterpret_cast<float*>(b[at].data); };
    auto ints = [&](size_t at) { return reinterpret_cast<int32_t*>(b[at].data); };
    const int threads = static_cast<int>(i.back());
    switch (function) {
        case 0:
            gpt_fast_linear(i[0], floats(0), i[1], i[2], i[3], i[4], b[1].data, floats(2), floats(3), floats(4),
                            threads);
            break;
        case 1:
            gpt_fast_paged_attention(floats(0), floats(1), floats(2), b[3].data, b[4].data, floats(5), floats(6),
                                     ints(7), ints(8), ints(9), reinterpret_cast<int64_t*>(b[10].data), floats(11),
                                     i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], threads);
            break;
        case 2: gpt_fast_rms_norm(floats(0), floats(1), i[0], i[1], real, floats(2), threads); break;
        case 3: gpt_fast_silu_mul(floats(0), i[0], i[1], floats(1), threads); break;
        default: return 1;
    }
    FILE* out = std::fopen(argv[2], "wb");
    for (const Buffer& buffer : b)
        if (buffer.size && std::fwrite(buffer.data, buffer.size, 1, out) != 1) return 1;
    return std::fclose(out);
}
