// How long the GPU and the link take for a piece of work, in seconds.
#pragma once
#include <cuda_runtime_api.h>

static constexpr size_t kMovedBytes = 1 << 16;  // what is copied on a device or between ranks in fact, not in time alone

double kernel_seconds();
double convolution_seconds();
double product_seconds();  // of matrices
double copy_seconds(size_t bytes, cudaMemcpyKind kind);
double link_seconds(double bytes);  // a message of so many bytes through a rank's link
