// Puts functions of ours in the place of the allocator's where a loaded library calls it.
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

}  // namespace phalanx
