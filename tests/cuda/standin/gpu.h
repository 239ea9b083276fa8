// What a GPU is here: streams, each with the moment up to which it has work, and events that keep such moments.
// Every moment is in seconds on the host's clock.
#pragma once
#include <cuda_runtime_api.h>

#include <mutex>

struct Capture;  // of a CUDA graph, see graphs.cpp

struct Stream {
    int device;
    double ready;      // when its last piece of work is done; while it is captured: since the capture began
    int priority;
    Capture* capture;  // the graph that its work goes into, or null
};

struct Event {
    int device;
    double at;         // the moment that it marks
    bool recorded;
    bool timed;
    Capture* capture;  // recorded in a stream that was captured
};

extern std::recursive_mutex gpu_lock;  // of everything below and of all streams and events

int current_device();
void use_device(int device);           // a context is made there, as by CUDA
Stream* stream_of(cudaStream_t handle);  // also of the default stream
double device_ready(int device);       // when all of its streams are done
double begin_of_work(const Stream* stream);     // when a piece of work launched now can begin
void work(cudaStream_t handle, double seconds);  // a piece of work that takes so long
void launch(cudaStream_t handle, double seconds);  // the same by a launch of the host's, counted
char* behind(const void* address);                 // where the host can read and write what lies at a GPU's address
cudaError_t failed(cudaError_t error);  // keeps it for cudaGetLastError

void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));
