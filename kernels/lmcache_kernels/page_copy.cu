// One launch copies a list of pieces, each between any two addresses that the device can reach: its own
// memory, and pinned host memory without a detour (zero copy).
//
// Thirty-two threads that follow each other are a team. A team copies one tile of one piece, then the tile
// as many tiles on as there are teams. So any grid copies everything, and a small one needs few
// multiprocessors. Needs neither the runtime library nor headers, so that NVRTC compiles it as it is.

struct Piece {
    unsigned long long source;
    unsigned long long destination;
    unsigned long long bytes;
};

constexpr unsigned int TEAM = 32;
// Loads of a thread that are on their way at once: the bus is far, and only what is on its way hides that.
constexpr unsigned int IN_FLIGHT = 4;

// Pages are used once: evict-first accesses leave the engine's own data in the cache.
template <typename Word>
__device__ void copy_words(const Word* source, Word* destination, unsigned int count, unsigned int lane)
{
#pragma unroll 1
    for (unsigned int first = lane; first < count; first += IN_FLIGHT * TEAM) {
        Word held[IN_FLIGHT];
#pragma unroll
        for (unsigned int i = 0; i < IN_FLIGHT; ++i)
            if (first + i * TEAM < count)
                held[i] = __ldcs(source + first + i * TEAM);
#pragma unroll
        for (unsigned int i = 0; i < IN_FLIGHT; ++i)
            if (first + i * TEAM < count)
                __stcs(destination + first + i * TEAM, held[i]);
    }
}

// Both addresses leave the same remainder when divided by the size of Word.
template <typename Word>
__device__ void copy_span(unsigned long long source, unsigned long long destination, unsigned int bytes,
                          unsigned int lane)
{
    const unsigned int to_boundary = static_cast<unsigned int>(0 - source) % sizeof(Word);
    const unsigned int head = to_boundary < bytes ? to_boundary : bytes;
    const unsigned int words = (bytes - head) / sizeof(Word);
    const unsigned int tail = head + words * sizeof(Word);
    const unsigned char* from = reinterpret_cast<const unsigned char*>(source);
    unsigned char* to = reinterpret_cast<unsigned char*>(destination);
    // Fewer bytes than a Word has before and behind the words, and a team has more threads than that.
    if (lane < head)
        __stcs(to + lane, __ldcs(from + lane));
    copy_words(reinterpret_cast<const Word*>(from + head), reinterpret_cast<Word*>(to + head), words, lane);
    if (tail + lane < bytes)
        __stcs(to + tail + lane, __ldcs(from + tail + lane));
}

// `tiles` is how many tiles of `tile_bytes` the longest piece has; `num_pieces * tiles` plus the number of
// teams must stay below 2^32. A block has a multiple of TEAM threads. No byte that is written may be read or
// written by another piece.
extern "C" __global__ void page_copy(const Piece* pieces, unsigned int num_pieces, unsigned int tiles,
                                     unsigned int tile_bytes)
{
    const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned int num_teams = gridDim.x * blockDim.x / TEAM;
    const unsigned int lane = thread % TEAM;
    for (unsigned int item = thread / TEAM; item < num_pieces * tiles; item += num_teams) {
        const Piece piece = pieces[item / tiles];
        const unsigned long long done = static_cast<unsigned long long>(item % tiles) * tile_bytes;
        if (done >= piece.bytes)
            continue;
        const unsigned long long left = piece.bytes - done;
        const unsigned int bytes = left < tile_bytes ? static_cast<unsigned int>(left) : tile_bytes;
        const unsigned long long source = piece.source + done;
        const unsigned long long destination = piece.destination + done;
        const unsigned long long apart = source ^ destination;
        if (apart % sizeof(uint4) == 0)
            copy_span<uint4>(source, destination, bytes, lane);
        else if (apart % sizeof(unsigned int) == 0)
            copy_span<unsigned int>(source, destination, bytes, lane);
        else
            copy_span<unsigned char>(source, destination, bytes, lane);
    }
}
