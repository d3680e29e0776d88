// The core as a Python module. Takes addresses, counts and codes; keeps no Python object; waits without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/chrono.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

#include "digest.h"
#include "group.h"

namespace nb = nanobind;

namespace phalanx {
namespace {

// Set once by configure(); leaked on purpose, the interpreter may be gone when statics are destroyed.
nb::object* g_call_site = nullptr;
nb::object* g_make_error = nullptr;
nb::object* g_report_stall = nullptr;

/// Hooks of a thread that came from Python and waits without the GIL.
class PythonHooks : public Hooks {
 public:
  void tick() override {
    raise();
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  std::string site() override {
    nb::gil_scoped_acquire gil;
    if (g_call_site == nullptr) return {};
    try {
      return nb::cast<std::string>((*g_call_site)());
    } catch (const nb::python_error& error) {
      // An error message without a line is better than an error about the line. But Python handles signals while it
      // looks for the line, and what a handler raises is the user's.
      if (!error.matches(PyExc_RecursionError)) raised_ = std::current_exception();
      return {};
    }
  }
  /// Throw what a signal handler raised in site(), if it was not thrown yet.
  void raise() {
    if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
  }

 private:
  std::exception_ptr raised_;
};

/// Hooks of a rank that joins a group: it also looks for what the others say in the store.
class JoinHooks : public PythonHooks {
 public:
  explicit JoinHooks(nb::object& look) : look_(look) {}
  void tick() override {
    PythonHooks::tick();
    nb::gil_scoped_acquire gil;
    look_();
  }

 private:
  nb::object& look_;
};

/// Run `work` in a thread that came from Python, without the GIL.
template <class Work>
void run_without_gil(Work&& work) {
  nb::gil_scoped_release release;
  PythonHooks hooks;
  try {
    work(hooks);
  } catch (...) {
    hooks.raise();
    throw;
  }
  hooks.raise();
}

nb::dict facts_of(const Standing& stand) {
  nb::dict facts;
  facts["rank"] = stand.rank;
  facts["pid"] = stand.pid;
  facts["has_joined"] = stand.has_joined;
  facts["waits_in"] = stand.waits_in;
  facts["last"] = stand.last;
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

/// A failure as plain data, see from_core() of the Python side; the GIL is held.
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

/// The Python exception for a failure of the core; the GIL is held.
nb::object to_python(const Failure& failure) { return (*g_make_error)(facts_of(failure)); }

/// Has Python print who does not come. A native thread that asks for the GIL while the interpreter ends never gets it, so
/// the last report of one comes before close(), which the interpreter calls first. A thread of Python's needs no lock, and
/// may not have it: it handles signals while it prints.
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
// A thread that the child does not have may hold the lock there for ever.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] { new (&g_stall_reports) StallReports; });

nb::object error_object(std::exception_ptr error) {
  if (!error) return nb::none();
  try {
    std::rethrow_exception(error);
  } catch (const Failure& failure) {
    return to_python(failure);
  } catch (const std::exception& other) {
    return nb::module_::import_("builtins").attr("RuntimeError")(other.what());
  }
}

/// Numbers of finished operations whose futures wait to be fulfilled. One for the process, read by one Python thread.
class Completions {
 public:
  void push(std::int64_t number) {
    std::lock_guard lock(mutex_);
    numbers_.push_back(number);
    ready_.notify_one();
  }
  /// The next number, or -1 once closed.
  std::int64_t pop() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return closed_ || !numbers_.empty(); });
    if (numbers_.empty()) return -1;
    const std::int64_t number = numbers_.front();
    numbers_.pop_front();
    return number;
  }
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    ready_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::int64_t> numbers_;
  bool closed_ = false;
};

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
void* pointer(Address address) { return reinterpret_cast<void*>(address); }
std::span<const void* const> inputs(const Addresses& a) { return {reinterpret_cast<const void* const*>(a.data()), a.size()}; }
std::span<void* const> outputs(const Addresses& a) { return {reinterpret_cast<void* const*>(a.data()), a.size()}; }

/// What the core's clocks can count, whatever Python gives: their 64 bits of nanoseconds overflow after 292 years, this
/// is 30. Not a number is nothing.
double bounded(double seconds, double most = 1e9) { return seconds > 0 ? std::min(seconds, most) : 0; }

/// Where an asynchronous call was made; none for one that blocks.
using Site = std::optional<std::string>;

/// Run `work`. An error of the system, such as a thread that can't be had, ends the group on all ranks: they wait for us.
template <class Work>
decltype(auto) guarded(Group& group, Op op, Work&& work) {
  Board& board = group.board();
  const auto end = [&](int error, const char* what) {
    Failure failure = board.failure(error == ENOMEM ? FailureKind::kNoMemory : FailureKind::kSystem, op, "");
    failure.error = error;
    failure.detail = what;
    return board.end(std::move(failure));
  };
  try {
    return work();
  } catch (const std::bad_alloc&) {
    throw end(ENOMEM, "");
  } catch (const std::system_error& error) {
    throw end(error.code().value(), error.what());
  }
}

/// Run `work` in the calling thread, or queue it when it comes with a site; then the Job is returned.
template <class Work>
std::shared_ptr<Job> start(Group& group, Op op, const Site& site, double timeout_s, Work work) {
  auto run = [&group, op, limit_s = bounded(timeout_s), work = std::move(work)](Hooks& h) {
    guarded(group, op, [&] { work(group.collectives(), Context{&h, limit_s}); });
  };
  if (!site) {
    run_without_gil([&](Hooks& hooks) {
      guarded(group, op, [&] { group.worker().run(op, bounded(timeout_s), hooks, run); });
    });
    return nullptr;
  }
  nb::gil_scoped_release release;
  return guarded(group, op, [&] { return group.worker().submit(op, std::move(run), *site); });
}

Items make_items(int dtype, std::size_t item_bytes, std::size_t count) {
  return Items{static_cast<std::uint8_t>(dtype), item_bytes, count};
}

Reduction make_reduction(int dtype, int op, int code) {
  return Reduction{static_cast<std::uint8_t>(code + 1),
                   find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op))};
}

std::function<void()> check_signals() {
  return [] { PythonHooks().tick(); };
}

void bind_peers(nb::module_& m) {
  m.def("identity", [] {
    const Identity own = Identity::own();
    return nb::make_tuple(own.pid, own.start_time, own.pid_namespace);
  }, "Pid, start time and pid namespace of this process.");
  nb::class_<PeerWatch>(m, "PeerWatch")
      .def_static("of", [](int pid, std::uint64_t start_time, std::uint64_t pid_namespace) {
        return std::const_pointer_cast<PeerWatch>(PeerWatch::of(Identity{pid, start_time, pid_namespace}));
      }, "None for this process.", nb::arg("pid"), nb::arg("start_time"), nb::arg("pid_namespace"))
      .def_prop_ro("pid", &PeerWatch::pid)
      .def_prop_ro("dead", &PeerWatch::dead)
      .def_prop_ro("ending", [](const PeerWatch& self) {
        const Ending ending = self.ending();
        const auto kind = ending.is_replaced ? FailureKind::kRankReplaced : FailureKind::kRankEnded;
        return nb::make_tuple(kind_name(kind), ending.exit_code, ending.signal);
      });
}

void bind_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def_static("create", &Segment::create)
      .def_static(
          "attach",
          [](const std::string& name, const std::string& nonce, double timeout_s) {
            nb::gil_scoped_release release;
            return Segment::attach(name, nonce, bounded(timeout_s), check_signals());
          },
          nb::arg("name"), nb::arg("nonce"), nb::arg("timeout_s"))
      .def_prop_ro("nonce", &Segment::nonce)
      .def_prop_ro("fd", &Segment::fd)
      .def("create_group", [](Segment& self, int size) { return Board::create(self, size); }, nb::arg("size"));
  nb::class_<SegmentServer>(m, "SegmentServer")
      .def(nb::init<std::shared_ptr<Segment>>())
      .def_prop_ro("name", &SegmentServer::name)
      .def("serve", [](SegmentServer& self, int num_peers, double timeout_s) {
        nb::gil_scoped_release release;
        return self.serve(num_peers, bounded(timeout_s), check_signals());
      }, nb::arg("num_peers"), nb::arg("timeout_s"));
}

void bind_handles(nb::module_& m) {
  nb::class_<Completions>(m, "Completions")
      .def(nb::init<>())
      .def("pop", &Completions::pop, nb::call_guard<nb::gil_scoped_release>())
      .def("push", &Completions::push, nb::arg("number"), "For operations that are not the core's own.")
      .def("close", &Completions::close);
  nb::class_<Pending>(m, "Pending")
      .def_prop_ro("done", &Pending::done)
      .def("error", [](const Pending& self) { return error_object(self.error()); })
      .def("require_reachable", &Pending::require_reachable, "Throw if this thread can never see it done.")
      .def("notify", [](Pending& self, std::shared_ptr<Completions> completions, std::int64_t number) {
        nb::gil_scoped_release release;
        self.notify([completions, number] { completions->push(number); });
      });
  nb::class_<Job, Pending>(m, "Job");
  nb::class_<Request, Pending>(m, "Request").def_prop_ro("source", &Request::source);
}

/// How torch gives it; zero or less stands for the group's.
using Timeout = std::chrono::duration<double>;

void bind_group(nb::module_& m) {
  nb::class_<Group> group(m, "Group");
  group.def_static(
      "make",
      [](std::shared_ptr<Segment> segment, std::uint64_t offset, int rank, int size, std::string name,
         std::vector<int> global_ranks, double timeout_s, double stall_s, double spin_us) {
        return Group::make(std::move(segment), offset,
                           GroupConfig{rank, size, std::move(name), std::move(global_ranks), bounded(timeout_s),
                                       bounded(stall_s), bounded(spin_us, 1e6), std::ref(g_stall_reports)});
      },
      nb::arg("segment"), nb::arg("offset"), nb::arg("rank"), nb::arg("size"), nb::arg("name"),
      nb::arg("global_ranks"), nb::arg("timeout_s"), nb::arg("stall_s"), nb::arg("spin_us"));
  group.def_prop_ro("seq", [](Group& g) { return g.collectives().seq() - 1; });  // the join is none
  group.def_prop_ro("spins", [](Group& g) { return g.board().spins(); });
  group.def_prop_ro("ended", [](Group& g) { return g.board().ended(); });
  group.def_prop_ro("told", [](Group& g) { return g.board().told(); }, "Whether any rank has ended it.");
  group.def_prop_rw("compares_calls", [](Group& g) { return g.collectives().compares_calls; },
                    [](Group& g, bool compares) { g.collectives().compares_calls = compares; });
  group.def("tune", [](Group& g, std::size_t one_shot_bytes, std::size_t chunk_bytes) {
    g.collectives().tuning = Tuning{std::min(one_shot_bytes, kStageBytes), std::clamp(chunk_bytes, kPage, kSlotBytes)};
  }, nb::arg("one_shot_bytes"), nb::arg("chunk_bytes"));
  group.def("set_timeout", [](Group& g, double timeout_s) {
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be more than 0 s, got " + std::to_string(timeout_s));
    g.board().set_timeout(bounded(timeout_s));
  });
  group.def("abort", &Group::abort, nb::arg("why"), nb::call_guard<nb::gil_scoped_release>());
  group.def("leave", &Group::leave, nb::arg("why") = "", nb::call_guard<nb::gil_scoped_release>());
  // `look` is called now and then while this rank waits; what it raises ends the wait, and the group.
  group.def("join", [](Group& g, double timeout_s, nb::object look) {
    JoinHooks hooks(look);
    nb::gil_scoped_release release;
    g.worker().run(Op::kJoin, bounded(timeout_s), hooks,
                   [&](Hooks& h) { g.collectives().join(Context{&h, bounded(timeout_s)}); });
    hooks.raise();
  }, nb::arg("timeout_s"), nb::arg("look"));
  group.def("barrier", [](Group& g, Timeout timeout, Site site) {
    return start(g, Op::kBarrier, site, timeout.count(), [](Collectives& c, const Context& x) { c.barrier(x); });
  }, nb::arg("timeout"), nb::arg("site").none());
  group.def("broadcast", [](Group& g, Address data, int dtype, std::size_t item, std::size_t count, int root,
                            Timeout timeout, Site site) {
    return start(g, Op::kBroadcast, site, timeout.count(), [=, items = make_items(dtype, item, count)](Collectives& c, const Context& x) {
      c.broadcast(x, pointer(data), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_reduce", [](Group& g, Address in, Address out, int dtype, std::size_t item, std::size_t count, int op,
                             int code, Timeout timeout, Site site) {
    return start(g, Op::kAllReduce, site, timeout.count(), [=, items = make_items(dtype, item, count),
                                        reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.all_reduce(x, pointer(in), pointer(out), items, reduction);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  // A message in several pieces, averaged or otherwise reduced where they lie. Returns the sum of squares of the first
  // `num_squared` pieces of the result.
  group.def("all_reduce_pieces", [](Group& g, const Addresses& ins, const Addresses& outs,
                                    const std::vector<std::size_t>& counts, int dtype, std::size_t item, int op,
                                    int code, std::size_t num_squared, Timeout timeout) {
    std::vector<Piece> pieces;
    std::size_t count = 0;
    for (std::size_t i = 0; i < ins.size(); ++i) {
      pieces.push_back(Piece{pointer(ins[i]), pointer(outs[i]), counts[i], i < num_squared});
      count += counts[i];
    }
    double squares = 0;
    start(g, Op::kAllReduce, std::nullopt, timeout.count(), [&](Collectives& c, const Context& x) {
      squares = c.all_reduce(x, pieces, make_items(dtype, item, count), make_reduction(dtype, op, code),
                             num_squared > 0 ? find_squares(static_cast<Dtype>(dtype)) : nullptr);
    });
    return squares;
  });
  group.def("reduce", [](Group& g, Address in, Address out, int dtype, std::size_t item, std::size_t count, int op,
                         int code, int root, Timeout timeout, Site site) {
    return start(g, Op::kReduce, site, timeout.count(), [=, items = make_items(dtype, item, count),
                                        reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.reduce(x, pointer(in), pointer(out), items, reduction, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  group.def("reduce_scatter", [](Group& g, Addresses ins, Address out, int dtype, std::size_t item, std::size_t count,
                                 int op, int code, Timeout timeout, Site site) {
    return start(g, Op::kReduceScatter, site, timeout.count(),
                 [=, ins = std::move(ins), items = make_items(dtype, item, count),
                  reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.reduce_scatter(x, inputs(ins), pointer(out), items, reduction);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  group.def("all_gather", [](Group& g, Address in, Addresses outs, int dtype, std::size_t item, std::size_t count,
                             Timeout timeout, Site site) {
    return start(g, Op::kAllGather, site, timeout.count(), [=, outs = std::move(outs), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.all_gather(x, pointer(in), outputs(outs), items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("reduce_scatter_split", [](Group& g, Addresses ins, std::vector<std::uint64_t> counts, Address out, int dtype,
                                       std::size_t item, int op, int code, Timeout timeout, Site site) {
    return start(g, Op::kReduceScatter, site, timeout.count(),
                 [=, ins = std::move(ins), counts = std::move(counts), items = make_items(dtype, item, 0),
                  reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.reduce_scatter_split(x, inputs(ins), counts, pointer(out), items, reduction);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  group.def("all_gather_split", [](Group& g, Address in, Addresses outs, std::vector<std::uint64_t> counts, int dtype,
                                   std::size_t item, Timeout timeout, Site site) {
    return start(g, Op::kAllGather, site, timeout.count(),
                 [=, outs = std::move(outs), counts = std::move(counts), items = make_items(dtype, item, 0)](
                     Collectives& c, const Context& x) {
      c.all_gather_split(x, pointer(in), outputs(outs), counts, items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("gather", [](Group& g, Address in, Addresses outs, int dtype, std::size_t item, std::size_t count, int root,
                         Timeout timeout, Site site) {
    return start(g, Op::kGather, site, timeout.count(), [=, outs = std::move(outs), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.gather(x, pointer(in), outputs(outs), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("scatter", [](Group& g, Addresses ins, Address out, int dtype, std::size_t item, std::size_t count, int root,
                          Timeout timeout, Site site) {
    return start(g, Op::kScatter, site, timeout.count(), [=, ins = std::move(ins), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.scatter(x, inputs(ins), pointer(out), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_to_all", [](Group& g, Addresses ins, Addresses outs, int dtype, std::size_t item, std::size_t count,
                             Timeout timeout, Site site) {
    return start(g, Op::kAllToAll, site, timeout.count(), [=, ins = std::move(ins), outs = std::move(outs),
                                        items = make_items(dtype, item, count)](Collectives& c, const Context& x) {
      c.all_to_all(x, inputs(ins), outputs(outs), items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_to_all_split", [](Group& g, Addresses ins, std::vector<std::uint64_t> in_counts, Addresses outs,
                                   std::vector<std::uint64_t> out_counts, int dtype, std::size_t item,
                                   Timeout timeout, Site site) {
    return start(g, Op::kAllToAll, site, timeout.count(),
                 [=, ins = std::move(ins), outs = std::move(outs), in_counts = std::move(in_counts),
                  out_counts = std::move(out_counts), items = make_items(dtype, item, 0)](Collectives& c, const Context& x) {
      c.all_to_all_split(x, inputs(ins), in_counts, outputs(outs), out_counts, items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("wait_job", [](Group& g, const std::shared_ptr<Job>& job, double timeout_s) {
    bool done = false;
    run_without_gil([&](Hooks& hooks) {
      done = g.worker().wait(job, hooks, bounded(timeout_s));
      if (done && job->error()) std::rethrow_exception(job->error());
    });
    return done;
  });
  auto post = [](Op op) {
    return [op](Group& g, Address data, int dtype, std::size_t item, std::size_t count, int peer, std::int64_t tag,
                std::string site) {
      nb::gil_scoped_release release;
      return guarded(g, op, [&] {
        return g.p2p().post(op, pointer(data), make_items(dtype, item, count), peer, tag, std::move(site));
      });
    };
  };
  group.def("send", post(Op::kSend));
  group.def("recv", post(Op::kRecv));
  group.def("cancel", [](Group& g, const std::shared_ptr<Request>& request) { return g.p2p().cancel(request); },
            nb::call_guard<nb::gil_scoped_release>());
  group.def("wait_request", [](Group& g, const std::shared_ptr<Request>& request, double timeout_s) {
    bool done = true;
    run_without_gil([&](Hooks& hooks) {
      guarded(g, request->op(), [&] {
        if (timeout_s > 0)
          done = g.p2p().wait_briefly(request, hooks, bounded(timeout_s));
        else
          g.p2p().wait(request, hooks, 0);
      });
    });
    return done;
  });
}

}  // namespace
}  // namespace phalanx

NB_MODULE(_core, m) {
  using namespace phalanx;
  nb::set_leak_warnings(false);  // torch keeps groups until after the interpreter's end
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const Failure& failure) {
      nb::object value = to_python(failure);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
    } catch (const std::system_error& refused) {  // with its number, so that Python can tell what the system said
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(refused.code().value(), refused.what()).ptr());
    }
  });
  m.def("configure", [](nb::object call_site, nb::object make_error, nb::object report_stall) {
    g_call_site = new nb::object(std::move(call_site));
    g_make_error = new nb::object(std::move(make_error));
    g_report_stall = new nb::object(std::move(report_stall));
  });
  nb::list kinds;
  for (std::uint32_t kind = 1; kind <= static_cast<std::uint32_t>(FailureKind::kSystem); ++kind)
    kinds.append(kind_name(static_cast<FailureKind>(kind)));
  m.attr("FAILURE_KINDS") = kinds;
  m.def("end_stall_reports", [] { g_stall_reports.close(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("reduces", [](int dtype, int op) {
    return find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op)) != nullptr;
  }, "True if the reduce operation has a meaning for the dtype.");
  m.def("overlap", [](const Addresses& writes, const Addresses& write_bytes, const Addresses& reads,
                      const Addresses& read_bytes) {
    std::vector<std::pair<Address, Address>> written;  // [begin, end)
    for (std::size_t i = 0; i < writes.size(); ++i)
      if (write_bytes[i] > 0) written.emplace_back(writes[i], writes[i] + write_bytes[i]);
    std::sort(written.begin(), written.end());
    for (std::size_t i = 1; i < written.size(); ++i)
      if (written[i].first < written[i - 1].second) return true;
    for (std::size_t i = 0; i < reads.size(); ++i) {
      const Address end = reads[i] + read_bytes[i];
      // The first that ends behind the read's begin: they are disjoint, so sorted by their ends, too.
      const auto next = std::upper_bound(written.begin(), written.end(), reads[i],
                                         [](Address begin, const auto& range) { return begin < range.second; });
      if (read_bytes[i] > 0 && next != written.end() && next->first < end) return true;
    }
    return false;
  }, nb::arg("writes"), nb::arg("write_bytes"), nb::arg("reads"), nb::arg("read_bytes"),
     "True if a range that is written overlaps another one, or one that is read.");
  // Buffers of this process, in their order; `out` may be one of them.
  m.def("reduce_buffers", [](Address out, const Addresses& ins, int dtype, int op, std::size_t count) {
    const ReduceFn reduce = find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op));
    nb::gil_scoped_release release;
    reduce_anywhere(reduce, static_cast<Dtype>(dtype), pointer(out), inputs(ins).data(), static_cast<int>(ins.size()),
                    count);
  }, nb::arg("out"), nb::arg("ins"), nb::arg("dtype"), nb::arg("op"), nb::arg("count"));
  m.def("simd_level", &simd_level);
  bind_peers(m);
  m.def("digests", [](const Addresses& pieces, const std::vector<std::size_t>& sizes, int num_threads) {
    std::vector<Bytes> bytes;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (sizes.at(i) < kLeastDigestBytes) throw std::invalid_argument("a piece is too short for a digest");
      bytes.emplace_back(static_cast<const std::byte*>(pointer(pieces[i])), sizes[i]);
    }
    std::vector<Digest> found;
    {
      nb::gil_scoped_release release;
      found = digests(bytes, num_threads);
    }
    return nb::bytes(found.data(), found.size() * sizeof(Digest));
  }, nb::arg("pieces"), nb::arg("sizes"), nb::arg("num_threads"), "16 bytes of each piece, one after the other.");
  bind_segment(m);
  bind_handles(m);
  bind_group(m);
}
