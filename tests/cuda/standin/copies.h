// Copies between a GPU and pinned memory, for which the host does not wait. Until it has, what was to be written holds
// 0xff and nothing else, and what is being read has to stay as it is.
#pragma once
#include <cstddef>

void write_later(char* to, const char* from, size_t bytes, double over);  // to the host's memory; over: when it is done
void keep_still(const char* from, size_t bytes, double over);             // from the host's memory
void host_waits(double moment);  // until this moment on a GPU's time line
void host_knows(double moment);  // that the GPU has come to it: what was over by then is done
void forget_copies(const char* memory, size_t bytes);  // memory that is given back
