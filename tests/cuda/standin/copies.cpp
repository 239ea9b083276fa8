#include "copies.h"

#include <cstdio>
#include <cstring>
#include <list>
#include <string>

#include "clock.h"
#include "counters.h"
#include "gpu.h"

struct Copy {
    char* memory;  // of the host
    std::string bytes;
    double over;
    bool writes;
};

static std::list<Copy> under_way;

void write_later(char* to, const char* from, size_t bytes, double over) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    under_way.push_back({to, std::string(from, bytes), over, true});
    memset(to, 0xff, bytes);
}

void keep_still(const char* from, size_t bytes, double over) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    under_way.push_back({(char*)from, std::string(from, bytes), over, false});
}

static void end(const Copy& copy) {
    if (copy.writes) {
        memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
    } else if (memcmp(copy.memory, copy.bytes.data(), copy.bytes.size())) {
        counters.overwritten++;
        fprintf(stderr, "stand-in for CUDA: pinned memory was written while %zu bytes of it were on their way to a GPU\n",
                copy.bytes.size());
    }
}

void host_waits(double moment) {
    host_clock::wait_until(moment);
    host_knows(moment);
}

void host_knows(double moment) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    for (auto copy = under_way.begin(); copy != under_way.end();) {
        if (copy->over > moment) {
            ++copy;
            continue;
        }
        end(*copy);
        copy = under_way.erase(copy);
    }
}

void forget_copies(const char* memory, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    under_way.remove_if([=](const Copy& copy) { return copy.memory >= memory && copy.memory < memory + bytes; });
}
