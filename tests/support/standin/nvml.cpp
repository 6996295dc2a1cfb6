// A stand-in of NVML (libnvidia-ml.so.1) as far as `lmcache doctor` calls it: its signatures are NVML's.
//
// CUDA_STANDIN_FREE_MB  how much of each device's 8192 MiB is free
// CUDA_STANDIN_MIG      if set, MIG divides each device

#include <cstdlib>
#include <cstring>

namespace {

constexpr unsigned long long MB = 1 << 20;
constexpr int NOT_FOUND = 6;

struct Memory {
    unsigned long long total, free, used;
};

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device)
{
    static char any;
    *device = &any;
    return strncmp(bus_id, "00FF:", 5) ? NOT_FOUND : 0;
}

int nvmlDeviceGetMemoryInfo(void*, Memory* memory)
{
    const char* free_mb = getenv("CUDA_STANDIN_FREE_MB");
    memory->total = 8192 * MB;
    memory->free = (free_mb ? atoi(free_mb) : 8192) * MB;
    memory->used = memory->total - memory->free;
    return 0;
}

int nvmlDeviceGetMigMode(void*, unsigned int* current, unsigned int* pending)
{
    *current = *pending = getenv("CUDA_STANDIN_MIG") != nullptr;
    return 0;
}

}  // extern "C"
