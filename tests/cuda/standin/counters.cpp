#include "counters.h"

Counters counters;

// For tests, by ctypes. The names, with spaces between, and their values in the same order.
extern "C" const char* standin_counter_names() {
#define NAME(name) #name " "
    return COUNTERS(NAME);
#undef NAME
}

extern "C" void standin_counts(long* values) {
#define READ(name) *values++ = counters.name;
    COUNTERS(READ)
#undef READ
}
