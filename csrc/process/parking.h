// Threads that come back to Python when it has begun to end.
//
// Native threads, daemon threads and the threads of futures run while the interpreter ends, and after it, while the
// process destroys its statics. Four rules keep the script's own exit code:
//
// 1. What native threads share is never Python's. The core owns the queue of finished operations (Completions), and a
//    thread that drops the last reference needs no GIL.
// 2. What they read and write stays. An atexit function gives each group one reference too many, with its running
//    operations and their tensors; statics of the core are leaked.
// 3. A thread that came from Python takes the GIL by the state that it had (WithoutGil). PyGILState_Ensure() looks for
//    one, and reads freed memory once the interpreter is gone.
// 4. A thread that comes too late waits for the end of the process, see below. For CPython before 3.14 the core
//    replaces the call that would end it (see interpose.h), which also helps Gloo's own threads wherever the core is
//    loaded. Catching the unwinding in our frames would leave out those of torch, through which a callback or a loop
//    over dist.recv comes back.
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
