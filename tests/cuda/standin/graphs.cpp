// CUDA graphs: while a stream is captured its work takes place on a time line of the graph's own, from 0; a launch of
// the graph puts the whole of that line into a stream.
#include "graphs.h"

#include <algorithm>

#include "clock.h"
#include "counters.h"
#include "knobs.h"

static std::atomic<unsigned long long> captures{0};

void join_capture(Stream* stream, Capture* capture) {
    if (stream->capture) return;
    capture->joined[stream] = stream->ready;
    stream->capture = capture;
    stream->ready = 0;
}

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    Stream* stream = stream_of(handle);
    if ((uintptr_t)handle <= 2) return failed(cudaErrorStreamCaptureUnsupported);  // as CUDA: not of a default stream
    join_capture(stream, new Capture{++captures, stream, {}, 0, 0});
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    Capture* capture = stream_of(handle)->capture;
    if (!capture || capture->origin != stream_of(handle)) return failed(cudaErrorStreamCaptureInvalidated);
    for (auto& [stream, ready_before] : capture->joined) {
        capture->seconds = std::max(capture->seconds, stream->ready);
        stream->capture = nullptr;
        stream->ready = ready_before;
    }
    *graph = (cudaGraph_t)capture;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    bool captured = (uintptr_t)handle > 2 && ((Stream*)handle)->capture;
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
    cudaStreamIsCapturing(handle, status);
    Capture* capture = *status == cudaStreamCaptureStatusActive ? ((Stream*)handle)->capture : nullptr;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = (cudaGraph_t)capture;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = ((Capture*)graph)->kernels;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = (cudaGraphExec_t) new Capture(*(Capture*)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(made, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    counters.graph_launches++;
    host_clock::spend(1e-6 * knobs().launch_us);
    work(stream, ((Capture*)graph)->seconds);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete (Capture*)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete (Capture*)graph;
    return cudaSuccess;
}
}
