// Memory of the GPUs and pinned memory of the host. As with a real GPU, the host cannot read a GPU's addresses: what lies
// behind them is mapped a second time, for copies. What no copy touches costs nothing.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "copies.h"
#include "costs.h"
#include "counters.h"
#include "gpu.h"
#include "knobs.h"

struct Block {
    size_t bytes;
    int device;
    ptrdiff_t shift;  // from its addresses to those at which the host finds what lies there
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

char* behind(const void* address) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    const Block* block = find(on_gpu, address);
    return (char*)address + (block ? block->shift : 0);
}

static cudaError_t allocate(void** address, size_t bytes, int protection) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    int device = current_device();
    counters.allocations++;
    use_device(device);
    if (used[device] + bytes > memory_bytes()) {
        counters.out_of_memory++;
        return failed(cudaErrorMemoryAllocation);
    }
    size_t length = bytes ? bytes : 1;
    int file = memfd_create("gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, length)) return failed(cudaErrorMemoryAllocation);
    *address = mmap(nullptr, length, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    char* readable = (char*)mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    on_gpu[(char*)*address] = {bytes, device, readable - (char*)*address};
    used[device] += bytes;
    return cudaSuccess;
}

static cudaError_t allocate_pinned(void** address, size_t bytes) {
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    pinned[(char*)*address] = {bytes, current_device(), 0};
    return cudaSuccess;
}

static bool is_pinned(const void* address) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    return find(pinned, address);
}

static void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    work(stream, copy_seconds(bytes, kind));
    double over = stream_of(stream)->ready;
    if (kind == cudaMemcpyDeviceToHost) {
        counters.copies_to_host++;
        if (is_pinned(to) && !stream_of(stream)->capture) return write_later((char*)to, behind(from), bytes, over);
        host_waits(over);  // as CUDA does for ordinary memory
    } else if (kind == cudaMemcpyDeviceToDevice) {
        counters.copies_on_device++;
        if (bytes > kMovedBytes) return;
    } else {
        counters.copies_to_device++;
        if (is_pinned(from) && !stream_of(stream)->capture) keep_still((const char*)from, bytes, over);
    }
    memmove(behind(to), behind(from), bytes);
}

extern "C" {

size_t standin_used_bytes(int device) { return used[device]; }

cudaError_t cudaMalloc(void** address, size_t bytes) { return allocate(address, bytes, PROT_NONE); }
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return allocate(address, bytes, PROT_NONE); }

cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) {
    return allocate(address, bytes, PROT_READ | PROT_WRITE);
}

cudaError_t cudaFree(void* address) {
    if (!address) return cudaSuccess;
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    counters.frees++;
    auto found = on_gpu.find((char*)address);
    if (found == on_gpu.end()) return failed(cudaErrorInvalidValue);
    auto [bytes, device, shift] = found->second;
    host_waits(device_ready(device));  // CUDA frees nothing while the GPU works
    used[device] -= bytes;
    munmap(address, bytes ? bytes : 1);
    munmap((char*)address + shift, bytes ? bytes : 1);
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
    auto found = pinned.find((char*)address);
    if (found != pinned.end()) {
        forget_copies((char*)address, found->second.bytes);
        pinned.erase(found);
    }
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
    host_waits(stream_of(nullptr)->ready);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    bool whole = to_pitch == width && from_pitch == width;
    copy(to, from, whole ? width * height : width, kind, stream);
    for (size_t row = 1; !whole && row < height; row++)
        memmove(behind((char*)to + row * to_pitch), behind((const char*)from + row * from_pitch), width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
    launch(stream, kernel_seconds());
    return cudaSuccess;
}
}
