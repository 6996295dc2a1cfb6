/* A libcuda.so.1 that does nothing and succeeds at once: what is left is the time of the server's own threads.
   Memory is address space only. Nothing reads or writes it. */

#include <stddef.h>
#include <string.h>

#define DOES_NOTHING(name) int name(void) { return 0; }
#define GIVES(name, type, value) int name(type *out) { *out = (value); return 0; }

enum { GPUS = 8, CUDA_VERSION = 13000 };

int null_batch(void) { return 0; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *status) {
    (void)version, (void)flags, (void)status;
    *function = strcmp(name, "cuMemcpyBatchAsync") ? NULL : (void *)null_batch;
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int ordinal) {
    memset(uuid, 0, 16);
    uuid[0] = (char)(ordinal + 1);
    return 0;
}

int cuDeviceGetPCIBusId(char *text, int length, int ordinal) {
    (void)ordinal;
    strncpy(text, "0000:00:00.0", (size_t)length);
    return 0;
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *bytes, unsigned long long address) {
    *base = address, *bytes = (size_t)1 << 46;
    return 0;
}

/* A stream, an event and a context are never looked into. */
static int something;

GIVES(cuDriverGetVersion, int, CUDA_VERSION)
GIVES(cuDeviceGetCount, int, GPUS)
GIVES(cuDeviceGetAttribute, int, 0)
GIVES(cuDevicePrimaryCtxRetain, void *, &something)
GIVES(cuCtxGetCurrent, void *, &something)
GIVES(cuIpcOpenMemHandle_v2, unsigned long long, 1ULL << 45)
GIVES(cuStreamCreateWithPriority, void *, &something)
GIVES(cuEventCreate, void *, &something)
GIVES(cuMemAlloc_v2, unsigned long long, 1ULL << 45)
DOES_NOTHING(cuInit)
DOES_NOTHING(cuGetErrorString)
DOES_NOTHING(cuDevicePrimaryCtxSetFlags_v2)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuThreadExchangeStreamCaptureMode)
DOES_NOTHING(cuPointerGetAttribute)
DOES_NOTHING(cuMemGetInfo_v2)
DOES_NOTHING(cuMemFree_v2)
DOES_NOTHING(cuIpcGetMemHandle)
DOES_NOTHING(cuIpcCloseMemHandle)
DOES_NOTHING(cuMemCreate)
DOES_NOTHING(cuMemRetainAllocationHandle)
DOES_NOTHING(cuMemExportToShareableHandle)
DOES_NOTHING(cuMemImportFromShareableHandle)
DOES_NOTHING(cuMemRelease)
DOES_NOTHING(cuMemAddressReserve)
DOES_NOTHING(cuMemAddressFree)
DOES_NOTHING(cuMemMap)
DOES_NOTHING(cuMemUnmap)
DOES_NOTHING(cuMemSetAccess)
DOES_NOTHING(cuMemHostRegister_v2)
DOES_NOTHING(cuMemHostUnregister)
DOES_NOTHING(cuMemcpyDtoHAsync_v2)
DOES_NOTHING(cuMemcpyHtoDAsync_v2)
DOES_NOTHING(cuMemcpyAsync)
DOES_NOTHING(cuStreamSynchronize)
DOES_NOTHING(cuStreamDestroy_v2)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventSynchronize)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuModuleLoadData)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuLaunchKernel)
