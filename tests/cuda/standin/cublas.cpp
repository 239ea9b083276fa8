// cuBLAS and cuBLASLt: every product is one launch.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

#include "costs.h"
#include "gpu.h"

struct Handle {
    cudaStream_t stream;
};

static cublasStatus_t product(cudaStream_t stream) {
    launch(stream, product_seconds());
    return CUBLAS_STATUS_SUCCESS;
}

template <class Descriptor>
static cublasStatus_t make(Descriptor* made) {
    *made = (Descriptor) new char[256]();
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t drop(void* made) {
    delete[] (char*)made;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" {

// Every other product of cuBLAS is this one (build.py): they have the handle first, and nobody looks at the rest.
int standin_product(cublasHandle_t handle) { return product(((Handle*)handle)->stream); }

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { return make(handle); }
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return drop(handle); }
const char* cublasGetStatusString(cublasStatus_t) { return "an error of the stand-in's cuBLAS"; }

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    ((Handle*)handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
    *stream = ((Handle*)handle)->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t found[],
                                              int* count) {
    memset(found, 0, sizeof *found);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t,
                              void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
    return product(stream);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
    return make(made);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) { return drop(made); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType, uint64_t, uint64_t, int64_t) {
    return make(made);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) { return drop(made); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) { return make(made); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) { return drop(made); }
}
