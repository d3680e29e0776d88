// Puts functions of ours in the place of others' where a loaded library calls them.
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
