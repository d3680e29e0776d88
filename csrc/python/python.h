// Shared by all calls from Python: signal handling, the GIL, and the effect of a system error on a group.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace phalanx {

namespace nb = nanobind;

// A Python function that returns the line of the current call. Set once by configure(). Leaked on purpose: the
// interpreter may be gone when statics are destroyed.
inline nb::object* g_call_site = nullptr;
// A Python function that returns the file of a code object as messages show it, "" if the file is not the user's.
inline nb::object* g_shown_file = nullptr;

/// Releases the GIL of a thread that came from Python, for as long as the object lives.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(thread_); }  // never returns once the interpreter ends, see parking.h

  /// Run `body` with the GIL, which is taken with this thread's own state. nb::gil_scoped_acquire would search for that
  /// state, and read freed memory if the interpreter is gone but the process has not ended yet.
  template <class Body>
  decltype(auto) with_gil(Body&& body) {
    PyEval_RestoreThread(thread_);
    struct Release {
      PyThreadState*& thread;
      ~Release() { thread = PyEval_SaveThread(); }
    } release{thread_};
    return body();
  }

 private:
  PyThreadState* thread_;
};

/// Hooks of a thread that came from Python and waits without the GIL.
class PythonHooks : public Hooks {
 public:
  explicit PythonHooks(WithoutGil& thread) : thread_(thread) {}
  void tick() override {
    raise();
    thread_.with_gil([] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
  }
  std::string site() override {
    if (g_call_site == nullptr) return {};
    return thread_.with_gil([this]() -> std::string {
      try {
        return nb::cast<std::string>((*g_call_site)());
      } catch (const nb::python_error& error) {
        // If the recursion is too deep, the message shows no line. Any other exception was raised by a signal handler
        // while Python looked for the line. That exception belongs to the user, and raise() throws it.
        if (!error.matches(PyExc_RecursionError)) raised_ = std::current_exception();
        return {};
      }
    });
  }
  /// Throw the exception that a signal handler raised during site(), unless it was thrown already.
  void raise() {
    if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
  }

 protected:
  WithoutGil& thread_;

 private:
  std::exception_ptr raised_;
};

/// The line of the user's code that made the current call, as the number of a text of the recorder; 0 if nothing is
/// recorded. The caller holds the GIL.
std::uint32_t recorded_site();

/// Run `body` in a thread that came from Python, without the GIL.
template <class Body>
void run_without_gil(Body&& body) {
  const AtSite at(recorded_site());
  WithoutGil thread;
  PythonHooks hooks(thread);
  try {
    body(hooks);
  } catch (...) {
    hooks.raise();
    throw;
  }
  hooks.raise();
}

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }
inline std::span<const void* const> inputs(const Addresses& a) { return {reinterpret_cast<const void* const*>(a.data()), a.size()}; }
inline std::span<void* const> outputs(const Addresses& a) { return {reinterpret_cast<void* const*>(a.data()), a.size()}; }

/// Limits a time to a value that the core's clocks can represent. 64 bits of nanoseconds overflow after 292 years; the
/// default of `most` is about 30 years. NaN and negative times become 0.
inline double bounded(double seconds, double most = 1e9) { return seconds > 0 ? std::min(seconds, most) : 0; }

/// torch's form of a timeout; zero or less stands for the group's timeout.
using Timeout = std::chrono::duration<double>;

/// Runs `body`. If the system refuses a resource that `body` needs, such as a thread, the group ends on all ranks,
/// because the other ranks would wait for this one.
template <class Body>
decltype(auto) guarded(Group& group, Op op, Body&& body) {
  ControlBlock& control = group.control();
  const auto end = [&](int error, const char* what) {
    Failure failure = control.failure(error == ENOMEM ? FailureKind::kNoMemory : FailureKind::kSystem, op, "");
    failure.error = error;
    failure.detail = what;
    return control.end(std::move(failure));
  };
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw end(ENOMEM, "");
  } catch (const std::system_error& error) {
    throw end(error.code().value(), error.what());
  }
}

/// Notes that a collective was called, and returns the function that runs it with the limit that holds now: an
/// asynchronous operation keeps the group's timeout, even if the timeout changes before the operation begins.
template <class Body>
auto issued(Group& group, Op op, double timeout_s, Body body) {
  group.note_issued();
  const double limit_s = timeout_s > 0 ? bounded(timeout_s) : group.control().timeout_s();
  return [&group, op, limit_s, body = std::move(body)](Hooks& h) {
    guarded(group, op, [&] { body(group.collectives(), Context{&h, limit_s}); });
  };
}

/// Runs `body` in the calling thread.
template <class Body>
void run_here(Group& group, Op op, double timeout_s, Body body) {
  auto run = issued(group, op, timeout_s, std::move(body));
  run_without_gil([&](Hooks& hooks) {
    guarded(group, op, [&] { group.worker().run(op, bounded(timeout_s), hooks, run); });
  });
}

/// Queues `body` and returns its Work.
template <class Body>
std::shared_ptr<CollectiveWork> queue(Group& group, Op op, const std::string& site, double timeout_s, Body body) {
  auto run = issued(group, op, timeout_s, std::move(body));
  nb::gil_scoped_release release;
  return guarded(group, op, [&] { return group.worker().submit(op, std::move(run), site); });
}

/// Runs a blocking collective of plain tensors. Returns false, and does nothing, if a tensor is not plain, if the
/// arguments do not match, or if the reduction needs more than a kernel (PREMUL_SUM). The caller then takes the path
/// through Python, whose full checks also explain mistakes.
bool run_plain(Group& g, Op op, nb::handle inputs, nb::handle outputs, int root, int kernel, int code, Timeout timeout);

/// Sets the Python exception for a C++ exception. The caller holds the GIL.
void set_exception(std::exception_ptr error) noexcept;

void bind_calls(nb::module_& m, nb::class_<Group>& group);
void bind_entry_points(nb::module_& m);
void bind_recorder(nb::module_& m);

}  // namespace phalanx
