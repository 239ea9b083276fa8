// Functions of CUDA that the stand-in does not know do nothing and report success; FAKE_TELL_UNKNOWN=1 names each once.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

extern "C" void standin_unknown(const char* name) {
    static const bool tells = getenv("FAKE_TELL_UNKNOWN") != nullptr;
    static std::set<std::string> told;
    static std::mutex lock;
    if (!tells) return;
    std::lock_guard<std::mutex> guard(lock);
    if (told.insert(name).second) fprintf(stderr, "stand-in for CUDA: %s does nothing\n", name);
}
