// NCCL: the ranks meet in every call, so that a rank that calls something else, or nothing, is found and named. Each
// call brings the moment at which its stream gets there; all are done when the last of them has come and the bytes have
// gone through the links. A call returns when all ranks have made it, on the machine's clock; on the time line its host
// goes on at once, as with NCCL.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "clock.h"
#include "costs.h"
#include "counters.h"
#include "gpu.h"
#include "knobs.h"
#include "mesh.h"
#include "reduction.h"

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL };
static const char* kNames[] = {"all_reduce", "reduce", "broadcast", "all_gather",
                               "reduce_scatter", "gather", "scatter", "all_to_all"};

struct Call {
    int kind, type, op, root;
    size_t count;  // elements, as the caller of NCCL counts them
    double start;  // of this rank

    bool matches(const Call& other) const {
        return kind == other.kind && type == other.type && op == other.op && root == other.root && count == other.count;
    }
};

struct Comm {
    Mesh mesh;
    long calls = 0;
    std::mutex lock;
    Comm(const char* folder, int size, int rank) : mesh(folder, size, rank) {}
};

static ncclResult_t gone(const Comm* comm, const char* call) {
    fprintf(stderr, "stand-in for NCCL: rank %d, call %ld, %s: another rank has ended, or did not come within %g s\n",
            comm->mesh.rank, comm->calls, call, knobs().nccl_limit_s);
    return ncclRemoteError;
}

// ---------------------------------------------------------------------------------------------------------------------
// What goes in and comes out

static bool of_all_ranks(int kind) {  // whether the larger buffer is `count` elements for each rank
    return kind == ALL_GATHER || kind == REDUCE_SCATTER || kind == GATHER || kind == SCATTER || kind == ALL_TO_ALL;
}

static size_t whole_bytes(const Call& call, int size) {
    return call.count * bytes_of(call.type) * (of_all_ranks(call.kind) ? size : 1);
}

// Bytes that each rank's link carries each way (nccl-tests' bus factors, which are NCCL's rings').
static double travelling_bytes(const Call& call, int size) {
    double whole = (double)whole_bytes(call, size);
    if (call.kind == ALL_REDUCE) return 2 * whole * (size - 1) / size;
    return of_all_ranks(call.kind) ? whole * (size - 1) / size : size > 1 ? whole : 0;
}

static size_t given_bytes(const Call& call, int size, int rank) {
    bool by_root = call.kind == BROADCAST || call.kind == SCATTER;
    if (by_root && rank != call.root) return 0;
    bool in_parts = call.kind == REDUCE_SCATTER || call.kind == SCATTER || call.kind == ALL_TO_ALL;
    return call.count * bytes_of(call.type) * (in_parts ? size : 1);
}

static std::string part(const std::string& whole, int rank, int size) {
    size_t bytes = whole.size() / size;
    return whole.substr(rank * bytes, bytes);
}

static std::string joined(const std::vector<std::string>& given) {
    std::string all;
    for (const std::string& one : given) all += one;
    return all;
}

static std::string result_of(const Call& call, const std::vector<std::string>& given, int rank) {
    int size = (int)given.size();
    switch (call.kind) {
        case ALL_REDUCE: return reduced(given, call.type, call.op);
        case REDUCE: return rank == call.root ? reduced(given, call.type, call.op) : "";
        case BROADCAST: return given[call.root];
        case ALL_GATHER: return joined(given);
        case REDUCE_SCATTER: return part(reduced(given, call.type, call.op), rank, size);
        case GATHER: return rank == call.root ? joined(given) : "";
        case SCATTER: return part(given[call.root], rank, size);
    }
    std::string mine;  // of all_to_all
    for (const std::string& one : given) mine += part(one, rank, size);
    return mine;
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives: all ranks bring theirs to rank 0, which compares, adds up and answers

struct Answer {
    double end;  // negative: the calls differ
    size_t bytes;
};

static void send_text(Mesh& mesh, int peer, const std::string& text) { mesh.send(peer, text.data(), text.size()); }

static bool receive_text(Mesh& mesh, int peer, std::string& text, size_t bytes) {
    text.resize(bytes);
    return mesh.receive(peer, &text[0], bytes);
}

static bool answer_all(Comm* comm, const Call& own, std::vector<std::string>& given, bool carried, double& end) {
    Mesh& mesh = comm->mesh;
    double start = own.start;
    bool alike = true;
    for (int peer = 1; peer < mesh.size; peer++) {
        Call call;
        if (!mesh.receive(peer, &call, sizeof call)) return false;
        if (!call.matches(own)) {
            fprintf(stderr, "stand-in for NCCL: call %ld is %s of %zu elements on rank 0, %s of %zu on rank %d\n",
                    comm->calls, kNames[own.kind], own.count, kNames[call.kind], call.count, peer);
            alike = false;
        } else if (carried && !receive_text(mesh, peer, given[peer], given_bytes(own, mesh.size, peer))) {
            return false;
        }
        start = std::max(start, call.start);
    }
    end = alike ? start + link_seconds(travelling_bytes(own, mesh.size)) : -1;
    for (int peer = 1; peer < mesh.size; peer++) {
        std::string result = carried && alike ? result_of(own, given, peer) : "";
        Answer answer{end, result.size()};
        mesh.send(peer, &answer, sizeof answer);
        send_text(mesh, peer, result);
    }
    return true;
}

static bool ask(Comm* comm, const Call& own, const std::string& given, std::string& result, double& end) {
    Answer answer;
    comm->mesh.send(0, &own, sizeof own);
    send_text(comm->mesh, 0, given);
    if (!comm->mesh.receive(0, &answer, sizeof answer)) return false;
    end = answer.end;
    return receive_text(comm->mesh, 0, result, answer.bytes);
}

static void busy_until(Stream* stream, double end) {
    std::lock_guard<std::recursive_mutex> guard(gpu_lock);
    stream->ready = std::max(stream->ready, end);
}

static ncclResult_t collective(Kind kind, const void* from, void* to, size_t count, int type, int op, int root,
                               ncclComm_t handle, cudaStream_t in_stream) {
    Comm* comm = (Comm*)handle;
    std::lock_guard<std::mutex> guard(comm->lock);
    counters.collectives++;
    comm->calls++;
    host_clock::spend(1e-6 * knobs().launch_us);
    Stream* stream = stream_of(in_stream);
    if (stream->capture) return ncclInvalidUsage;  // the stand-in's graphs hold no communication
    int size = comm->mesh.size, rank = comm->mesh.rank;
    Call call{kind, type, op, root, count, begin_of_work(stream)};
    bool carried = whole_bytes(call, size) <= kMovedBytes;
    std::vector<std::string> given(size);
    if (carried) given[rank].assign(behind(from), given_bytes(call, size, rank));
    std::string result;
    double end = 0;
    bool met = rank ? ask(comm, call, given[rank], result, end) : answer_all(comm, call, given, carried, end);
    if (!met) return gone(comm, kNames[kind]);
    if (end < 0) return ncclInvalidUsage;
    if (!rank && carried) result = result_of(call, given, 0);
    if (!result.empty()) memcpy(behind(to), result.data(), result.size());
    trace("nccl %s stream=%p bytes=%zu start=%.6f end=%.6f", kNames[kind], (void*)in_stream, whole_bytes(call, size),
          call.start, end);
    busy_until(stream, end);
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sends and receives, of one group at once

struct Transfer {
    Comm* comm;
    bool sends;
    int peer;
    void* data;
    size_t bytes;
    Stream* stream;
    double start, peer_start;
    std::string carried;
};

struct TransferHead {
    bool sends;
    size_t bytes;
    double start;
    size_t carried;
};

static thread_local int group_depth;
static thread_local std::vector<Transfer> group;
static const size_t kCarried = 4096;  // so little that all of a group fits into the sockets

static void announce(const Transfer& t) {
    std::string data;
    if (t.sends && t.bytes <= kCarried) data.assign(behind(t.data), t.bytes);
    TransferHead head{t.sends, t.bytes, t.start, data.size()};
    t.comm->mesh.send(t.peer, &head, sizeof head);
    send_text(t.comm->mesh, t.peer, data);
}

// The next of our transfers with this peer that does the opposite and is not yet matched.
static Transfer* match(std::vector<Transfer>& all, const Transfer& mine, bool peer_sends) {
    for (Transfer& t : all)
        if (t.comm == mine.comm && t.peer == mine.peer && t.sends != peer_sends && t.peer_start < 0) return &t;
    return nullptr;
}

static bool hear(std::vector<Transfer>& all, const Transfer& mine) {
    TransferHead head;
    std::string data;
    if (!mine.comm->mesh.receive(mine.peer, &head, sizeof head)) return false;
    if (!receive_text(mine.comm->mesh, mine.peer, data, head.carried)) return false;
    Transfer* own = match(all, mine, head.sends);
    if (!own || own->bytes != head.bytes) {
        fprintf(stderr, "stand-in for NCCL: rank %d and rank %d do not agree on what they send each other\n",
                mine.comm->mesh.rank, mine.peer);
        return false;
    }
    own->peer_start = head.start;
    if (head.sends) memcpy(behind(own->data), data.data(), data.size());
    return true;
}

static void to_itself(std::vector<Transfer>& all, Transfer& sent) {
    for (Transfer& t : all) {
        if (t.comm != sent.comm || t.peer != sent.peer || t.sends || t.peer_start >= 0) continue;
        t.peer_start = sent.peer_start = std::max(t.start, sent.start);
        if (t.bytes <= kMovedBytes) memmove(behind(t.data), behind(sent.data), t.bytes);
        return;
    }
}

static ncclResult_t exchange() {
    std::vector<Transfer> all;
    all.swap(group);
    for (Transfer& t : all) t.start = begin_of_work(t.stream);
    for (Transfer& t : all) {
        if (t.peer != t.comm->mesh.rank) announce(t);
        else if (t.sends) to_itself(all, t);
    }
    for (Transfer& t : all)
        if (t.peer != t.comm->mesh.rank && !hear(all, t)) return gone(t.comm, "send or receive");
    for (Transfer& t : all) busy_until(t.stream, std::max(t.start, t.peer_start) + link_seconds((double)t.bytes));
    return ncclSuccess;
}

static ncclResult_t transfer(bool sends, const void* data, size_t count, int type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    counters.collectives++;
    host_clock::spend(1e-6 * knobs().launch_us);
    group.push_back({(Comm*)comm, sends, peer, (void*)data, count * bytes_of(type), stream_of(stream), 0, -1, ""});
    return group_depth ? ncclSuccess : exchange();
}

// ---------------------------------------------------------------------------------------------------------------------
// Communicators

// Ranks that meet have one time: virtual clocks begin with each process.
static bool set_clocks(Mesh& mesh) {
    double latest = host_clock::now();
    for (int peer = 1; mesh.rank == 0 && peer < mesh.size; peer++) {
        double theirs;
        if (!mesh.receive(peer, &theirs, sizeof theirs)) return false;
        latest = std::max(latest, theirs);
    }
    for (int peer = 1; mesh.rank == 0 && peer < mesh.size; peer++) mesh.send(peer, &latest, sizeof latest);
    if (mesh.rank) {
        mesh.send(0, &latest, sizeof latest);
        if (!mesh.receive(0, &latest, sizeof latest)) return false;
    }
    host_clock::wait_until(latest);
    return true;
}

static ncclResult_t meet(ncclComm_t* made, int size, const ncclUniqueId& id, int rank) {
    Comm* comm = new Comm(id.internal, size, rank);
    *made = (ncclComm_t)comm;
    if (size == 1) rmdir(id.internal);
    return comm->mesh.broken || !set_clocks(comm->mesh) ? gone(comm, "meeting") : ncclSuccess;
}

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    strncpy(id->internal, Mesh::new_folder().c_str(), sizeof id->internal - 1);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    return meet(comm, size, id, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    return meet(comm, size, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
    return meet(comm, size, ids[0], rank);
}

ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { return ncclInvalidUsage; }

// Not freed: another thread may still wait in it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ((Comm*)comm)->mesh.cut();
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
    *size = ((Comm*)comm)->mesh.size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = ((Comm*)comm)->mesh.rank;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in's NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return "see the line above that begins with 'stand-in for NCCL'"; }

ncclResult_t ncclGroupStart() {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return --group_depth ? ncclSuccess : exchange(); }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective(ALL_REDUCE, from, to, count, type, op, 0, comm, stream);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE, from, to, count, type, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(BROADCAST, from, to, count, type, 0, root, comm, stream);
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return collective(BROADCAST, data, data, count, type, 0, root, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(ALL_GATHER, from, to, count, type, 0, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE_SCATTER, from, to, count, type, op, 0, comm, stream);
}

ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    return collective(GATHER, from, to, count, type, 0, root, comm, stream);
}

ncclResult_t ncclScatter(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    return collective(SCATTER, from, to, count, type, 0, root, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    return collective(ALL_TO_ALL, from, to, count, type, 0, 0, comm, stream);
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return transfer(true, data, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return transfer(false, data, count, type, peer, comm, stream);
}
}
