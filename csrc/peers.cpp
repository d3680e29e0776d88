#include "peers.h"

#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace phalanx {
namespace {

// Linux 6.15 and newer tell any holder of a pidfd how the process ended (include/uapi/linux/pidfd.h).
struct PidfdInfo {
  std::uint64_t mask, cgroup_id;
  std::uint32_t pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  std::int32_t exit_status;
};
constexpr std::uint64_t kPidfdInfoExit = 1u << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

/// Field `number` (1-based, at least 3) of /proc/<pid>/stat, or "" when the process is gone.
std::string stat_field(int pid, int number) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return "";
  const std::size_t end_of_name = line.rfind(')');  // the name may hold blanks and parentheses
  if (end_of_name == std::string::npos) return "";
  std::istringstream rest(line.substr(end_of_name + 1));
  std::string field;
  for (int i = 3; i <= number; ++i) rest >> field;
  return field;
}

std::uint64_t start_time_of(int pid) {
  const std::string field = stat_field(pid, 22);
  return field.empty() ? 0 : std::stoull(field);
}

std::uint64_t own_pid_namespace() {
  struct stat info{};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

/// CPUs that the cgroup's quota (v2, else v1) pays for, rounded down; a large number without a quota.
std::uint32_t quota_cpus() {
  double quota = -1, period = 0;
  std::string path = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);)
    if (line.rfind("0::", 0) == 0) path += line.substr(3);
  double least = 1e9;
  // A quota may be set at any level above ours.
  for (; path.size() >= std::strlen("/sys/fs/cgroup"); path = path.substr(0, path.rfind('/'))) {
    std::ifstream file(path + "/cpu.max");
    std::string first;
    if (file >> first >> period && first != "max" && period > 0) least = std::min(least, std::stod(first) / period);
  }
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (v1_quota >> quota && v1_period >> period && quota > 0 && period > 0) least = std::min(least, quota / period);
  return static_cast<std::uint32_t>(std::max(1.0, std::floor(least)));
}

Ending from_wait_status(int status) {
  Ending ending;
  if (WIFSIGNALED(status)) ending.signal = WTERMSIG(status);
  if (WIFEXITED(status)) ending.exit_code = WEXITSTATUS(status);
  return ending;
}

}  // namespace

std::string Ending::text() const {
  if (signal != 0) {
    const char* name = sigabbrev_np(signal);
    std::string text = "was killed by signal " + std::to_string(signal);
    return name == nullptr ? text : text + " (SIG" + name + ")";
  }
  if (exit_code == 0) return "exited with code 0 without leaving the group";
  if (exit_code > 0) return "exited with code " + std::to_string(exit_code);
  return "ended (its exit code was already collected by its parent)";
}

void describe_self(Member& member) {
  member.pid = getpid();
  member.start_time = start_time_of(getpid());
  member.pid_namespace = own_pid_namespace();
  member.usable_cpus = quota_cpus();
  cpu_set_t* set = CPU_ALLOC(kMaxRanks);
  const std::size_t bytes = CPU_ALLOC_SIZE(kMaxRanks);
  CPU_ZERO_S(bytes, set);
  std::memset(member.cpu_mask, 0, sizeof member.cpu_mask);
  if (sched_getaffinity(0, bytes, set) == 0)
    for (std::size_t cpu = 0; cpu < kMaxRanks; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, set)) member.cpu_mask[cpu / 64] |= std::uint64_t{1} << (cpu % 64);
  CPU_FREE(set);
}

PeerWatch::PeerWatch(const Member& member) : pid_(member.pid) {
  if (pid_ == getpid() || member.pid_namespace != own_pid_namespace()) return;
  pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  // Opened after the peer joined: if it is gone, or the pid has a new owner, the peer has died since.
  gone_at_start_ = (!pidfd_ && errno == ESRCH) || (pidfd_ && start_time_of(pid_) != member.start_time);
}

bool PeerWatch::dead() const {
  if (gone_at_start_) return true;
  if (!pidfd_) return false;
  pollfd entry{pidfd_.get(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

Ending PeerWatch::ending() const {
  // A zombie still shows its status in /proc; once reaped, new kernels keep it with the pidfd.
  if (!gone_at_start_ && stat_field(pid_, 3) == "Z") {
    const std::string status = stat_field(pid_, 52);
    if (!status.empty()) return from_wait_status(std::stoi(status));
  }
  if (pidfd_) {
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (ioctl(pidfd_.get(), kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit) != 0)
      return from_wait_status(info.exit_status);
  }
  return Ending{};
}

bool cpus_suffice(const Member* members, std::size_t num_ranks) {
  constexpr std::size_t kWords = kMaxRanks / 64;
  std::uint64_t all[kWords] = {};
  for (std::size_t r = 0; r < num_ranks; ++r) {
    std::size_t own = 0, competitors = 0;
    for (std::size_t w = 0; w < kWords; ++w) {
      all[w] |= members[r].cpu_mask[w];
      own += static_cast<std::size_t>(std::popcount(members[r].cpu_mask[w]));
    }
    for (std::size_t q = 0; q < num_ranks; ++q) {
      bool within = true;
      for (std::size_t w = 0; w < kWords; ++w) within &= (members[q].cpu_mask[w] & ~members[r].cpu_mask[w]) == 0;
      competitors += within;
    }
    if (competitors > own || members[r].usable_cpus < num_ranks) return false;
  }
  std::size_t total = 0;
  for (std::uint64_t word : all) total += static_cast<std::size_t>(std::popcount(word));
  return total >= num_ranks;
}

}  // namespace phalanx
