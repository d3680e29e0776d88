// Makes a process that works for another process, its owner, ignore signals that are meant for the owner, such as
// Ctrl-C.
#pragma once

#include <sys/types.h>

#include <vector>

namespace phalanx {

/// From now on, ignore these signals unless `owner` or this process sends them, or `owner` has ended.
///
/// A signal that is not ignored has the effect that it had before this call. Signals from a terminal are ignored.
/// Forked children of this process ignore no signals. Throws std::invalid_argument for a number that no signal has, and
/// std::system_error.
void obey_only(pid_t owner, const std::vector<int>& signals);

}  // namespace phalanx
