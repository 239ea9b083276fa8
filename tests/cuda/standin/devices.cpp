// GPUs as torch asks after them: how many, which one is current, what they are.
#include <cstdio>
#include <cstring>

#include "counters.h"
#include "clock.h"
#include "gpu.h"
#include "knobs.h"

#undef cudaGetDeviceProperties

static constexpr int kMultiprocessors = 26, kThreadsPerBlock = 1024, kThreadsPerMultiprocessor = 1536;
static constexpr int kSharedPerBlock = 49152, kSharedPerBlockOptIn = 101376, kSharedPerMultiprocessor = 102400;
static constexpr int kRegisters = 65536;

static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static long contexts[16];  // calls that made one, or would have

int current_device() { return current; }

void use_device(int device) { __atomic_add_fetch(&contexts[device], 1, __ATOMIC_RELAXED); }

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

extern "C" {

long standin_context(int device) { return contexts[device]; }  // 0: this process never touched that GPU

cudaError_t cudaGetDeviceCount(int* count) {
    *count = knobs().devices;
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= knobs().devices) return failed(cudaErrorInvalidDevice);
    current = device;
    use_device(device);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device < 0 || device >= knobs().devices) return failed(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", knobs().name.c_str());
    p->uuid.bytes[0] = 1 + device;
    p->pciBusID = 1 + device;
    p->major = knobs().cc / 10;
    p->minor = knobs().cc % 10;
    p->totalGlobalMem = (size_t)(knobs().gib * (1 << 30));
    p->totalConstMem = 1 << 16;
    p->memPitch = 1 << 30;
    p->memoryBusWidth = 192;
    p->l2CacheSize = 4 << 20;
    p->warpSize = 32;
    p->multiProcessorCount = kMultiprocessors;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = kThreadsPerBlock;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
    p->maxBlocksPerMultiProcessor = 16;
    p->regsPerBlock = p->regsPerMultiprocessor = kRegisters;
    p->sharedMemPerBlock = kSharedPerBlock;
    p->sharedMemPerBlockOptin = kSharedPerBlockOptIn;
    p->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
    p->textureAlignment = 512;
    p->asyncEngineCount = 2;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    p->streamPrioritiesSupported = p->cooperativeLaunch = p->managedMemory = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    switch ((int)attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = knobs().cc / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = knobs().cc % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = kThreadsPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedPerBlockOptIn; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = kSharedPerMultiprocessor; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = kRegisters; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
    snprintf(id, length, "0000:%02x:00.0", 1 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    counters.device_waits++;
    host_clock::wait_until(device_ready(current));
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "an error that the stand-in has no words for";
    }
}

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
}
