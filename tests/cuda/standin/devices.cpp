// GPUs as torch asks after them: how many, which one is current, what they are.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "counters.h"
#include "clock.h"
#include "copies.h"
#include "gpu.h"
#include "knobs.h"

#undef cudaGetDeviceProperties

static constexpr int kMultiprocessors = 26, kThreadsPerBlock = 1024, kThreadsPerMultiprocessor = 1536;
static constexpr int kSharedPerBlock = 49152, kSharedPerBlockOptIn = 101376, kSharedPerMultiprocessor = 102400;
static constexpr int kRegisters = 65536;

static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static long contexts[16];  // by GPU of the machine: calls that made one, or would have

// The machine's GPUs in the order in which this process sees them, as CUDA_VISIBLE_DEVICES has it when CUDA is first
// asked for something. Names other than numbers stand for the GPUs in their order.
static std::vector<int> read_visible() {
    std::vector<int> found;
    const char* chosen = getenv("CUDA_VISIBLE_DEVICES");
    for (int gpu = 0; !chosen && gpu < knobs().devices; gpu++) found.push_back(gpu);
    if (!chosen) return found;
    std::stringstream names(chosen);
    for (std::string name; std::getline(names, name, ',');) {
        int gpu = isdigit((unsigned char)name[0]) ? atoi(name.c_str()) : (int)found.size();
        if (gpu >= knobs().devices) break;  // what follows a GPU that is not there is not seen either
        found.push_back(gpu);
    }
    return found;
}

static const std::vector<int>& visible() {
    static const std::vector<int> found = read_visible();
    return found;
}

static bool is_there(int device) { return device >= 0 && device < (int)visible().size(); }

int current_device() { return current; }

void use_device(int device) {
    if (is_there(device)) __atomic_add_fetch(&contexts[visible()[device]], 1, __ATOMIC_RELAXED);
}

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

extern "C" {

long standin_context(int gpu) { return contexts[gpu]; }  // 0: this process never touched that GPU of the machine
long standin_visible_context(int device) { return is_there(device) ? contexts[visible()[device]] : 0; }

cudaError_t cudaGetDeviceCount(int* count) {
    *count = (int)visible().size();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!is_there(device)) return failed(cudaErrorInvalidDevice);
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
    if (!is_there(device)) return failed(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", knobs().name.c_str());
    p->uuid.bytes[0] = 1 + visible()[device];
    p->pciBusID = 1 + visible()[device];
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
    snprintf(id, length, "0000:%02x:00.0", 1 + visible()[device]);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    counters.device_waits++;
    host_waits(device_ready(current));
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
