// Connections between the ranks of one NCCL communicator: a Unix socket for each pair, in a folder of their own.
#pragma once
#include <string>
#include <vector>

class Mesh {
   public:
    static std::string new_folder();
    Mesh(const std::string& folder, int size, int rank);  // meets all others; see `broken`
    ~Mesh();
    bool send(int peer, const void* bytes, size_t count);
    bool receive(int peer, void* bytes, size_t count);  // false: the peer is gone, or silent for too long
    void cut();                                         // from another thread: whoever waits here gets false

    const int size, rank;
    bool broken = false;

   private:
    void meet(const std::string& folder);
    std::vector<int> sockets;  // by rank; -1 for this one
};
