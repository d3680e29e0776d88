#include "memory/peers.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
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
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "memory/text_file.h"

namespace phalanx {
namespace {

// Linux 6.15 and newer report to any holder of a pidfd how the process ended (include/uapi/linux/pidfd.h).
struct PidfdInfo {
  std::uint64_t mask, cgroup_id;
  std::uint32_t pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  std::int32_t exit_status;
};
constexpr std::uint64_t kPidfdInfoExit = 1u << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr unsigned long kExiting = 4;  // PF_EXITING in the kernel's include/linux/sched.h

/// Fields of /proc/<pid>/stat, of a process or of a thread.
struct ProcStat {
  bool is_exiting = false;  // the thread no longer runs code of its program
  int num_threads = 0;
  std::uint64_t start_time = 0;
  std::uint64_t stack = 0;  // address where the stack begins; 0 if the process is a zombie or /proc hides the address
  int exit_code = 0;
};

/// Returns no value if the process is gone or can't be examined: no /proc, no descriptor left, hidden from this user.
std::optional<ProcStat> read_stat(const std::string& folder) {
  const std::string text = read_text(folder + "/stat");
  const std::size_t end_of_name = text.rfind(')');  // the name may contain blanks and parentheses
  if (end_of_name == std::string::npos) return std::nullopt;
  ProcStat stat;
  std::size_t at = end_of_name + 1;
  for (int number = 3; (at = text.find_first_not_of(" \n", at)) != std::string::npos; ++number) {  // field in proc(5)
    const char* const field = text.c_str() + at;
    if (number == 3) stat.is_exiting = *field == 'Z' || *field == 'X';
    if (number == 9) stat.is_exiting |= (std::strtoul(field, nullptr, 10) & kExiting) != 0;
    if (number == 20) stat.num_threads = std::atoi(field);
    if (number == 22) stat.start_time = std::strtoull(field, nullptr, 10);
    if (number == 28) stat.stack = std::strtoull(field, nullptr, 10);
    if (number == 52) stat.exit_code = std::atoi(field);
    at = text.find_first_of(" \n", at);
  }
  return stat.start_time == 0 ? std::nullopt : std::optional(stat);
}

std::string folder_of(int pid) { return "/proc/" + std::to_string(pid); }

std::optional<ProcStat> read_stat(int pid) { return read_stat(folder_of(pid)); }

/// True if /proc shows 0 in place of the exit code of a process. /proc does so if this process may not inspect the
/// other process, for example because this process has changed its user.
bool hides_exit_code(int pid) {
  char link;
  return readlink((folder_of(pid) + "/exe").c_str(), &link, 1) < 0 && errno == EACCES;
}

/// True if no thread of a process runs any more, though the kernel may still be freeing its memory. `first` describes
/// the first thread of the process, which may end before the others.
bool has_stopped(int pid, const ProcStat& first) {
  if (!first.is_exiting) return false;
  if (first.num_threads <= 1) return true;
  const std::string folder = folder_of(pid) + "/task";
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(opendir(folder.c_str()), closedir);
  if (tasks == nullptr) return false;
  int num_exiting = 0;
  while (const dirent* const task = readdir(tasks.get())) {
    if (task->d_name[0] == '.') continue;
    const std::optional<ProcStat> stat = read_stat(folder + "/" + task->d_name);
    if (stat && !stat->is_exiting) return false;
    num_exiting += stat.has_value();
  }
  const std::optional<ProcStat> now = read_stat(pid);
  return now && num_exiting >= now->num_threads;  // otherwise the list lacks a thread that started meanwhile
}

std::uint64_t own_pid_namespace() {
  struct stat info{};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

/// Return the least quota, in CPUs, of the cgroup `path` and its ancestors up to `root`. `read(folder, quota, period)`
/// reads the quota of one level.
template <class Read>
double least_quota(const std::string& root, std::string path, Read&& read) {
  double least = 1e9;
  for (;; path.resize(path.rfind('/'))) {
    double quota = -1, period = 0;
    if (read(root + path, quota, period) && quota > 0 && period > 0) least = std::min(least, quota / period);
    if (path.find('/') == std::string::npos) return least;
  }
}

/// Return the number of CPUs that the cgroup quotas (v1 and v2) allow, rounded down, but at least 1; a large number if
/// there is no quota.
std::uint32_t quota_cpus() {
  auto read_v2 = [](const std::string& folder, double& quota, double& period) {
    return std::sscanf(read_text(folder + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2;  // fails for "max"
  };
  auto read_v1 = [](const std::string& folder, double& quota, double& period) {
    return std::sscanf(read_text(folder + "/cpu.cfs_quota_us").c_str(), "%lf", &quota) == 1 &&
           std::sscanf(read_text(folder + "/cpu.cfs_period_us").c_str(), "%lf", &period) == 1;
  };
  double least = 1e9;
  const std::string groups = read_text("/proc/self/cgroup");
  for (std::size_t begin = 0, end; (end = groups.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = groups.substr(begin, end - begin);  // "4:cpu,cpuacct:/path", "0::/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).push_back(',');
    const std::string path = line.substr(second + 1);
    // In a container, `path` may be a path on the host, although our own cgroup is mounted as the root. So a folder
    // that does not exist counts as a folder without a quota, and the walk continues up to the root.
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

// With 2 * kCheap watches or more, dead() reads /proc only in every (num_watches / kCheap)-th call, but at least in
// every kSeldom-th.
constexpr unsigned kCheap = 4, kSeldom = 8;

using Watches = std::map<std::pair<int, std::uint64_t>, std::weak_ptr<const PeerWatch>>;
std::mutex g_watches_mutex;
std::atomic<unsigned> g_num_watches{0};  // RELAXED: it only determines how often /proc is read
// One watch for each watched process, whatever the number of groups, because descriptors are scarce. The map is leaked,
// because native threads may still use it while the process destroys its statics.
Watches& g_watches = *new Watches;
// A forked child must find the mutex unlocked.
const int g_fork_handler = pthread_atfork([] { g_watches_mutex.lock(); }, [] { g_watches_mutex.unlock(); },
                                          [] { g_watches_mutex.unlock(); });

}  // namespace

Identity Identity::own() {
  const std::optional<ProcStat> stat = read_stat(getpid());
  return Identity{getpid(), stat ? stat->start_time : 0, own_pid_namespace()};
}

void describe_self(Member& member) {
  const Identity own = Identity::own();
  member.pid = own.pid;
  member.start_time = own.start_time;
  member.pid_namespace = own.pid_namespace;
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

std::shared_ptr<const PeerWatch> PeerWatch::of(const Identity& peer) {
  if (peer.pid == getpid()) return nullptr;
  std::lock_guard lock(g_watches_mutex);
  std::weak_ptr<const PeerWatch>& known = g_watches[{peer.pid, peer.start_time}];
  if (auto watch = known.lock(); watch && watch->look_into_proc() != Life::kReplaced) return watch;
  std::erase_if(g_watches, [&](const auto& entry) { return entry.second.expired() && &entry.second != &known; });
  Fd pidfd;
  int error = 0;
  if (peer.pid_namespace != 0 && peer.pid_namespace == own_pid_namespace()) {
    pidfd = Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
    if (!pidfd) error = errno;
    if (error == EMFILE || error == ENFILE || error == ENOMEM)
      throw std::system_error(error, std::generic_category(), "pidfd_open");
  }
  auto watch = std::make_shared<PeerWatch>(peer, std::move(pidfd), error);
  known = watch;
  return watch;
}

PeerWatch::PeerWatch(const Identity& peer, Fd pidfd, int error) : peer_(peer), pidfd_(std::move(pidfd)), error_(error) {
  g_num_watches.fetch_add(1, std::memory_order_relaxed);
  // The pidfd was opened after the peer had published its identity. If the peer died in between, the pid, and with it
  // the pidfd, may belong to another process.
  if (pidfd_ && look_into_proc() == Life::kEnded) {
    pidfd_ = Fd();
    error_ = ESRCH;
  }
  if (const std::optional<ProcStat> stat = read_stat(peer_.pid)) stack_ = stat->stack;
}

PeerWatch::~PeerWatch() { g_num_watches.fetch_sub(1, std::memory_order_relaxed); }

PeerWatch::Life PeerWatch::look_into_proc() const {
  if (is_replaced_.load(std::memory_order_relaxed)) return Life::kReplaced;
  if (kill(peer_.pid, 0) != 0 && errno == ESRCH) return Life::kEnded;
  const std::optional<ProcStat> stat = read_stat(peer_.pid);
  if (!stat) return Life::kUnknown;
  if (peer_.start_time != 0 && stat->start_time != peer_.start_time) return Life::kEnded;
  if (has_stopped(peer_.pid, *stat)) return Life::kEnded;
  if (stack_ == 0 || stat->stack == 0 || stat->stack == stack_) return Life::kAlive;
  is_replaced_.store(true, std::memory_order_relaxed);
  return Life::kReplaced;
}

bool PeerWatch::dead(bool told) const {
  if (!pidfd_ && error_ == 0) return false;
  if (error_ == ESRCH) return true;
  bool is_readable = false;
  if (pidfd_) {
    pollfd entry{pidfd_.get(), POLLIN, 0};
    is_readable = poll(&entry, 1, 0) > 0 && (entry.revents & POLLIN) != 0;
    // With many peers, only some calls read /proc, because that costs more than a poll.
    const unsigned num_watches = g_num_watches.load(std::memory_order_relaxed);
    const unsigned every = std::clamp(num_watches / kCheap, 1u, kSeldom);
    if (!is_readable && !told && num_looks_.fetch_add(1, std::memory_order_relaxed) % every != 0)
      return is_replaced_.load(std::memory_order_relaxed);
  }
  // Read /proc even if the pidfd reports a death: a script may have closed our descriptor, and its number may now
  // belong to another file.
  const Life life = look_into_proc();
  return life == Life::kUnknown ? is_readable : life != Life::kAlive;
}

Ending PeerWatch::ending() const {
  if (is_replaced_.load(std::memory_order_relaxed)) {
    Ending ending;
    ending.is_replaced = true;
    return ending;
  }
  // /proc shows the exit status until the parent has collected it. After that, newer kernels still provide it through
  // the pidfd.
  const std::optional<ProcStat> stat = read_stat(peer_.pid);
  if (stat && stat->is_exiting && (peer_.start_time == 0 || stat->start_time == peer_.start_time) &&
      (stat->exit_code != 0 || !hides_exit_code(peer_.pid)))
    return from_wait_status(stat->exit_code);
  if (pidfd_) {
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (ioctl(pidfd_.get(), kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit) != 0)
      return from_wait_status(info.exit_status);
  }
  return Ending{};
}

std::string PeerWatch::weakness() const {
  if (pidfd_ || error_ == ESRCH) return "";
  const std::string who = "process " + std::to_string(peer_.pid);
  if (error_ == 0)
    return who + " lives in another pid namespace: its death is noticed only at the timeout. Start all ranks of a host "
                 "in one container, or let their containers share a pid namespace";
  const std::string why = "pidfd_open: " + std::generic_category().message(error_);
  if (look_into_proc() == Life::kUnknown)
    return why + ", and /proc does not show " + who + ": its death may be noticed only at the timeout. Allow pidfd_open "
                 "(Linux 5.3 or newer; the container's seccomp profile)";
  return why + ": rank deaths are detected through /proc; an exit code is lost if a parent collects it first";
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
