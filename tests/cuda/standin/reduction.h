// Sums, least and largest of small buffers. Numbers of 16 bits are passed on from rank 0 as they are.
#pragma once
#include <nccl.h>

#include <algorithm>
#include <string>
#include <vector>

inline size_t bytes_of(int type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: return 4;
    }
}

template <class Number>
void reduce_into(std::string& total, const std::string& other, int op) {
    Number* sums = (Number*)&total[0];
    const Number* added = (const Number*)other.data();
    for (size_t i = 0; i < total.size() / sizeof(Number); i++) {
        if (op == ncclMin) sums[i] = std::min(sums[i], added[i]);
        else if (op == ncclMax) sums[i] = std::max(sums[i], added[i]);
        else if (op == ncclProd) sums[i] *= added[i];
        else sums[i] += added[i];
    }
}

inline std::string reduced(const std::vector<std::string>& given, int type, int op) {
    std::string total = given[0];
    for (size_t rank = 1; rank < given.size(); rank++) {
        if (type == ncclFloat32) reduce_into<float>(total, given[rank], op);
        if (type == ncclFloat64) reduce_into<double>(total, given[rank], op);
        if (type == ncclInt32) reduce_into<int>(total, given[rank], op);
        if (type == ncclInt64) reduce_into<long>(total, given[rank], op);
        if (type == ncclUint8) reduce_into<unsigned char>(total, given[rank], op);
    }
    return total;
}
