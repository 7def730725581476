// Runs one step of a program on memory that a file describes: for CPUs that Python does not run on here, through an
// emulator.
//
//   kernel_calls IN OUT
//
// IN, all numbers int64: threads; the number of pieces of memory; for each its size in bytes, its bytes, the number of
// pointers in it, and for each of those its offset, the piece that it points to, and the offset there. Piece 0 is the
// Program, piece 1 the Step. OUT: the bytes of the last piece after the step.
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

}  // namespace

int main(int, char** argv) {
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
