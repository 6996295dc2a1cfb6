// A stand-in of CUDA's driver for machines without a GPU: libcuda.so.1 as far as this project calls it.
//
// It shows nothing about a GPU, its speed or its hardware. It keeps the contract of the calls, and is as
// hostile as the contract allows: streams run late and in their own threads, copies take their time, handles
// open at other addresses, and what a GPU would refuse, crash on or do slowly is refused. The real cuda.h is
// included, so the compiler holds every signature against it.
//
// CUDA_STANDIN_DIR      files of device memory and of each process's counters; shared by all processes
// CUDA_STANDIN_DEVICES  how many devices there are; CUDA_VISIBLE_DEVICES chooses and orders, as for the driver
// CUDA_STANDIN_VERSION  what cuDriverGetVersion says; batched copies need 12080
// CUDA_STANDIN_DELAY_US   how late, at most, each operation of a stream begins
// CUDA_STANDIN_NO_RANGE   if set, nobody learns the range of memory that another process allocated
// CUDA_STANDIN_COMPUTE_MODE  what each device says of its compute mode
// CUDA_STANDIN_PIN_LIMIT  bytes of host memory that a process may register
// CUDA_STANDIN_PIN_US     how long each registration of 64 MiB and more takes
// A file `fail-<process id>` in the directory: that process's contexts are lost, as after an illegal access.
// A file `fail-<process id>-<device>`: as this, for its context on that device alone.
// A file `no-start`: cuInit fails, as before /dev/nvidia-uvm exists.
// A file `no-<call>`, for calls of the virtual memory API: that call fails.
// A file `no-context-<device>`: no process gets a new context there, as with an exclusive compute mode.

#include <cuda.h>

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "page_copy_on_cpu.cpp"

namespace {

constexpr size_t GRANULE = 2 << 20;
constexpr size_t DEVICE_BYTES = size_t(8) << 30;
constexpr size_t PORTION = 16 << 10;

struct Counters {  // One file a process, read by the tests.
    std::atomic<long long> mappings, registered_bytes, contexts, launches, copies, batches, batched, handles, reservations;
};

struct Memory {
    size_t bytes;  // As allocated, in granules.
    int device;
    bool legacy, opened;
    int descriptor, references;
    std::string name;
    CUmemGenericAllocationHandle physical = 0;  // What is mapped there, if it was mapped with cuMemMap.
    bool accessible = true;
};

struct Physical {  // What cuMemCreate or cuMemImportFromShareableHandle made.
    size_t bytes;
    int device;
    bool shareable, foreign;
    int descriptor, handles, mappings;
    std::string name;
};

struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> waiting;
    long long submitted = 0, done = 0;
    bool ending = false;
};

struct Event {
    std::mutex lock;
    std::condition_variable changed;
    long long recorded = 0, happened = 0;
};
using SharedEvent = std::shared_ptr<Event>;  // One that is destroyed may still be due in a stream.

std::mutex everything;
// Streams may outlive the process's static objects, so these are never destroyed.
auto& memories = *new std::map<uintptr_t, Memory>;
auto& registered = *new std::map<uintptr_t, std::pair<size_t, unsigned>>;
auto& physicals = *new std::map<CUmemGenericAllocationHandle, Physical>;
auto& reservations = *new std::map<uintptr_t, size_t>;
auto& directory = *new std::string;
auto& visible = *new std::vector<int>;
Counters* counters;
std::atomic<bool> lost;
std::atomic<int> initialised_by, next_file;
size_t pin_limit = ~size_t(0), pinned;
int version = 13000, delay_us = 200;
thread_local CUcontext current;
bool has_context[64];

const char* setting(const char* name, const char* otherwise)
{
    const char* value = getenv(name);
    return value ? value : otherwise;
}

// The one that holds all of [address, address + bytes), or nothing.
template <typename Map>
auto holder(Map& map, uintptr_t address, size_t bytes, size_t (*size)(const typename Map::mapped_type&))
{
    auto found = map.upper_bound(address);
    if (found == map.begin())
        return map.end();
    --found;
    return address + bytes <= found->first + size(found->second) ? found : map.end();
}
size_t memory_size(const Memory& memory) { return memory.accessible ? memory.bytes : 0; }
size_t registered_size(const std::pair<size_t, unsigned>& each) { return each.first; }

bool on_device(uintptr_t address, size_t bytes)
{
    return holder(memories, address, bytes, memory_size) != memories.end();
}
bool is_pinned(uintptr_t address, size_t bytes, unsigned flags)
{
    auto found = holder(registered, address, bytes, registered_size);
    return found != registered.end() && (found->second.second & flags) == flags;
}

int current_device() { return static_cast<int>(reinterpret_cast<intptr_t>(current)) - 1; }

CUresult ready(bool needs_context = true)
{
    if (initialised_by != getpid())  // As well: a child that was forked.
        return CUDA_ERROR_NOT_INITIALIZED;
    if (needs_context && !current)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!lost && access((directory + "/fail-" + std::to_string(getpid())).c_str(), F_OK) == 0)
        lost = true;
    if (needs_context && access((directory + "/fail-" + std::to_string(getpid()) + "-" + std::to_string(current_device())).c_str(), F_OK) == 0)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return needs_context && lost ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}
#define READY(...)                                   \
    if (CUresult not_ready = ready(__VA_ARGS__))     \
        return not_ready;

void dawdle(int at_most_us)
{
    thread_local std::mt19937 random(std::random_device{}());
    usleep(random() % (at_most_us + 1));
}

void work(Stream* stream)
{
    std::unique_lock<std::mutex> held(stream->lock);
    for (;;) {
        stream->changed.wait(held, [&] { return stream->ending || !stream->waiting.empty(); });
        if (stream->waiting.empty()) {
            held.unlock();
            delete stream;
            return;
        }
        auto operation = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        held.unlock();
        dawdle(delay_us);
        operation();
        held.lock();
        ++stream->done;
        stream->changed.notify_all();
    }
}

Stream* make_stream()
{
    auto* made = new Stream;
    std::thread(work, made).detach();
    return made;
}

Stream* stream_of(CUstream handle)
{
    static Stream* standard = make_stream();
    return handle ? reinterpret_cast<Stream*>(handle) : standard;
}

void submit(CUstream handle, std::function<void()> operation)
{
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> held(stream->lock);
    stream->waiting.push_back(std::move(operation));
    ++stream->submitted;
    stream->changed.notify_all();
}

void wait_for(CUstream handle)
{
    Stream* stream = stream_of(handle);
    std::unique_lock<std::mutex> held(stream->lock);
    const long long until = stream->submitted;
    stream->changed.wait(held, [&] { return stream->done >= until; });
}

void move(uintptr_t to, uintptr_t from, size_t bytes)
{
    for (size_t done = 0; done < bytes; done += PORTION) {
        if (done && done % (64 * PORTION) == 0)
            dawdle(20);
        memmove(reinterpret_cast<void*>(to + done), reinterpret_cast<void*>(from + done), std::min(PORTION, bytes - done));
    }
}

CUresult check(bool right) { return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult check_device(uintptr_t address, size_t bytes)
{
    std::lock_guard<std::mutex> held(everything);
    return check(on_device(address, bytes));
}

// Where a copy engine would read and write at full speed.
CUresult check_side(uintptr_t address, size_t bytes)
{
    std::lock_guard<std::mutex> held(everything);
    return check(bytes && (on_device(address, bytes) || is_pinned(address, bytes, 0)));
}

CUresult check_copy(uintptr_t to, uintptr_t from, size_t bytes)
{
    const CUresult wrong = check_side(to, bytes);
    return wrong ? wrong : check_side(from, bytes);
}

// An operation whose turn has come: what was right when it was submitted may be unmapped or unpinned by now.
void operate(CUresult wrong, const std::function<void()>& operation)
{
    if (wrong)
        lost = true;
    if (!lost)
        operation();
}

void run_copy(uintptr_t to, uintptr_t from, size_t bytes)
{
    operate(check_copy(to, from, bytes), [=] { move(to, from, bytes); });
}

// A copy from bytes that were read earlier.
void run_write(uintptr_t to, const std::string& bytes)
{
    operate(check_side(to, bytes.size()), [&] { move(to, reinterpret_cast<uintptr_t>(bytes.data()), bytes.size()); });
}

CUresult map_memory(Memory memory, int flags, CUdeviceptr* address)
{
    memory.descriptor = open((directory + "/" + memory.name).c_str(), flags | O_CLOEXEC, 0600);
    if (memory.descriptor < 0)
        return CUDA_ERROR_INVALID_VALUE;
    flock(memory.descriptor, LOCK_SH);
    if (!memory.opened && ftruncate(memory.descriptor, memory.bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    void* at = mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.descriptor, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<uintptr_t>(at);
    memories[*address] = memory;
    return CUDA_SUCCESS;
}

void unmap_memory(std::map<uintptr_t, Memory>::iterator found)
{
    munmap(reinterpret_cast<void*>(found->first), found->second.bytes);
    close(found->second.descriptor);
    memories.erase(found);
}

CUresult allocate(CUdeviceptr* address, size_t bytes, bool legacy)
{
    std::lock_guard<std::mutex> held(everything);
    const size_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    const std::string name = "memory-" + std::to_string(getpid()) + "-" + std::to_string(next_file++);
    return map_memory({whole, current_device(), legacy, false, -1, 1, name}, O_RDWR | O_CREAT | O_EXCL, address);
}

CUresult permitted(const char* call)
{
    return access((directory + "/no-" + call).c_str(), F_OK) == 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
#define PERMITTED(call)                              \
    READY()                                          \
    if (CUresult refused = permitted(call))          \
        return refused;                              \
    std::lock_guard<std::mutex> held(everything);

int opened_again(int descriptor)
{
    const int again = open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_RDWR | O_CLOEXEC);
    if (again >= 0)
        flock(again, LOCK_SH);
    return again;
}

CUmemGenericAllocationHandle add_physical(const Physical& physical)
{
    const auto handle = physicals.empty() ? 0x1000 : physicals.rbegin()->first + 1;
    physicals[handle] = physical;
    ++counters->handles;
    return handle;
}

void drop_if_unused(std::map<CUmemGenericAllocationHandle, Physical>::iterator found)
{
    if (found->second.handles || found->second.mappings)
        return;
    close(found->second.descriptor);
    physicals.erase(found);
}

// The device of the memory of the virtual memory API that a descriptor stands for, or -1.
int device_of(int descriptor)
{
    char target[PATH_MAX] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
    if (readlink(link.c_str(), target, sizeof(target) - 1) < 0)
        return -1;
    int device = -1;
    sscanf(target, (directory + "/memory-%*d-%*d-v%d").c_str(), &device);
    return device;
}

// A process that has not ended holds the lock of its counters.
bool lives(long long pid)
{
    const int file = open((directory + "/counters-" + std::to_string(pid)).c_str(), O_RDWR | O_CLOEXEC);
    const bool held = file >= 0 && flock(file, LOCK_SH | LOCK_NB);
    close(file);
    return held;
}

struct Handle {
    char magic[8];
    long long pid, bytes, device;
    char name[32];
};
static_assert(sizeof(Handle) == CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                    size_t* first, size_t num_attributes, size_t* failed, CUstream stream)
{
    READY()
    if (!stream || !count || num_attributes != 1 || first[0] || attributes[0].srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
        attributes[0].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
        return CUDA_ERROR_INVALID_VALUE;
    std::vector<std::array<uintptr_t, 3>> pieces;
    for (size_t i = 0; i < count; ++i) {
        if (CUresult wrong = check_copy(to[i], from[i], sizes[i])) {
            *failed = i;
            return wrong;
        }
        pieces.push_back({to[i], from[i], sizes[i]});
    }
    // In no order among each other.
    std::reverse(pieces.begin(), pieces.end());
    ++counters->batches;
    counters->batched += static_cast<long long>(count);
    std::vector<std::string> read;  // As early as the attributes allow.
    if (attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
        for (auto& piece : pieces)
            read.emplace_back(reinterpret_cast<char*>(piece[1]), piece[2]);
    submit(stream, [pieces, read] {
        for (size_t i = 0; i < pieces.size(); ++i)
            if (read.empty())
                run_copy(pieces[i][0], pieces[i][1], pieces[i][2]);
            else
                run_write(pieces[i][0], read[i]);
    });
    return CUDA_SUCCESS;
}

bool reachable(uintptr_t address, size_t bytes)
{
    return on_device(address, bytes) || is_pinned(address, bytes, CU_MEMHOSTREGISTER_DEVICEMAP);
}

void run_kernel(unsigned blocks, unsigned threads, uintptr_t table, unsigned count, unsigned tiles, unsigned tile_bytes)
{
    static std::mutex one_at_a_time;
    {
        std::lock_guard<std::mutex> held(everything);
        const auto* pieces = reinterpret_cast<const Piece*>(table);
        if (!on_device(table, count * sizeof(Piece)))
            lost = true;
        for (unsigned i = 0; i < count && !lost; ++i)
            if (!reachable(pieces[i].source, pieces[i].bytes) || !reachable(pieces[i].destination, pieces[i].bytes))
                lost = true;
    }
    if (lost)
        return;
    std::lock_guard<std::mutex> held(one_at_a_time);
    unsigned long long seen[3];
    run(blocks, threads, reinterpret_cast<const Piece*>(table), count, tiles, tile_bytes, seen);
    if (seen[0])
        lost = true;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned int)
{
    std::lock_guard<std::mutex> held(everything);
    if (initialised_by)
        return initialised_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    directory = setting("CUDA_STANDIN_DIR", "/tmp");
    if (access((directory + "/no-start").c_str(), F_OK) == 0)
        return CUDA_ERROR_UNKNOWN;
    version = atoi(setting("CUDA_STANDIN_VERSION", "13000"));
    delay_us = atoi(setting("CUDA_STANDIN_DELAY_US", "200"));
    pin_limit = strtoull(setting("CUDA_STANDIN_PIN_LIMIT", "18446744073709551615"), nullptr, 10);
    const int count = atoi(setting("CUDA_STANDIN_DEVICES", "1"));
    visible.clear();
    std::string chosen = setting("CUDA_VISIBLE_DEVICES", "all");
    for (int device = 0; chosen == "all" && device < count; ++device)
        visible.push_back(device);
    for (size_t at = 0; chosen != "all" && at < chosen.size(); at = std::min(chosen.find(',', at), chosen.size() - 1) + 1) {
        const int device = atoi(chosen.c_str() + at);
        if (device < 0 || device >= count)
            break;  // So does the driver: what follows is not there either.
        visible.push_back(device);
    }
    if (visible.empty())
        return CUDA_ERROR_NO_DEVICE;
    // Locked for as long as the process lives.
    const int file = open((directory + "/counters-" + std::to_string(getpid())).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || flock(file, LOCK_EX) || ftruncate(file, sizeof(Counters)))
        return CUDA_ERROR_OPERATING_SYSTEM;
    counters = static_cast<Counters*>(mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    initialised_by = getpid();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* found)
{
    *found = version;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text)
{
    switch (code) {
    case CUDA_ERROR_INVALID_VALUE: *text = "invalid argument"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *text = "out of memory"; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
    default: *text = "an error of the stand-in";
    }
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** function, int asked, cuuint64_t, CUdriverProcAddressQueryResult*)
{
    if (strcmp(name, "cuMemcpyBatchAsync") || version < 12080 || asked != 12080)
        return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<void*>(copy_batch);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count)
{
    READY(false)
    *count = static_cast<int>(visible.size());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal)
{
    READY(false)
    memset(uuid->bytes, 0x40 + visible.at(ordinal), sizeof(uuid->bytes));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice)
{
    READY(false)
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR                 ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_MODE ? atoi(setting("CUDA_STANDIN_COMPUTE_MODE", "0"))
             : attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM ? 1
                                                                                        : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice ordinal)
{
    READY(false)
    snprintf(text, size, "00FF:%02X:00.0", visible.at(ordinal));
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice, unsigned int)
{
    return ready(false);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal)
{
    READY(false)
    std::lock_guard<std::mutex> held(everything);
    if (!has_context[visible.at(ordinal)] && access((directory + "/no-context-" + std::to_string(visible.at(ordinal))).c_str(), F_OK) == 0)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    counters->contexts += !std::exchange(has_context[visible.at(ordinal)], true);
    *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(visible.at(ordinal)) + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context)
{
    READY(false)
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    READY(false)
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode)
{
    READY(false)
    *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = holder(memories, address, 1, memory_size);
    if (found == memories.end())
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
        *static_cast<bool*>(value) = found->second.legacy;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID) {
        *static_cast<unsigned long long*>(value) = found->first;
        return CUDA_SUCCESS;
    }
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        return CUDA_ERROR_INVALID_VALUE;
    const auto at = std::find(visible.begin(), visible.end(), found->second.device);
    *static_cast<int*>(value) = static_cast<int>(at - visible.begin());
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = holder(memories, address, 1, memory_size);
    if (found == memories.end() || (found->second.opened && getenv("CUDA_STANDIN_NO_RANGE")))
        return CUDA_ERROR_INVALID_VALUE;
    *base = found->first;
    *bytes = found->second.bytes;
    return CUDA_SUCCESS;
}

// Memory is taken as long as any process has it, also when the one that allocated it is dead.
CUresult cuMemGetInfo_v2(size_t* left, size_t* total)
{
    READY()
    *left = *total = DEVICE_BYTES;
    DIR* files = opendir(directory.c_str());
    while (dirent* each = readdir(files)) {
        if (strncmp(each->d_name, "memory-", 7))
            continue;
        const int file = openat(dirfd(files), each->d_name, O_RDWR | O_CLOEXEC);
        if (file < 0)
            continue;
        struct stat info = {};
        fstat(file, &info);
        // One without a size is being made, and not locked yet.
        if (info.st_size && flock(file, LOCK_EX | LOCK_NB) == 0)
            unlinkat(dirfd(files), each->d_name, 0);
        else
            *left -= info.st_size;
        close(file);
    }
    closedir(files);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes)
{
    READY()
    return allocate(address, bytes, true);
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream)
{
    READY()
    return allocate(address, bytes, false);
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = memories.find(address);
    if (found == memories.end() || found->second.opened || found->second.physical)
        return CUDA_ERROR_INVALID_VALUE;
    // Who has it mapped keeps it; nobody opens it any more.
    const std::string path = directory + "/" + found->second.name;
    rename(path.c_str(), (path + "-freed").c_str());
    unmap_memory(found);
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = holder(memories, address, 1, memory_size);
    if (found == memories.end() || !found->second.legacy || found->second.opened)
        return CUDA_ERROR_INVALID_VALUE;
    Handle handle = {"standin", getpid(), static_cast<long long>(found->second.bytes), found->second.device, {}};
    strncpy(handle.name, found->second.name.c_str(), sizeof(handle.name) - 1);
    memcpy(out, &handle, sizeof(handle));
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle in, unsigned int flags)
{
    READY()
    Handle handle;
    memcpy(&handle, &in, sizeof(handle));
    if (memcmp(handle.magic, "standin", 8) || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (handle.pid == getpid() || handle.device != current_device())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!lives(handle.pid))
        return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::mutex> held(everything);
    for (auto& each : memories)
        if (each.second.name == handle.name) {
            ++each.second.references;
            *address = each.first;
            return CUDA_SUCCESS;
        }
    Memory memory = {static_cast<size_t>(handle.bytes), static_cast<int>(handle.device), false, true, -1, 1, handle.name};
    CUresult result = map_memory(memory, O_RDWR, address);
    counters->mappings += result == CUDA_SUCCESS;
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = memories.find(address);
    if (found == memories.end() || !found->second.opened)
        return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.references == 0) {
        unmap_memory(found);
        --counters->mappings;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long flags)
{
    PERMITTED("cuMemCreate")
    if (!bytes || bytes % GRANULE || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    const int device = visible.at(prop->location.id);
    const std::string name = "memory-" + std::to_string(getpid()) + "-" + std::to_string(next_file++) + "-v" + std::to_string(device);
    const int file = open((directory + "/" + name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0 || flock(file, LOCK_SH) || ftruncate(file, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    const bool shareable = prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = add_physical({bytes, device, shareable, false, file, 1, 0, name});
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = physicals.find(handle);
    if (found == physicals.end() || !found->second.handles)
        return CUDA_ERROR_INVALID_VALUE;
    --found->second.handles;
    --counters->handles;
    drop_if_unused(found);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address)
{
    PERMITTED("cuMemRetainAllocationHandle")
    auto found = holder(memories, reinterpret_cast<uintptr_t>(address), 1, memory_size);
    if (found == memories.end() || !found->second.physical)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = found->second.physical;
    ++physicals[*handle].handles;
    ++counters->handles;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    PERMITTED("cuMemExportToShareableHandle")
    auto found = physicals.find(handle);
    if (found == physicals.end() || !found->second.shareable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int*>(out) = opened_again(found->second.descriptor);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* in, CUmemAllocationHandleType type)
{
    PERMITTED("cuMemImportFromShareableHandle")
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(in));
    const int device = device_of(given);
    struct stat info = {};
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || device < 0 || fstat(given, &info))
        return CUDA_ERROR_INVALID_VALUE;
    *handle = add_physical({static_cast<size_t>(info.st_size), device, false, true, opened_again(given), 1, 0, ""});
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr wished, unsigned long long flags)
{
    PERMITTED("cuMemAddressReserve")
    if (!bytes || bytes % GRANULE || wished || flags)
        return CUDA_ERROR_INVALID_VALUE;
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<uintptr_t>(at);
    reservations[*address] = bytes;
    ++counters->reservations;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = reservations.find(address);
    auto mapped = memories.lower_bound(address);
    if (found == reservations.end() || found->second != bytes || (mapped != memories.end() && mapped->first < address + bytes))
        return CUDA_ERROR_INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), bytes);
    reservations.erase(found);
    --counters->reservations;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    PERMITTED("cuMemMap")
    auto found = physicals.find(handle);
    auto reserved = holder(reservations, address, bytes, +[](const size_t& size) { return size; });
    auto mapped = memories.lower_bound(address);
    if (found == physicals.end() || !bytes || bytes % GRANULE || bytes > found->second.bytes || offset || flags || reserved == reservations.end() ||
        (mapped != memories.end() && mapped->first < address + bytes))
        return CUDA_ERROR_INVALID_VALUE;
    auto& physical = found->second;
    if (mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical.descriptor, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memories[address] = {bytes, physical.device, false, physical.foreign, -1, 1, physical.name, handle, false};
    ++physical.mappings;
    counters->mappings += physical.foreign;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count)
{
    PERMITTED("cuMemSetAccess")
    auto found = memories.find(address);
    if (found == memories.end() || !found->second.physical || found->second.bytes != bytes || count != 1 ||
        access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    if (visible.at(access->location.id) != found->second.device)  // Devices that cannot reach each other.
        return CUDA_ERROR_INVALID_DEVICE;
    mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
    found->second.accessible = true;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = memories.find(address);
    if (found == memories.end() || !found->second.physical || found->second.bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    auto physical = physicals.find(found->second.physical);
    --physical->second.mappings;
    counters->mappings -= physical->second.foreign;
    drop_if_unused(physical);
    memories.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* start, size_t bytes, unsigned int flags)
{
    READY()
    const auto address = reinterpret_cast<uintptr_t>(start);
    std::vector<unsigned char> pages((bytes + 4095) / 4096);
    if (bytes >= 64 << 20)
        usleep(atoi(setting("CUDA_STANDIN_PIN_US", "0")));
    std::lock_guard<std::mutex> held(everything);
    if (!bytes || address % 4096 || mincore(start, bytes, pages.data()))
        return CUDA_ERROR_INVALID_VALUE;
    auto next = registered.lower_bound(address);
    if ((next != registered.end() && next->first < address + bytes) ||
        (next != registered.begin() && std::prev(next)->first + std::prev(next)->second.first > address))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (pinned + bytes > pin_limit)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pinned += bytes;
    registered[address] = {bytes, flags};
    counters->registered_bytes += static_cast<long long>(bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* start)
{
    READY()
    std::lock_guard<std::mutex> held(everything);
    auto found = registered.find(reinterpret_cast<uintptr_t>(start));
    if (found == registered.end())
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    pinned -= found->second.first;
    counters->registered_bytes -= static_cast<long long>(found->second.first);
    registered.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    READY()
    if (CUresult wrong = check_copy(to, from, bytes))
        return wrong;
    ++counters->copies;
    submit(stream, [=] { run_copy(to, from, bytes); });
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    READY()
    if (CUresult wrong = check_device(from, bytes))
        return wrong;
    submit(stream, [=] { operate(check_device(from, bytes), [=] { move(reinterpret_cast<uintptr_t>(to), from, bytes); }); });
    return CUDA_SUCCESS;
}

// From pageable memory: it returns when the bytes have been read, which is before they are on the device.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream)
{
    READY()
    if (CUresult wrong = check_device(to, bytes))
        return wrong;
    submit(stream, [to, read = std::string(static_cast<const char*>(from), bytes)] { run_write(to, read); });
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
    READY()
    if (CUresult wrong = check_device(to, bytes))
        return wrong;
    submit(stream, [=] { operate(check_device(to, bytes), [=] { memset(reinterpret_cast<void*>(to), value, bytes); }); });
    return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int)
{
    READY()
    if (flags != CU_STREAM_NON_BLOCKING)  // The others are ordered with the default stream; ours are not.
        return CUDA_ERROR_INVALID_VALUE;
    *stream = reinterpret_cast<CUstream>(make_stream());
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    READY()
    wait_for(stream);
    return ready();
}

// Waits for nothing: what the stream still has is done later.
CUresult cuStreamDestroy_v2(CUstream handle)
{
    READY()
    Stream* stream = stream_of(handle);
    std::lock_guard<std::mutex> held(stream->lock);
    stream->ending = true;
    stream->changed.notify_all();
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned int)
{
    READY()
    *event = reinterpret_cast<CUevent>(new SharedEvent(new Event));
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream)
{
    READY()
    const SharedEvent event = *reinterpret_cast<SharedEvent*>(handle);
    long long number;
    {
        std::lock_guard<std::mutex> held(event->lock);
        number = ++event->recorded;
    }
    submit(stream, [=] {
        std::lock_guard<std::mutex> held(event->lock);
        event->happened = std::max(event->happened, number);
        event->changed.notify_all();
    });
    return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent handle)
{
    READY()
    const SharedEvent event = *reinterpret_cast<SharedEvent*>(handle);
    std::unique_lock<std::mutex> held(event->lock);
    const long long until = event->recorded;
    event->changed.wait(held, [&] { return event->happened >= until; });
    return ready();
}

CUresult cuEventDestroy_v2(CUevent handle)
{
    READY()
    delete reinterpret_cast<SharedEvent*>(handle);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image)
{
    READY()
    *module = reinterpret_cast<CUmodule>(1);
    return strncmp(static_cast<const char*>(image), "STANDIN", 7) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name)
{
    READY()
    *function = reinterpret_cast<CUfunction>(1);
    return strcmp(name, "page_copy") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction, unsigned int blocks, unsigned int, unsigned int, unsigned int threads, unsigned int,
                        unsigned int, unsigned int, CUstream stream, void** arguments, void**)
{
    READY()
    const auto table = *static_cast<unsigned long long*>(arguments[0]);
    unsigned int plain[3];
    for (int i = 0; i < 3; ++i)
        plain[i] = *static_cast<unsigned int*>(arguments[i + 1]);
    ++counters->launches;
    submit(stream, [=] { run_kernel(blocks, threads, table, plain[0], plain[1], plain[2]); });
    return CUDA_SUCCESS;
}

}  // extern "C"
