// Shields a process that works for another one from signals that are meant for its owner.
#pragma once

#include <sys/types.h>

#include <vector>

namespace phalanx {

/// From now on this process obeys these signals from `owner` and from itself alone; from anybody once `owner` has ended.
///
/// A signal that it obeys has the effect that it had before this call. Its forked children obey everybody, as before.
/// A terminal counts as neither sender. Throws std::system_error.
void obey_only(pid_t owner, const std::vector<int>& signals);

}  // namespace phalanx
