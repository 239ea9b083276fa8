// The host's clock, in seconds. Real: the machine's own, and who waits for the GPU sleeps. Virtual: it begins at 0 and
// moves only when the host launches something or waits for the GPU, so that no load on the machine can change a figure.
#pragma once

namespace host_clock {
double now();
void spend(double seconds);      // the host works
void wait_until(double moment);  // the host waits for a moment on a GPU's time line
}  // namespace host_clock
