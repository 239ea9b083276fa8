/* libcuda.so.1, as far as anybody looks into it: which GPUs this process has a context on. build.py adds the rest. */
extern long standin_visible_context(int device) __attribute__((weak));
extern int cudaGetDevice(int *device) __attribute__((weak));

int cuInit(unsigned flags) { return 0; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = standin_visible_context ? standin_visible_context(device) > 0 : 1;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    int device = 0;
    if (cudaGetDevice) cudaGetDevice(&device);
    *context = standin_visible_context && standin_visible_context(device) ? (void *)context : 0;
    return 0;
}
