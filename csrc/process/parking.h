// Threads that come back to Python when it has begun to end.
#pragma once

namespace phalanx {

/// Have them wait for the end of the process. Returns false, and changes nothing, where the interpreter can't be made to.
///
/// CPython before 3.14 ends a thread that asks for the lock of an interpreter which is ending, by pthread_exit(). That
/// unwinds it like an exception that nobody may catch: through destructors and other functions that must not throw, ours,
/// torch's and pybind11's, and std::terminate() then ends the process with SIGABRT, whatever the script's exit code.
/// From 3.14 on CPython itself has them wait. Source: https://github.com/python/cpython/issues/87135.
bool park_threads_at_end();

}  // namespace phalanx
