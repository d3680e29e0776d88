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

/// The least quota, in CPUs, at any level from the cgroup `path` up to `root`. `read` gets a folder, tells quota/period.
template <class Read>
double least_quota(const std::string& root, std::string path, Read&& read) {
  double least = 1e9;
  for (;; path.resize(path.rfind('/'))) {
    double quota = -1, period = 0;
    if (read(root + path, quota, period) && quota > 0 && period > 0) least = std::min(least, quota / period);
    if (path.find('/') == std::string::npos) return least;
  }
}

/// CPUs that the cgroup's quota (v2, else v1) pays for, rounded down; a large number without a quota.
std::uint32_t quota_cpus() {
  auto read_v2 = [](const std::string& folder, double& quota, double& period) {
    return bool(std::ifstream(folder + "/cpu.max") >> quota >> period);  // "max" is no number: no quota
  };
  auto read_v1 = [](const std::string& folder, double& quota, double& period) {
    return std::ifstream(folder + "/cpu.cfs_quota_us") >> quota && std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  };
  double least = 1e9;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:cpu,cpuacct:/path", "0::/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).push_back(',');
    const std::string path = line.substr(second + 1);
    // In a container the path may be the host's, while the mount shows our group as the root: the walk ends there.
    if (controllers == ",,") least = std::min(least, least_quota("/sys/fs/cgroup", path, read_v2));
    if (controllers.find(",cpu,") != std::string::npos)
      for (const char* root : {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"})
        least = std::min(least, least_quota(root, path, read_v1));
  }
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
