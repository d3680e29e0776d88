// Passes failures to Python as dictionaries, from which Python makes exceptions and reports.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "control/failure.h"

namespace phalanx {
namespace {

namespace nb = nanobind;

// Python functions, set once by configure(). Leaked on purpose: the interpreter may be gone when statics are destroyed.
nb::object* g_make_error = nullptr;
nb::object* g_report_stall = nullptr;

nb::dict facts_of(const Standing& stand) {
  nb::dict facts;
  facts["rank"] = stand.rank;
  facts["pid"] = stand.pid;
  facts["has_joined"] = stand.has_joined;
  facts["waits_in"] = stand.waits_in;
  facts["last"] = stand.last;
  return facts;
}

nb::dict facts_of(const Waiter& waiter) {
  nb::dict facts;
  facts["rank"] = waiter.rank;
  facts["awaits"] = waiter.awaits;
  facts["where"] = waiter.where;
  return facts;
}

nb::dict facts_of(const MadeCall& made) {
  nb::dict facts;
  facts["rank"] = made.rank;
  facts["op"] = op_name(made.call.op);
  facts["dtype"] = made.call.dtype;
  facts["reduce_op"] = made.call.reduce_op;
  facts["has_splits"] = (made.call.flags & 1) != 0;
  facts["count"] = made.call.count;
  facts["root"] = made.root;
  facts["tag"] = made.tag;
  facts["size_bytes"] = made.size_bytes;
  facts["site"] = made.site;
  return facts;
}

template <class Item>
nb::list facts_of(const std::vector<Item>& items) {
  nb::list facts;
  for (const Item& item : items) facts.append(facts_of(item));
  return facts;
}

/// A failure as plain data, for from_core() in backend/failures/core_failures.py. The caller holds the GIL.
nb::dict facts_of(const Failure& failure) {
  nb::dict facts;
  facts["kind"] = kind_name(failure.kind);
  facts["rank"] = failure.rank;
  facts["group"] = failure.group;
  facts["op"] = failure.op;
  facts["seq"] = failure.seq;
  facts["site"] = failure.site;
  facts["ranks"] = failure.ranks;
  facts["by"] = failure.by;
  facts["pid"] = failure.pid;
  facts["exit_code"] = failure.exit_code;
  facts["signal"] = failure.signal;
  facts["standings"] = facts_of(failure.standings);
  facts["circle"] = facts_of(failure.circle);
  facts["calls"] = facts_of(failure.calls);
  facts["sizes"] = nb::none();
  if (failure.sizes)
    facts["sizes"] = nb::make_tuple(failure.sizes->rank, failure.sizes->count, failure.sizes->other,
                                    failure.sizes->other_count, failure.sizes->of);
  facts["timeout_s"] = failure.timeout_s;
  facts["size_bytes"] = failure.size_bytes;
  facts["errno"] = failure.error;
  facts["detail"] = failure.detail;
  facts["cause"] = nb::none();
  if (failure.cause) facts["cause"] = facts_of(*failure.cause);
  return facts;
}

/// The Python exception for a failure of the core. The caller holds the GIL.
nb::object to_python(const Failure& failure) { return (*g_make_error)(facts_of(failure)); }

/// Makes Python print the missing ranks. A native thread that asked for the GIL of an ending interpreter would never
/// return. So close(), which is called before the interpreter ends, waits for a report in progress and lets no other
/// report begin. Only native threads take the lock: a Python thread must not hold it, because it may handle signals
/// while it prints.
class StallReports {
 public:
  void operator()(const Failure& missing, double waited_s) {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (PyGILState_GetThisThreadState() == nullptr) lock.lock();
    if (closed_) return;
    nb::gil_scoped_acquire gil;
    (*g_report_stall)(facts_of(missing), waited_s);
  }
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
};
StallReports g_stall_reports;
// In a forked child, a thread that exists only in the parent may hold the lock forever, so make a new one.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { new (&g_stall_reports) StallReports; });

}  // namespace
}  // namespace phalanx
