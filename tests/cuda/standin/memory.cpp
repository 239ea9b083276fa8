// Memory of the GPUs and pinned memory of the host. Both are the host's own, so that small results can be read; what
// no copy touches costs nothing.
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>

#include "clock.h"
#include "costs.h"
#include "counters.h"
#include "gpu.h"
#include "knobs.h"

struct Block {
    size_t bytes;
    int device;
};

static std::map<char*, Block> on_gpu, pinned;
static size_t used[16];

static size_t memory_bytes() { return (size_t)(knobs().gib * (1 << 30)); }

// The block that an address lies in, or null.
static const Block* find(const std::map<char*, Block>& blocks, const void* address) {
    auto after = blocks.upper_bound((char*)address);
    if (after == blocks.begin()) return nullptr;
    auto& [begin, block] = *--after;
    return (char*)address < begin + block.bytes ? &block : nullptr;
}

static cudaError_t allocate(void** address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    int device = current_device();
    counters.allocations++;
    use_device(device);
    if (used[device] + bytes > memory_bytes()) {
        counters.out_of_memory++;
        return failed(cudaErrorMemoryAllocation);
    }
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *address = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (*address == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    on_gpu[(char*)*address] = {bytes, device};
    used[device] += bytes;
    return cudaSuccess;
}

static cudaError_t allocate_pinned(void** address, size_t bytes) {
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    pinned[(char*)*address] = {bytes, current_device()};
    return cudaSuccess;
}

static bool is_pinned(const void* address) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    return find(pinned, address) || find(on_gpu, address);
}

static void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    work(stream, copy_seconds(bytes, kind));
    if (kind == cudaMemcpyDeviceToHost) {
        counters.copies_to_host++;
        if (!is_pinned(to)) host_clock::wait_until(stream_of(stream)->ready);  // as CUDA does for ordinary memory
    } else if (kind == cudaMemcpyDeviceToDevice) {
        counters.copies_on_device++;
        if (bytes > kMovedBytes) return;
    } else {
        counters.copies_to_device++;
    }
    memcpy(to, from, bytes);
}

extern "C" {

size_t standin_used_bytes(int device) { return used[device]; }

cudaError_t cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes); }
cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) { return allocate(address, bytes); }
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return allocate(address, bytes); }

cudaError_t cudaFree(void* address) {
    if (!address) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    counters.frees++;
    auto found = on_gpu.find((char*)address);
    if (found == on_gpu.end()) return failed(cudaErrorInvalidValue);
    auto [bytes, device] = found->second;
    host_clock::wait_until(device_ready(device));  // CUDA frees nothing while the GPU works
    used[device] -= bytes;
    munmap(address, bytes ? bytes : 1);
    on_gpu.erase(found);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
    *total = memory_bytes();
    *unused = *total - used[current_device()];
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) { return allocate_pinned(address, bytes); }
cudaError_t cudaMallocHost(void** address, size_t bytes) { return allocate_pinned(address, bytes); }

cudaError_t cudaFreeHost(void* address) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    pinned.erase((char*)address);
    free(address);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    if (const Block* block = find(on_gpu, address)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = block->device;
        attributes->devicePointer = (void*)address;
    } else if (find(pinned, address)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = current_device();
        attributes->devicePointer = attributes->hostPointer = (void*)address;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, bytes, kind, stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    copy(to, from, bytes, kind, nullptr);
    host_clock::wait_until(stream_of(nullptr)->ready);
    return cudaSuccess;
}

cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
    launch(stream, kernel_seconds());
    return cudaSuccess;
}
}
