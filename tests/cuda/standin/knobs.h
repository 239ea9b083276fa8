// What a person can set: environment variables, read once when the library is loaded. tests/cuda/README.md explains them.
#pragma once
#include <string>

struct Knobs {
    int devices;            // FAKE_DEVICES: GPUs of this machine, 16 at most
    std::string name;       // FAKE_NAME: what each GPU calls itself
    int cc;                 // FAKE_CC: compute capability, 70 is a V100
    double gib;             // FAKE_GIB: memory of each GPU
    double ws_mib;          // FAKE_WS_MIB: memory that each convolution asks for beside its tensors (cuDNN's workspace)
    double kernel_us;       // FAKE_KERNEL_US: a kernel on the GPU
    double conv_us;         // FAKE_CONV_US: a cuDNN call on the GPU
    double gemm_us;         // FAKE_GEMM_US: a cuBLAS call on the GPU
    double launch_us;       // FAKE_LAUNCH_US: what the host spends on each launch
    double link_gbps;       // FAKE_LINK_GBPS: what each rank's link carries each way
    double nccl_us;         // FAKE_NCCL_US: what each collective costs beside its bytes
    double nccl_limit_s;    // FAKE_NCCL_LIMIT_S: real seconds for which a rank waits for the others' collective
    bool virtual_clock;     // FAKE_CLOCK=virtual: no wait takes real time; real: every wait does
    std::string trace;      // FAKE_TRACE: writes FILE.PID, a line for each collective, timed mark and long wait
};

const Knobs& knobs();
