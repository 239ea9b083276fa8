#include "mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "knobs.h"

static int limit_ms() { return (int)(1000 * knobs().nccl_limit_s); }

static sockaddr_un address_of(const std::string& folder, int rank) {
    sockaddr_un address{AF_UNIX, {}};
    strncpy(address.sun_path, (folder + "/" + std::to_string(rank)).c_str(), sizeof address.sun_path - 1);
    return address;
}

static bool readable(int socket) {
    pollfd question{socket, POLLIN, 0};
    return poll(&question, 1, limit_ms()) == 1;
}

static int connect_to(const std::string& folder, int rank) {
    sockaddr_un address = address_of(folder, rank);
    for (int waited_ms = 0; waited_ms < limit_ms(); waited_ms++) {  // until that rank listens
        int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(made, (sockaddr*)&address, sizeof address) == 0) return made;
        close(made);
        usleep(1000);
    }
    return -1;
}

std::string Mesh::new_folder() {
    char name[] = "/tmp/cuda-standin-XXXXXX";
    return mkdtemp(name) ? name : "";
}

Mesh::Mesh(const std::string& folder, int size, int rank) : size(size), rank(rank), sockets(size, -1) {
    if (size > 1) meet(folder);
}

Mesh::~Mesh() {
    for (int socket : sockets)
        if (socket >= 0) close(socket);
}

// Each rank calls those below it, and is called by those above.
void Mesh::meet(const std::string& folder) {
    sockaddr_un own = address_of(folder, rank);
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    broken = bind(door, (sockaddr*)&own, sizeof own) || listen(door, size);
    for (int peer = 0; peer < rank && !broken; peer++) {
        sockets[peer] = connect_to(folder, peer);
        broken = sockets[peer] < 0 || !send(peer, &this->rank, sizeof rank);
    }
    for (int waiting = size - 1 - rank; waiting > 0 && !broken; waiting--) {
        int peer = -1, caller = readable(door) ? accept4(door, nullptr, nullptr, SOCK_CLOEXEC) : -1;
        broken = caller < 0 || recv(caller, &peer, sizeof peer, MSG_WAITALL) != sizeof peer;
        if (!broken) sockets[peer] = caller;
    }
    close(door);
    unlink(own.sun_path);
    rmdir(folder.c_str());  // the last one succeeds
}

bool Mesh::send(int peer, const void* bytes, size_t count) {
    const char* at = (const char*)bytes;
    while (count) {
        ssize_t sent = ::send(sockets[peer], at, count, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        at += sent;
        count -= sent;
    }
    return true;
}

bool Mesh::receive(int peer, void* bytes, size_t count) {
    char* at = (char*)bytes;
    while (count) {
        ssize_t got = readable(sockets[peer]) ? recv(sockets[peer], at, count, 0) : -1;
        if (got <= 0) return false;
        at += got;
        count -= got;
    }
    return true;
}

void Mesh::cut() {
    for (int socket : sockets)
        if (socket >= 0) shutdown(socket, SHUT_RDWR);
}
