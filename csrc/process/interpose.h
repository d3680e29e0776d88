// Replaces functions that a loaded library calls with ours.
//
// posix_memalign and free are replaced in the table through which torch's libc10.so calls them. With those two torch
// allocates and frees a tensor on the CPU, so no pointer of the pool reaches another allocator; smaller blocks and
// those of other libraries stay glibc's. Nothing of torch is linked, and if its library is not laid out as expected,
// nothing is done. Which library allocates is asked of the dynamic loader (dladdr), which needs no /proc. It needs no
// environment variable, and works alike in a forked rank, in one that executes the command (at the end of import
// torch), under phalanx.spawn, and in a process that calls phalanx.tune_process().
#pragma once

#include <span>

namespace phalanx {

struct Replacement {
  const char* symbol;
  void* function;
};

/// Have the loaded library of this file name call the replacements; others still call what they did.
///
/// Returns false, and changes nothing, if it is not loaded or does not call all of them. Call it while no other thread
/// calls them for the first time.
bool interpose(const char* library, std::span<const Replacement> replacements);
/// The same for the library, or the program itself, that holds an address.
bool interpose_at(const void* address, std::span<const Replacement> replacements);

}  // namespace phalanx
