#pragma once
#include <map>

#include "gpu.h"

// A CUDA graph while it is captured and afterwards: only how long it takes and how many kernels it has are kept.
struct Capture {
    unsigned long long id;
    Stream* origin;
    std::map<Stream*, double> joined;  // each stream in it, and the moment up to which it had work before
    long kernels;
    double seconds;
};

void join_capture(Stream* stream, Capture* capture);  // by an event that was recorded in a captured stream
