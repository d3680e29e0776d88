// Makes a loaded library call our functions instead of the functions that it calls by default.
//
// The block pool uses this for posix_memalign and free, in the table through which torch's libc10.so calls them. These
// two functions allocate and free every CPU tensor, so no pointer of the pool reaches another allocator; smaller
// blocks, and the blocks of other libraries, stay with glibc. Nothing of torch is linked, and if its library is not
// laid out as expected, nothing is changed. The dynamic loader (dl_iterate_phdr) finds the library, so neither /proc
// nor an environment variable is needed. All this works the same way in a forked rank, in a rank that executes the
// command (at the end of import torch), under phalanx.spawn, and in a process that calls phalanx.tune_process().
#pragma once

#include <span>

namespace phalanx {

struct Replacement {
  const char* symbol;
  void* function;
};

/// Make the loaded library with this file name call the replacements; other libraries keep calling the originals.
///
/// Returns false, and changes nothing, if the library is not loaded or does not call all of the originals. During this
/// call, no other thread may call one of the originals for the first time, because the loader would then write to the
/// same table.
bool interpose(const char* library, std::span<const Replacement> replacements);
/// The same for the library or program whose code or data contains `address`.
bool interpose_at(const void* address, std::span<const Replacement> replacements);

}  // namespace phalanx
