// How often this process asked CUDA for something. A test reads all of them before and after a step.
#pragma once
#include <atomic>

#define COUNTERS(X)                                                                                                 \
    X(launches)        /* kernels, cuDNN and cuBLAS calls, memsets: what the host launched one by one */           \
    X(graph_launches)  /* whole CUDA graphs */                                                                      \
    X(stream_waits)    /* the host waited for a stream */                                                           \
    X(event_waits)     /* the host waited for an event */                                                           \
    X(device_waits)    /* the host waited for a whole device */                                                     \
    X(stream_orders)   /* a stream was made to wait for an event; the host goes on */                               \
    X(events_made)                                                                                                  \
    X(events_recorded)                                                                                              \
    X(copies_to_host)                                                                                               \
    X(copies_to_device)                                                                                             \
    X(copies_on_device)                                                                                             \
    X(overwritten)     /* pinned memory that was written while a copy from it was under way */                      \
    X(collectives)     /* NCCL's, a send or receive included */                                                     \
    X(allocations)     /* cudaMalloc, not torch's own reuse */                                                      \
    X(frees)                                                                                                        \
    X(out_of_memory)

struct Counters {
#define DECLARE(name) std::atomic<long> name{0};
    COUNTERS(DECLARE)
#undef DECLARE
};

extern Counters counters;
