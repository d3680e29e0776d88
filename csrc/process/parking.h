// Parks threads that return to Python after the interpreter has begun to shut down.
//
// Native threads, daemon threads and the threads of futures still run while the interpreter shuts down, and after that,
// while the process destroys its statics. If one of them crashed, the script's own exit code would be lost. Four rules
// prevent this:
//
// 1. Native threads share no Python objects. The core owns the queue of finished operations (Completions), so a thread
//    that drops the last reference needs no GIL.
// 2. The memory that these threads use is never freed. An atexit function takes an extra reference to each group, and
//    so to its running operations and their tensors; statics of the core are leaked.
// 3. A thread that came from Python takes the GIL back with its own thread state (WithoutGil). PyGILState_Ensure() would
//    search for that state, and read freed memory once the interpreter is gone.
// 4. A thread that asks for the GIL too late waits for the end of the process, see park_threads_at_end(). For CPython
//    before 3.14, the core replaces the call that would end the thread (see interpose.h). Replacing the call also
//    covers Gloo's own threads, and stacks with frames of torch between a Python callback and our code: in torch's
//    frames, we could not catch the unwinding.
#pragma once

namespace phalanx {

/// When the interpreter shuts down, make threads that ask for the GIL wait for the end of the process. Returns false,
/// and changes nothing, if this interpreter does not allow that.
///
/// CPython before 3.14 ends such a thread with pthread_exit(), which unwinds the thread's stack like an exception that
/// nobody may catch. When the unwinding reaches a function that must not throw, such as a destructor of ours, torch's
/// or pybind11's, std::terminate() ends the process with SIGABRT, whatever the script's exit code. From 3.14 on,
/// CPython itself makes such threads wait. Source: https://github.com/python/cpython/issues/87135.
bool park_threads_at_end();

}  // namespace phalanx
