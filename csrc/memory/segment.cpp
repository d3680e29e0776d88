#include "memory/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTickMs = 50;  // how often a wait checks its deadline and lets the caller handle signals

[[noreturn]] void fail_as(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }
[[noreturn]] void fail(const char* what) { fail_as(errno, what); }

std::string random_hex() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail("getrandom");
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned char b : bytes) {
    text += kDigits[b >> 4];
    text += kDigits[b & 15];
  }
  return text;
}

std::string nonce_text(const SegmentHeader& header) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(header.nonce[0]),
                static_cast<unsigned long long>(header.nonce[1]));
  return text;
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path) throw std::invalid_argument("socket name too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // leading 0: abstract, leaves no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

/// True if the peer runs as the same user. Any user can connect to an abstract socket.
bool same_user(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

bool wait_readable(int fd, Clock::time_point deadline, const std::function<void()>& on_tick) {
  while (Clock::now() < deadline) {
    pollfd entry{fd, POLLIN, 0};
    const int ready = poll(&entry, 1, kTickMs);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail("poll");
    if (on_tick) on_tick();
  }
  return false;
}

bool send_fd(int socket, int fd) {
  char byte = 'P';
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket, &message, MSG_NOSIGNAL) == 1) return true;
  if (errno != EPIPE && errno != ECONNRESET) fail("sending the shared segment");  // these two errors: the peer is gone
  return false;
}

Fd receive_fd(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (received < 0 && errno != ECONNRESET) fail("receiving the shared segment");
  if (received != 1) return Fd();
  // The kernel drops a received descriptor, and sets this flag, if the process has reached its limit of descriptors.
  if ((message.msg_flags & MSG_CTRUNC) != 0) fail_as(EMFILE, "receiving the shared segment");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return Fd();
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Fd(fd);
}

/// Describe a write lock on the first kMaxRanks bytes of the file: one byte for each possible rank.
struct flock whole_world() {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = static_cast<off_t>(kMaxRanks);
  return lock;
}

void reserve(int fd, std::uint64_t offset, std::size_t bytes) {
  int rc;
  do {
    rc = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return;
  // EFBIG: RLIMIT_FSIZE (ulimit -f) applies even to a memfd.
  if (errno == ENOSPC || errno == ENOMEM || errno == EDQUOT || errno == EFBIG) throw std::bad_alloc();
  fail("fallocate of the shared segment");
}

}  // namespace

std::uint32_t current_node() noexcept {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? node : 0;
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

int Fd::release() { return std::exchange(fd_, -1); }

Mapping::Mapping(int fd, std::uint64_t offset, std::size_t bytes) : bytes_(bytes) {
  struct stat file{};
  if (fstat(fd, &file) != 0) fail("fstat of the shared segment");
  // mmap() would accept a range beyond the end of the file, and the first access to it would raise SIGBUS.
  const auto size = static_cast<std::uint64_t>(file.st_size);
  if (offset % kPage != 0 || offset > size || bytes > size - offset)
    throw std::runtime_error(std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                             " lie outside the shared segment of " + std::to_string(size) + " bytes");
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                       static_cast<off_t>(offset));
  if (address == MAP_FAILED) fail("mmap of the shared segment");
  data_ = static_cast<std::byte*>(address);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Segment::Segment(Fd fd, Mapping header, std::string nonce)
    : fd_(std::move(fd)), header_(std::move(header)), nonce_(std::move(nonce)) {}

std::shared_ptr<Segment> Segment::create() {
  Fd fd(memfd_create("phalanx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail("memfd_create");
  reserve(fd.get(), 0, kPage);
  // Peers map ranges below the current size, so the file must never shrink under them. It may still grow.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) fail("F_ADD_SEALS");
  Mapping page(fd.get(), 0, kPage);
  auto* header = reinterpret_cast<SegmentHeader*>(page.data());
  header->magic = kMagic;
  header->version = kLayoutVersion;
  if (getrandom(header->nonce, sizeof header->nonce, 0) != sizeof header->nonce) fail("getrandom");
  header->next_free.store(kPage, std::memory_order_relaxed);  // sending the descriptor over a socket publishes it
  std::string nonce = nonce_text(*header);
  return std::shared_ptr<Segment>(new Segment(std::move(fd), std::move(page), std::move(nonce)));
}

std::shared_ptr<Segment> Segment::attach(const std::string& name, const std::string& nonce, double timeout_s,
                                         const std::function<void()>& on_tick) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s));
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) fail("socket");
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, length);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("connect to rank 0");
  if (!same_user(socket.get())) fail_as(EACCES, "the shared segment is served by another user");
  if (!wait_readable(socket.get(), deadline, on_tick)) fail_as(ETIMEDOUT, "waiting for the shared segment");
  Fd fd = receive_fd(socket.get());
  if (!fd) fail_as(EACCES, "the shared segment was refused: it belongs to another user");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::runtime_error("the received descriptor is not a phalanx segment");
  Mapping page(fd.get(), 0, kPage);
  const auto* header = reinterpret_cast<const SegmentHeader*>(page.data());
  if (header->magic != kMagic || header->version != kLayoutVersion)
    throw std::runtime_error("the ranks of this job run different versions of phalanx");
  // Reading the nonce through the mapping proves that both ranks see the same memory.
  if (nonce_text(*header) != nonce) throw std::runtime_error("the shared segment is not the one that was announced");
  return std::shared_ptr<Segment>(new Segment(std::move(fd), std::move(page), nonce));
}

std::uint64_t Segment::allocate(std::size_t bytes) {
  const std::size_t size = align_up(bytes, kPage);
  // RELAXED: the counter only hands out disjoint ranges. The rank that announces the offset publishes the contents.
  const std::uint64_t offset = header().next_free.fetch_add(size, std::memory_order_relaxed);
  reserve(fd_.get(), offset, size);
  return offset;
}

void Segment::bring_near(std::uint64_t offset, std::size_t bytes, std::uint32_t node) {
  if (node == current_node()) return;
  free(offset, bytes);
  reserve(fd_.get(), offset, bytes);
}

void Segment::free(std::uint64_t offset, std::size_t bytes) noexcept {
  fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(align_up(bytes, kPage)));
}

void Segment::hold(int rank) {
  // Open the file again: these locks (F_OFD_SETLK) belong to an open file description, and all ranks share the
  // description that was handed over. The kernel drops the lock when the process ends, so a killed rank does not stop
  // its peers' deadlines forever.
  hold_ = Fd(open(("/proc/self/fd/" + std::to_string(fd_.get())).c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock = whole_world();
  lock.l_type = F_RDLCK;  // a rank and its data-loader workers may hold the lock at once
  lock.l_start = rank;
  lock.l_len = 1;
  if (hold_) fcntl(hold_.get(), F_OFD_SETLK, &lock);
}

void Segment::let_go() {
  struct flock all = whole_world();
  all.l_type = F_UNLCK;  // closing is not enough: a child forked meanwhile shares the open file description
  if (hold_) fcntl(hold_.get(), F_OFD_SETLK, &all);
  hold_ = Fd();
}

bool Segment::is_held() const noexcept {
  struct flock lock = whole_world();
  return fcntl(fd_.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

SegmentServer::SegmentServer(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!listener_) fail("socket");
  name_ = "phalanx-" + random_hex();
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name_, length);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("bind");
  if (listen(listener_.get(), static_cast<int>(kMaxRanks)) != 0) fail("listen");
}

int SegmentServer::serve(int num_peers, double timeout_s, const std::function<void()>& on_tick) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s));
  int served = 0;
  while (served < num_peers && wait_readable(listener_.get(), deadline, on_tick)) {
    Fd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) fail("accept");
    if (!peer) continue;
    if (same_user(peer.get()) && send_fd(peer.get(), segment_->fd())) ++served;
  }
  return served;
}

}  // namespace phalanx
