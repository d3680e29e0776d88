// The core as a Python module, whose stub is src/phalanx/_core.pyi: a change here needs the same change there. Its
// functions take addresses, counts and codes, or plain tensors. Operations hold no reference to a Python object, and
// wait without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/chrono.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "process/blocks.h"
#include "memory/digest.h"
#include "process/block_pool.h"
#include "process/parking.h"
#include "python/python.h"
#include "python/python_failures.h"
#include "process/shield.h"
#include "python/tensors.h"

namespace phalanx {
namespace {


/// Hooks of a rank that joins a group: each tick also calls a Python function, which looks in the store for errors of
/// other ranks.
class JoinHooks : public PythonHooks {
 public:
  JoinHooks(WithoutGil& thread, nb::object& look) : PythonHooks(thread), look_(look) {}
  void tick() override {
    PythonHooks::tick();
    thread_.with_gil([this] { look_(); });
  }

 private:
  nb::object& look_;
};

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

/// A queue of the numbers of finished operations whose futures are yet to be completed. Python threads read the queue.
///
/// Held by shared_ptr, so that a native thread that drops the last reference needs no GIL.
class Completions : public std::enable_shared_from_this<Completions> {
 public:
  void push(std::int64_t number) {
    std::lock_guard lock(mutex_);
    numbers_.push_back(number);
    ready_.notify_one();
  }
  /// Wait for the next number and return it; -1 once the queue is closed and empty.
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

std::function<void()> check_signals(WithoutGil& thread) {
  return [&thread] { PythonHooks(thread).tick(); };
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
      .def_prop_ro("dead", [](const PeerWatch& self) { return self.dead(); })
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
            WithoutGil thread;
            return Segment::attach(name, nonce, bounded(timeout_s), check_signals(thread));
          },
          nb::arg("name"), nb::arg("nonce"), nb::arg("timeout_s"))
      .def_prop_ro("nonce", &Segment::nonce)
      .def_prop_ro("fd", &Segment::fd)
      .def("create_group", [](Segment& self, int size) { return ControlBlock::create(self, size); }, nb::arg("size"));
  nb::class_<SegmentServer>(m, "SegmentServer")
      .def(nb::init<std::shared_ptr<Segment>>())
      .def_prop_ro("name", &SegmentServer::name)
      .def("serve", [](SegmentServer& self, int num_peers, double timeout_s) {
        WithoutGil thread;
        return self.serve(num_peers, bounded(timeout_s), check_signals(thread));
      }, nb::arg("num_peers"), nb::arg("timeout_s"));
}

void bind_handles(nb::module_& m) {
  nb::class_<Completions>(m, "Completions")
      .def(nb::new_([] { return std::make_shared<Completions>(); }))
      .def("pop", &Completions::pop, nb::call_guard<nb::gil_scoped_release>())
      .def("push", &Completions::push, nb::arg("number"), "Push the number of an operation that the core does not run.")
      .def("close", &Completions::close);
  nb::class_<Work>(m, "Work")
      .def_prop_ro("done", &Work::done)
      .def("error", [](const Work& self) { return error_object(self.error()); })
      .def("require_reachable", &Work::require_reachable, "Throw if this thread can never see it done.")
      .def("notify", [](Work& self, std::shared_ptr<Completions> completions, std::int64_t number) {
        nb::gil_scoped_release release;
        self.notify([completions, number] { completions->push(number); });
      });
  nb::class_<CollectiveWork, Work>(m, "CollectiveWork");
  nb::class_<Request, Work>(m, "Request")
      .def_prop_ro("source", &Request::source)
      .def("expect_nobody_beyond", &Request::expect_nobody_beyond);
}

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
  group.def_prop_ro("issued", &Group::issued, "How many collectives this rank has called, begun or not.");
  group.def_prop_ro("seq", [](Group& g) { return g.collectives().seq() - 1; });  // the join does not count
  group.def_prop_ro("spins", [](Group& g) { return g.control().spins(); });
  group.def_prop_ro("ended", [](Group& g) { return g.control().ended(); });
  group.def_prop_ro("told", [](Group& g) { return g.control().told(); }, "Whether any rank has ended the group.");
  group.def_prop_rw("records_collectives", [](Group& g) { return g.collectives().records; },
                    [](Group& g, bool records) { g.collectives().records = records; });
  group.def_prop_rw("compares_calls", [](Group& g) { return g.collectives().compares_calls; },
                    [](Group& g, bool compares) { g.collectives().compares_calls = compares; });
  group.def("tune", [](Group& g, std::size_t one_shot_bytes, std::size_t chunk_bytes) {
    g.collectives().tuning = Tuning{std::min(one_shot_bytes, kStageBytes), std::clamp(chunk_bytes, kPage, kSlotBytes)};
  }, nb::arg("one_shot_bytes"), nb::arg("chunk_bytes"));
  group.def("set_timeout", [](Group& g, double timeout_s) {
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout must be more than 0 s, got " + std::to_string(timeout_s));
    g.control().set_timeout(bounded(timeout_s));
  });
  group.def("abort", &Group::abort, nb::arg("why"), nb::call_guard<nb::gil_scoped_release>());
  group.def("leave", &Group::leave, nb::arg("why") = "", nb::call_guard<nb::gil_scoped_release>());
  // `look` is called at intervals while this rank waits; if it raises an exception, the wait and the group end.
  group.def("join", [](Group& g, double timeout_s, nb::object look) {
    WithoutGil thread;
    JoinHooks hooks(thread, look);
    g.worker().run(Op::kJoin, bounded(timeout_s), hooks,
                   [&](Hooks& h) { g.collectives().join(Context{&h, bounded(timeout_s)}); });
    hooks.raise();
  }, nb::arg("timeout_s"), nb::arg("look"));
  bind_calls(m, group);
  group.def("wait_collective", [](Group& g, const std::shared_ptr<CollectiveWork>& work, double timeout_s) {
    bool done = false;
    run_without_gil([&](Hooks& hooks) {
      done = g.worker().wait(work, hooks, bounded(timeout_s));
      if (done && work->error()) std::rethrow_exception(work->error());
    });
    return done;
  });
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

void bind_memory(nb::module_& m) {
  // Only for tests; outside of tests, a process uses the pool of start_block_pool(). Blocks are identified by their
  // addresses.
  nb::class_<Blocks>(m, "Blocks")
      .def(nb::init<std::size_t, bool>(), nb::arg("reach"), nb::arg("huge_pages"))
      .def("take", [](Blocks& self, std::size_t bytes) { return reinterpret_cast<Address>(self.take(bytes)); })
      .def("put", [](Blocks& self, Address block) { self.put(pointer(block)); })
      .def("growth", &Blocks::growth)
      .def("next_window", &Blocks::next_window)
      .def("trim", &Blocks::trim)
      .def_prop_ro("resident", &Blocks::resident)
      .def_prop_ro("kept", &Blocks::kept);
  // The fields of each limit: see struct Limit.
  using Limits = std::vector<std::tuple<std::uint64_t, std::string, std::string, std::string>>;
  m.def("start_block_pool", [](std::uint64_t reach, bool huge_pages, const Limits& limits) {
    std::vector<Limit> known;
    for (const auto& [bytes, used, stat, cache] : limits) known.push_back({bytes, used, stat, cache});
    return start_block_pool(reach, huge_pages, std::move(known));
  }, nb::arg("reach"), nb::arg("huge_pages"), nb::arg("limits"));
  m.def("block_pool", [] {
    const BlockPoolState state = block_pool();
    return nb::make_tuple(state.keeps, state.why, state.resident, state.unused);
  }, "Whether blocks are kept; if not, why; resident bytes; unused bytes among them.");
}

/// Sets the Python exception for an exception of the core; throws any other again.
void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const Failure& failure) {
    nb::object value = to_python(failure);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  } catch (const std::system_error& refused) {  // becomes an OSError with its errno
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(refused.code().value(), refused.what()).ptr());
  }
}

}  // namespace

void set_exception(std::exception_ptr error) noexcept {
  try {
    translate(error, nullptr);
  } catch (nb::python_error& raised) {
    raised.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& other) {
    PyErr_SetString(PyExc_RuntimeError, other.what());
  }
}

}  // namespace phalanx

NB_MODULE(_core, m) {
  using namespace phalanx;
  nb::set_leak_warnings(false);  // torch keeps groups until after the interpreter has ended
  nb::register_exception_translator(&translate);
  m.def("configure", [](nb::object call_site, nb::object shown_file, nb::object make_error, nb::object report_stall) {
    g_call_site = new nb::object(std::move(call_site));
    g_shown_file = new nb::object(std::move(shown_file));
    g_make_error = new nb::object(std::move(make_error));
    g_report_stall = new nb::object(std::move(report_stall));
  });
  nb::list kinds;
  for (std::uint32_t kind = 1; kind <= static_cast<std::uint32_t>(FailureKind::kSystem); ++kind)
    kinds.append(kind_name(static_cast<FailureKind>(kind)));
  m.attr("FAILURE_KINDS") = kinds;
  m.def("say_where", &ControlBlock::say_on_all, nb::arg("text"));
  m.def("hold", &ControlBlock::hold_on_all, nb::arg("text"));
  static const bool parks_threads = park_threads_at_end();
  m.attr("PARKS_THREADS") = parks_threads;
  m.def("end_stall_reports", [] { g_stall_reports.close(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("reduces", [](int dtype, int op) {
    return find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op)) != nullptr;
  }, "True if the reduce operation has a meaning for the dtype.");
  // Reduces the buffers `ins` of this process, in their order; `out` may be one of them.
  m.def("reduce_buffers", [](Address out, const Addresses& ins, int dtype, int op, std::size_t count) {
    const ReduceFn reduce = find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op));
    nb::gil_scoped_release release;
    reduce_anywhere(reduce, static_cast<Dtype>(dtype), pointer(out), inputs(ins).data(), static_cast<int>(ins.size()),
                    count);
  }, nb::arg("out"), nb::arg("ins"), nb::arg("dtype"), nb::arg("op"), nb::arg("count"));
  m.def("simd_level", &simd_level);
  m.def("obey_only", &obey_only, nb::arg("owner"), nb::arg("signals"));
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
  }, nb::arg("pieces"), nb::arg("sizes"), nb::arg("num_threads"), "The 16-byte digests, concatenated.");
  bind_recorder(m);
  bind_entry_points(m);
  bind_memory(m);
  bind_segment(m);
  bind_handles(m);
  bind_group(m);
}
