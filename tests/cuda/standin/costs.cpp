#include "costs.h"

#include "knobs.h"

double kernel_seconds() { return 1e-6 * knobs().kernel_us; }
double convolution_seconds() { return 1e-6 * knobs().conv_us; }
double product_seconds() { return 1e-6 * knobs().gemm_us; }

// An RTX A2000's memory moves 288 GB/s (NVIDIA's data sheet), PCIe 3.0 x16 about 12 GB/s of its 15.8.
double copy_seconds(size_t bytes, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDeviceToDevice) return 3e-6 + 2 * bytes / 288e9;  // read and written
    return 5e-6 + bytes / 12e9;
}

double link_seconds(double bytes) { return 1e-6 * knobs().nccl_us + 8 * bytes / (1e9 * knobs().link_gbps); }
