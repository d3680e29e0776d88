// Makes a loaded library call our functions instead of those that it calls now.
//
// The block pool uses it for posix_memalign and free, in the table through which torch's libc10.so calls them. These two
// allocate and free every CPU tensor, so no pointer of the pool reaches another allocator; smaller blocks and those of
// other libraries stay glibc's. Nothing of torch is linked, and if its library is not laid out as expected, nothing is
// done. The dynamic loader (dladdr) finds the library, so neither /proc nor an environment variable is needed. It works
// alike in a forked rank, in one that executes the command (at the end of import torch), under phalanx.spawn, and in a
// process that calls phalanx.tune_process().
#pragma once

#include <span>

namespace phalanx {

struct Replacement {
  const char* symbol;
  void* function;
};

/// Make the loaded library of this file name call the replacements; other libraries keep calling the originals.
///
/// Returns false, and changes nothing, if it is not loaded or does not call all of the originals. No other thread may be
/// making its first call of one of them meanwhile, because the loader then writes the same table.
bool interpose(const char* library, std::span<const Replacement> replacements);
/// The same for the library or program whose code or data contains `address`.
bool interpose_at(const void* address, std::span<const Replacement> replacements);

}  // namespace phalanx
