#include "clock.h"

#include <time.h>

#include <atomic>

#include "knobs.h"

namespace host_clock {

static std::atomic<double> virtual_now{0};

static double real_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

double now() { return knobs().virtual_clock ? virtual_now.load() : real_now(); }

static void sleep_until(double moment) {
    for (double left = moment - real_now(); left > 0; left = moment - real_now()) {
        if (left < 50e-6) continue;  // a sleep would take longer
        timespec pause{(time_t)left, (long)(1e9 * (left - (time_t)left))};
        nanosleep(&pause, nullptr);
    }
}

void spend(double seconds) {
    if (seconds <= 0) return;
    if (!knobs().virtual_clock) {
        for (double end = real_now() + seconds; real_now() < end;) continue;  // the host is busy, not asleep
        return;
    }
    for (double seen = virtual_now; !virtual_now.compare_exchange_weak(seen, seen + seconds);) continue;
}

void wait_until(double moment) {
    if (!knobs().virtual_clock) return sleep_until(moment);
    for (double seen = virtual_now; seen < moment && !virtual_now.compare_exchange_weak(seen, moment);) continue;
}

}  // namespace host_clock
