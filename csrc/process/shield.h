// Shields a process that works for another one from signals that are meant for its owner.
#pragma once

#include <sys/types.h>

#include <vector>

namespace phalanx {

/// From now on this process obeys these signals from `owner` and from itself alone; from anybody once `owner` has ended.
///
/// What it does about a signal that it obeys is what it did before this call. What it forks obeys everybody, as before.
/// A terminal is neither. Throws std::system_error.
void obey_only(pid_t owner, const std::vector<int>& signals);

}  // namespace phalanx
