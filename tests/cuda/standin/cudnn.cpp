// cuDNN: every convolution and every BatchNorm is one launch, with one engine to choose from, which may ask for a
// workspace.
#include <cudnn.h>

#include <cstdlib>

#include "costs.h"
#include "gpu.h"
#include "knobs.h"

struct Handle {
    cudaStream_t stream;
};

static const size_t kDescriptorBytes = 64;  // nobody looks into one

static cudnnStatus_t run(cudnnHandle_t handle) {
    launch(((Handle*)handle)->stream, convolution_seconds());
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t none(size_t* bytes) {
    *bytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

#define DESCRIPTOR(Name)                                           \
    cudnnStatus_t cudnnCreate##Name(cudnn##Name##_t* made) {       \
        *made = (cudnn##Name##_t)malloc(kDescriptorBytes);         \
        return CUDNN_STATUS_SUCCESS;                               \
    }                                                              \
    cudnnStatus_t cudnnDestroy##Name(cudnn##Name##_t made) {       \
        free((void*)made);                                         \
        return CUDNN_STATUS_SUCCESS;                               \
    }

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    *handle = (cudnnHandle_t) new Handle{};
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    delete (Handle*)handle;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    ((Handle*)handle)->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
    *stream = ((Handle*)handle)->stream;
    return CUDNN_STATUS_SUCCESS;
}

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t) { return "an error of the stand-in's cuDNN"; }

DESCRIPTOR(TensorDescriptor)
DESCRIPTOR(FilterDescriptor)
DESCRIPTOR(ConvolutionDescriptor)
DESCRIPTOR(ActivationDescriptor)
DESCRIPTOR(DropoutDescriptor)
DESCRIPTOR(PoolingDescriptor)

// BatchNorm. Of the long lists only the handle and the size asked for matter.

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
    return none(bytes);
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
    return none(bytes);
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                   cudnnBatchNormOps_t,
                                                                   const cudnnActivationDescriptor_t,
                                                                   const cudnnTensorDescriptor_t, size_t* bytes) {
    return none(bytes);
}

cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t, const void*, const void*, double, void*, void*,
    double, void*, void*, cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
    return run(handle);
}

cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t,
    void*, const cudnnTensorDescriptor_t, const void*, const void*, void*, void*, double, const void*, const void*,
    cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
    return run(handle);
}

cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t handle, cudnnBatchNormMode_t, const void*,
                                                      const void*, const cudnnTensorDescriptor_t, const void*,
                                                      const cudnnTensorDescriptor_t, void*,
                                                      const cudnnTensorDescriptor_t, const void*, const void*,
                                                      const void*, const void*, double) {
    return run(handle);
}

// Convolutions go through the back end's descriptors: a heuristic that finds one engine, whose plan is then executed.

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* made) {
    *made = (cudnnBackendDescriptor_t)malloc(kDescriptorBytes);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
    free((void*)made);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                       cudnnBackendAttributeType_t, int64_t, const void*) {
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

static int64_t number_of(cudnnBackendAttributeName_t name) {
    bool workspace = name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE;
    return workspace ? (int64_t)(knobs().ws_mib * (1 << 20)) : 0;
}

static int64_t descriptors_of(cudnnBackendAttributeName_t name) {
    return name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* got, void* out) {
    int64_t count = 1;
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        count = descriptors_of(name);
    } else if (type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE) {
        count = 0;
    } else if (out && wanted > 0) {
        if (type == CUDNN_TYPE_INT64) *(int64_t*)out = number_of(name);
        if (type == CUDNN_TYPE_INT32) *(int32_t*)out = 0;
        if (type == CUDNN_TYPE_CHAR) *(char*)out = 0;
    }
    if (got) *got = count;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
    return run(handle);
}
}
