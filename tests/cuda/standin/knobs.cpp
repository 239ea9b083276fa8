#include "knobs.h"

#include <algorithm>
#include <cstdlib>

static std::string text(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

static double number(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value && *value ? atof(value) : otherwise;
}

static Knobs read() {
    Knobs k;
    k.devices = std::min((int)number("FAKE_DEVICES", 1), 16);
    k.name = text("FAKE_NAME", "Stand-in GPU");
    k.cc = (int)number("FAKE_CC", 86);
    k.gib = number("FAKE_GIB", 16);
    k.ws_mib = number("FAKE_WS_MIB", 0);
    k.kernel_us = number("FAKE_KERNEL_US", 5);
    k.conv_us = number("FAKE_CONV_US", k.kernel_us);
    k.gemm_us = number("FAKE_GEMM_US", k.kernel_us);
    k.virtual_clock = text("FAKE_CLOCK", "real") == "virtual";
    // ResNet-152 (fp32, torch 2.15, a Xeon): 1,351 launches take the host 24 ms, Python and dispatcher included. On the
    // real clock these take their own time.
    k.launch_us = number("FAKE_LAUNCH_US", k.virtual_clock ? 17.8 : 0);
    k.link_gbps = number("FAKE_LINK_GBPS", 80);
    k.nccl_us = number("FAKE_NCCL_US", 50);
    k.nccl_limit_s = number("FAKE_NCCL_LIMIT_S", 60);
    k.trace = text("FAKE_TRACE", "");
    return k;
}

const Knobs& knobs() {
    static Knobs found = read();
    return found;
}
