// Lets all ranks of a test share one mapping of each range of the segment. The ranks are threads. Without this file,
// each would map a range at an address of its own, as processes do, and the sanitizers, which watch addresses, would
// not see that the memory is the same. The linker sends the core's calls of mmap and munmap here
// (--wrap=mmap,--wrap=munmap).
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, size_t bytes);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* address, size_t bytes);
}

namespace {

struct Shared {
  void* address;
  size_t bytes;
  int users;
};
std::mutex g_mutex;
std::map<std::pair<ino_t, off_t>, Shared> g_ranges;

}  // namespace

void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat info{};
  if (fd < 0 || fstat(fd, &info) != 0) return __real_mmap(address, bytes, protection, flags, fd, offset);
  std::lock_guard lock(g_mutex);
  auto [at, fresh] = g_ranges.try_emplace({info.st_ino, offset}, Shared{nullptr, bytes, 0});
  if (fresh) at->second.address = __real_mmap(address, bytes, protection, flags, fd, offset);
  if (at->second.bytes != bytes) {
    std::fprintf(stderr, "a range is mapped with different lengths, %zu and %zu\n", at->second.bytes, bytes);
    std::abort();
  }
  void* const shared = at->second.address;
  ++at->second.users;
  if (shared == MAP_FAILED) g_ranges.erase(at);
  return shared;
}

int __wrap_munmap(void* address, size_t bytes) {
  std::lock_guard lock(g_mutex);
  for (auto at = g_ranges.begin(); at != g_ranges.end(); ++at) {
    if (at->second.address != address) continue;
    if (--at->second.users > 0) return 0;
    g_ranges.erase(at);
    break;
  }
  return __real_munmap(address, bytes);
}
