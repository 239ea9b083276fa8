// Streams and events on the time line.
#include <cstdarg>
#include <cstdio>
#include <set>
#include <sys/syscall.h>
#include <unistd.h>

#include "clock.h"
#include "copies.h"
#include "counters.h"
#include "gpu.h"
#include "graphs.h"
#include "knobs.h"

std::recursive_mutex gpu_lock;
static Stream defaults[16];
static std::set<Stream*> streams;  // those that somebody made
static thread_local bool launches = false;  // whether this thread ever launched anything

static const double kQuestion = 20e-6;  // what a host that asks again and again spends on each question

Stream* stream_of(cudaStream_t handle) {
    if ((uintptr_t)handle > 2) return (Stream*)handle;  // 0, 1 and 2 are CUDA's names for default streams
    int device = current_device();
    use_device(device);
    defaults[device].device = device;
    return &defaults[device];
}

double device_ready(int device) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    double ready = defaults[device].ready;
    for (Stream* stream : streams)
        if (stream->device == device && !stream->capture && stream->ready > ready) ready = stream->ready;
    return ready;
}

double begin_of_work(const Stream* stream) {
    double now = stream->capture ? 0 : host_clock::now();
    return stream->ready > now ? stream->ready : now;
}

void work(cudaStream_t handle, double seconds) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    Stream* stream = stream_of(handle);
    stream->ready = begin_of_work(stream) + seconds;
}

void launch(cudaStream_t handle, double seconds) {
    launches = true;
    counters.launches++;
    host_clock::spend(1e-6 * knobs().launch_us);
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    work(handle, seconds);
    if (Capture* capture = stream_of(handle)->capture) capture->kernels++;
}

static FILE* trace_file() {
    static FILE* file =
        knobs().trace.empty() ? nullptr : fopen((knobs().trace + "." + std::to_string(getpid())).c_str(), "w");
    return file;
}

void trace(const char* format, ...) {
    if (!trace_file()) return;
    char line[500];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(trace_file(), "%.6f thread=%ld %s\n", host_clock::now(), (long)syscall(SYS_gettid), line);
    fflush(trace_file());
}

static cudaError_t is_over(double moment) {
    if (host_clock::now() >= moment) {
        host_knows(moment);
        return cudaSuccess;
    }
    if (knobs().virtual_clock && launches) host_clock::spend(kQuestion);  // else nobody who polls would ever be done
    return cudaErrorNotReady;
}

static cudaError_t wrong(const char* what, int first, int second) {
    fprintf(stderr, "stand-in for CUDA: %s (device %d, device %d)\n", what, first, second);
    return failed(cudaErrorInvalidResourceHandle);
}

extern "C" {

double standin_now() { return host_clock::now(); }
void standin_spend(double seconds) { host_clock::spend(seconds); }
double standin_ready(int device) { return device_ready(device); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    use_device(current_device());
    Stream* stream = new Stream{current_device(), 0, priority, nullptr};
    streams.insert(stream);
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    streams.erase((Stream*)handle);  // not freed: an event's or graph's stream may be asked after
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    if (stream_of(handle)->capture) return failed(cudaErrorStreamCaptureUnsupported);
    counters.stream_waits++;
    host_waits(stream_of(handle)->ready);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) { return is_over(stream_of(handle)->ready); }

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited_for, unsigned) {
    counters.stream_orders++;
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    Event* event = (Event*)waited_for;
    Stream* stream = stream_of(handle);
    if (!event->recorded) return cudaSuccess;
    if (event->capture) join_capture(stream, event->capture);
    if (event->at <= stream->ready) return cudaSuccess;
    if (event->at > stream->ready + 1e-3) {
        trace("wait stream=%p for_ms=%.3f", (void*)handle, 1000 * (event->at - stream->ready));
    }
    stream->ready = event->at;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    counters.events_made++;
    use_device(current_device());
    *event = (cudaEvent_t) new Event{current_device(), 0, false, !(flags & cudaEventDisableTiming), nullptr};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event*)event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t in_stream) {
    counters.events_recorded++;
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    Event* event = (Event*)handle;
    Stream* stream = stream_of(in_stream);
    if (event->device != stream->device) {
        return wrong("an event of one device was recorded in a stream of another", event->device, stream->device);
    }
    event->at = begin_of_work(stream);
    event->recorded = true;
    event->capture = stream->capture;
    if (event->timed) trace("mark stream=%p at=%.6f", (void*)in_stream, event->at);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Event* event = (Event*)handle;
    return event->recorded ? is_over(event->at) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    counters.event_waits++;
    Event* event = (Event*)handle;
    if (event->recorded) host_waits(event->at);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    Event *first = (Event*)from, *second = (Event*)to;
    if (!first->recorded || !second->recorded || !first->timed || !second->timed || first->device != second->device) {
        return wrong("time between events that cannot be compared", first->device, second->device);
    }
    if (host_clock::now() < first->at || host_clock::now() < second->at) return failed(cudaErrorNotReady);
    *ms = (float)(1000 * (second->at - first->at));
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
    function(data);
    return cudaSuccess;
}
}
