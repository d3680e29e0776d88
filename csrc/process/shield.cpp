#include "process/shield.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace phalanx {
namespace {

constexpr int kSignals = 65;  // signals have the numbers 1 to 64

// Set before the handler is installed.
std::array<struct sigaction, kSignals> g_before;
volatile pid_t g_owner = 0, g_self = 0;

/// Handle a signal as the process did before it was shielded.
void pass_on(int sig, siginfo_t* info, void* context) {
  const struct sigaction& before = g_before[sig];
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(sig, info, context);
  if (before.sa_handler == SIG_IGN) return;
  if (before.sa_handler != SIG_DFL) return before.sa_handler(sig);
  sigaction(sig, &before, nullptr);
  raise(sig);  // the signal is blocked until this handler returns
}

void hear(int sig, siginfo_t* info, void* context) {
  const int errno_before = errno;
  const bool has_sender = info->si_code <= 0;  // a process sent it; Ctrl-C at a terminal comes from the kernel
  const bool is_obeyed = has_sender && (info->si_pid == g_owner || info->si_pid == g_self);
  const bool is_on_its_own = getpid() != g_self || (kill(g_owner, 0) != 0 && errno == ESRCH);
  if (is_obeyed || is_on_its_own) pass_on(sig, info, context);
  errno = errno_before;
}

}  // namespace

void obey_only(pid_t owner, const std::vector<int>& signals) {
  g_owner = owner;
  g_self = getpid();
  for (const int sig : signals) {
    if (sig < 1 || sig >= kSignals)
      throw std::invalid_argument("signal must lie in [1, " + std::to_string(kSignals - 1) + "], got " +
                                  std::to_string(sig));
    struct sigaction now {};
    if (sigaction(sig, nullptr, &now) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == hear) continue;
    g_before[sig] = now;
    now.sa_sigaction = hear;
    now.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&now.sa_mask);
    if (sigaction(sig, &now, nullptr) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
  }
}

}  // namespace phalanx
