// What happens to threads that return to Python after the interpreter has begun to end.
//
// Native threads, daemon threads and the threads of futures run while the interpreter ends, and after it, while the
// process destroys its statics. Four rules keep the script's own exit code:
//
// 1. Native threads share no Python objects. The core owns the queue of finished operations (Completions), so a thread
//    that drops the last reference needs no GIL.
// 2. The memory that they use is never freed. An atexit function takes an extra reference to each group, and so to its
//    running operations and their tensors; statics of the core are leaked.
// 3. A thread that came from Python takes the GIL back with its own thread state (WithoutGil). PyGILState_Ensure() would
//    search for that state, and read freed memory once the interpreter is gone.
// 4. A thread that comes too late for the GIL waits for the end of the process, see below. For CPython before 3.14 the
//    core replaces the call that would end it (see interpose.h). That also covers Gloo's own threads, and the frames of
//    torch between a callback and us, in which we could not catch the unwinding.
#pragma once

namespace phalanx {

/// Make threads that ask for the GIL of an ending interpreter wait for the end of the process. Returns false, and changes
/// nothing, if this interpreter can't be made to.
///
/// CPython before 3.14 ends such a thread with pthread_exit(). That unwinds its stack like an exception that nobody may
/// catch; when it reaches a function that must not throw, such as a destructor of ours, torch's or pybind11's,
/// std::terminate() ends the process with SIGABRT, whatever the script's exit code. From 3.14 on CPython itself lets
/// them wait. Source: https://github.com/python/cpython/issues/87135.
bool park_threads_at_end();

}  // namespace phalanx
