// Runs page_copy.cu on the CPU, thread after thread, and watches every access that it makes to pages.
// Compile with -DSOURCE='"…/page_copy.cu"'.

#include <cstdint>
#include <cstring>

#define __global__
#define __device__

struct Dimension {
    unsigned int x;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

static Dimension threadIdx, blockIdx, blockDim, gridDim;
static unsigned long long misaligned, stored_bytes, stored_by_16_bytes;

template <typename Word>
static Word __ldcs(const Word* address)
{
    misaligned += reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0;
    Word word;
    std::memcpy(&word, static_cast<const void*>(address), sizeof(Word));
    return word;
}

template <typename Word>
static void __stcs(Word* address, Word word)
{
    misaligned += reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0;
    stored_bytes += sizeof(Word);
    stored_by_16_bytes += sizeof(Word) == 16 ? 16 : 0;
    std::memcpy(static_cast<void*>(address), &word, sizeof(Word));
}

#include SOURCE

// seen: accesses that a GPU would refuse, bytes stored, bytes stored by 16 at a time.
extern "C" void run(unsigned int blocks, unsigned int threads, const Piece* pieces, unsigned int num_pieces,
                    unsigned int tiles, unsigned int tile_bytes, unsigned long long* seen)
{
    misaligned = stored_bytes = stored_by_16_bytes = 0;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            page_copy(pieces, num_pieces, tiles, tile_bytes);
    seen[0] = misaligned;
    seen[1] = stored_bytes;
    seen[2] = stored_by_16_bytes;
}
