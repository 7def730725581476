// Runs one step of a program on memory that a file describes: for CPUs that Python does not run on here, through an
// emulator.
//
//   kernel_calls IN OUT
//   kernel_calls quantize IN OUT
//
// IN, all numbers int64: threads; the number of pieces of memory; for each its size in bytes, its bytes, the number of
// pointers in it, and for each of those its offset, the piece that it points to, and the offset there. Piece 0 is the
// Program, piece 1 the Step. OUT: the bytes of the last piece after the step.
//
// For quantize: format, rows, columns and group size, and the rows' bytes. OUT: weight, scale, zero and row_scale.
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

struct Pointer {
    size_t piece, offset, target, target_offset;
};

int run_quantize(const char* from, const char* to) {
    FILE* in = std::fopen(from, "rb");
    const int64_t format = read_int(in), rows = read_int(in), columns = read_int(in), group_size = read_int(in);
    std::vector<uint8_t> weights(static_cast<size_t>(rows * columns * (format == kBfloat16 ? 2 : 4)));
    if (std::fread(weights.data(), weights.size(), 1, in) != 1) return 1;
    const auto groups = static_cast<size_t>(rows * ceil_div(columns, group_size));
    std::vector<uint8_t> codes(groups * static_cast<size_t>(group_size) / 2), scale(groups), zero(groups);
    std::vector<float> row_scale(static_cast<size_t>(rows));
    gpt_fast_quantize(weights.data(), format, rows, columns, group_size, codes.data(), scale.data(), zero.data(),
                      row_scale.data(), 2);
    FILE* out = std::fopen(to, "wb");
    for (const auto* bytes : {&codes, &scale, &zero})
        if (std::fwrite(bytes->data(), bytes->size(), 1, out) != 1) return 1;
    if (std::fwrite(row_scale.data(), row_scale.size() * sizeof(float), 1, out) != 1) return 1;
    return std::fclose(out);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 3) return run_quantize(argv[2], argv[3]);
    FILE* in = std::fopen(argv[1], "rb");
    const int threads = static_cast<int>(read_int(in));
    std::vector<uint8_t*> pieces(static_cast<size_t>(read_int(in)));
    std::vector<Pointer> pointers;
    size_t size = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
        size = static_cast<size_t>(read_int(in));
        pieces[i] = static_cast<uint8_t*>(std::aligned_alloc(64, (size + 64) / 64 * 64));
        if (size && std::fread(pieces[i], size, 1, in) != 1) return 1;
        for (int64_t left = read_int(in); left > 0; --left) {
            const auto offset = static_cast<size_t>(read_int(in)), target = static_cast<size_t>(read_int(in));
            pointers.push_back({i, offset, target, static_cast<size_t>(read_int(in))});
        }
    }
    for (const Pointer& p : pointers) {
        uint8_t* to = pieces[p.target] + p.target_offset;
        std::memcpy(pieces[p.piece] + p.offset, &to, sizeof to);
    }
    gpt_fast_run(reinterpret_cast<Program*>(pieces[0]), reinterpret_cast<Step*>(pieces[1]), threads);
    FILE* out = std::fopen(argv[2], "wb");
    if (std::fwrite(pieces.back(), size, 1, out) != 1) return 1;
    return std::fclose(out);
}
