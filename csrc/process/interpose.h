// Makes a loaded library call our functions instead of the functions that it calls by default.
//
// park_threads_at_end() uses this for pthread_exit, in the library or program that contains the Python interpreter. The
// block pool uses this for posix_memalign and free, in the table through which torch's libc10.so calls them. These two
// functions allocate and free every CPU tensor, so no other allocator is asked to free a block of the pool; smaller
// blocks, and the blocks of other libraries, stay with glibc. Nothing of torch is linked, and if its library is not
// laid out as expected, nothing is changed. The dynamic loader (dl_iterate_phdr) finds the library, so neither /proc
// nor an environment variable is needed. So the pool works in the same way in a forked rank, in a rank that starts as a
// new program (there, at the end of `import torch`), under phalanx.spawn, and in a process that calls
// phalanx.tune_process().
#pragma once

#include <span>

namespace phalanx {

struct Replacement {
  const char* symbol;
  void* function;
};

/// Make the loaded library with this file name call the replacements; other libraries keep calling the originals.
///
/// Returns false, and changes nothing, if the library is not loaded, does not call all of the originals, or has a table
/// that can't be made writable. During this call, no other thread may call one of the originals for the first time,
/// because the loader would then write to the same table.
bool interpose(const char* library, std::span<const Replacement> replacements);
/// Like interpose(), but for the library or program whose code or data contains `address`.
bool interpose_at(const void* address, std::span<const Replacement> replacements);

}  // namespace phalanx
