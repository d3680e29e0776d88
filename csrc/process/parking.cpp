#include "process/parking.h"

#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <array>

#include "process/interpose.h"

namespace phalanx {
namespace {

// Set once, before anything calls the function below.
int (*g_is_finalizing)() = nullptr;

/// Replaces pthread_exit(), which CPython calls to end a thread.
[[noreturn]] void park(void* result) {
  if (!g_is_finalizing()) pthread_exit(result);
  for (;;) pause();
}

}  // namespace

bool park_threads_at_end() {
  for (const char* name : {"Py_IsFinalizing", "_Py_IsFinalizing"})  // public since 3.13
    if (void* const found = dlsym(RTLD_DEFAULT, name); found != nullptr && g_is_finalizing == nullptr)
      g_is_finalizing = reinterpret_cast<int (*)()>(found);
  const std::array<Replacement, 1> replacements{{{"pthread_exit", reinterpret_cast<void*>(&park)}}};
  return g_is_finalizing != nullptr && interpose_at(reinterpret_cast<const void*>(&PyEval_RestoreThread), replacements);
}

}  // namespace phalanx
