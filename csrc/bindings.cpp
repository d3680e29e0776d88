// The core as a Python module. Takes addresses, counts and codes; keeps no Python object; waits without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/chrono.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "group.h"

namespace nb = nanobind;

namespace phalanx {
namespace {

// Set once by configure(); leaked on purpose, the interpreter may be gone when statics are destroyed.
nb::object* g_call_site = nullptr;
nb::object* g_make_error = nullptr;

/// Hooks of a thread that came from Python and waits without the GIL.
class PythonHooks : public Hooks {
 public:
  void tick() override {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  std::string site() override {
    nb::gil_scoped_acquire gil;
    if (g_call_site == nullptr) return {};
    try {
      return nb::cast<std::string>((*g_call_site)());
    } catch (const std::exception&) {
      return {};  // an error message without a line is better than an error about the line
    }
  }
};

/// The Python exception for a failure of the core; the GIL is held.
nb::object to_python(const Failure& failure) {
  return (*g_make_error)(static_cast<int>(failure.kind), failure.message, failure.ranks, failure.op, failure.seq,
                         failure.pid, failure.exit_code, failure.signal);
}

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

/// Where an asynchronous call was made; none for one that blocks.
using Site = std::optional<std::string>;

/// Run `work` in the calling thread, or queue it when it comes with a site; then the Job is returned.
template <class Work>
std::shared_ptr<Job> start(Group& group, const Site& site, double timeout_s, Work work) {
  nb::gil_scoped_release release;
  if (!site) {
    PythonHooks hooks;
    group.run(hooks, [&](Hooks& h) { work(group.collectives(), Context{&h, timeout_s}); });
    return nullptr;
  }
  return group.submit(
      [&collectives = group.collectives(), timeout_s, work = std::move(work)](Hooks& h) {
        work(collectives, Context{&h, timeout_s});
      },
      *site);
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

void bind_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment", nb::is_weak_referenceable())
      .def_static("create", &Segment::create)
      .def_static(
          "attach",
          [](const std::string& name, const std::string& nonce, double timeout_s) {
            nb::gil_scoped_release release;
            return Segment::attach(name, nonce, timeout_s, check_signals());
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
        return self.serve(num_peers, timeout_s, check_signals());
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
                           GroupConfig{rank, size, std::move(name), std::move(global_ranks), timeout_s, stall_s, spin_us});
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
    g.collectives().tuning = Tuning{one_shot_bytes, chunk_bytes};
  }, nb::arg("one_shot_bytes"), nb::arg("chunk_bytes"));
  group.def("set_timeout", [](Group& g, double timeout_s) { g.board().set_timeout(timeout_s); });
  group.def("abort", &Group::abort, nb::arg("why"), nb::call_guard<nb::gil_scoped_release>());
  group.def("leave", &Group::leave, nb::call_guard<nb::gil_scoped_release>());
  group.def("join", [](Group& g, double timeout_s) {
    start(g, std::nullopt, timeout_s, [](Collectives& c, const Context& x) { c.join(x); });
  });
  group.def("barrier", [](Group& g, Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [](Collectives& c, const Context& x) { c.barrier(x); });
  }, nb::arg("timeout"), nb::arg("site").none());
  group.def("broadcast", [](Group& g, Address data, int dtype, std::size_t item, std::size_t count, int root,
                            Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, items = make_items(dtype, item, count)](Collectives& c, const Context& x) {
      c.broadcast(x, pointer(data), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_reduce", [](Group& g, Address in, Address out, int dtype, std::size_t item, std::size_t count, int op,
                             int code, Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, items = make_items(dtype, item, count),
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
    start(g, std::nullopt, timeout.count(), [&](Collectives& c, const Context& x) {
      squares = c.all_reduce(x, pieces, make_items(dtype, item, count), make_reduction(dtype, op, code),
                             num_squared > 0 ? find_squares(static_cast<Dtype>(dtype)) : nullptr);
    });
    return squares;
  });
  group.def("reduce", [](Group& g, Address in, Address out, int dtype, std::size_t item, std::size_t count, int op,
                         int code, int root, Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, items = make_items(dtype, item, count),
                                        reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.reduce(x, pointer(in), pointer(out), items, reduction, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  group.def("reduce_scatter", [](Group& g, Addresses ins, Address out, int dtype, std::size_t item, std::size_t count,
                                 int op, int code, Timeout timeout, Site site) {
    return start(g, site, timeout.count(),
                 [=, ins = std::move(ins), items = make_items(dtype, item, count),
                  reduction = make_reduction(dtype, op, code)](Collectives& c, const Context& x) {
      c.reduce_scatter(x, inputs(ins), pointer(out), items, reduction);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"),
     nb::arg("site").none());
  group.def("all_gather", [](Group& g, Address in, Addresses outs, int dtype, std::size_t item, std::size_t count,
                             Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, outs = std::move(outs), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.all_gather(x, pointer(in), outputs(outs), items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("gather", [](Group& g, Address in, Addresses outs, int dtype, std::size_t item, std::size_t count, int root,
                         Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, outs = std::move(outs), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.gather(x, pointer(in), outputs(outs), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("scatter", [](Group& g, Addresses ins, Address out, int dtype, std::size_t item, std::size_t count, int root,
                          Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, ins = std::move(ins), items = make_items(dtype, item, count)](
                                           Collectives& c, const Context& x) {
      c.scatter(x, inputs(ins), pointer(out), items, root);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_to_all", [](Group& g, Addresses ins, Addresses outs, int dtype, std::size_t item, std::size_t count,
                             Timeout timeout, Site site) {
    return start(g, site, timeout.count(), [=, ins = std::move(ins), outs = std::move(outs),
                                        items = make_items(dtype, item, count)](Collectives& c, const Context& x) {
      c.all_to_all(x, inputs(ins), outputs(outs), items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("all_to_all_split", [](Group& g, Addresses ins, std::vector<std::uint64_t> in_counts, Addresses outs,
                                   std::vector<std::uint64_t> out_counts, int dtype, std::size_t item,
                                   Timeout timeout, Site site) {
    return start(g, site, timeout.count(),
                 [=, ins = std::move(ins), outs = std::move(outs), in_counts = std::move(in_counts),
                  out_counts = std::move(out_counts), items = make_items(dtype, item, 0)](Collectives& c, const Context& x) {
      c.all_to_all_split(x, inputs(ins), in_counts, outputs(outs), out_counts, items);
    });
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("timeout"), nb::arg("site").none());
  group.def("wait_job", [](Group& g, const std::shared_ptr<Job>& job, double timeout_s) {
    PythonHooks hooks;
    nb::gil_scoped_release release;
    const bool done = g.worker().wait(job, hooks, g.spin(), timeout_s);
    if (done && job->error()) std::rethrow_exception(job->error());
    return done;
  });
  auto post = [](Op op) {
    return [op](Group& g, Address data, int dtype, std::size_t item, std::size_t count, int peer, std::int64_t tag,
                std::string site) {
      nb::gil_scoped_release release;
      return g.p2p().post(op, pointer(data), make_items(dtype, item, count), peer, tag,
                          std::move(site));
    };
  };
  group.def("send", post(Op::kSend));
  group.def("recv", post(Op::kRecv));
  group.def("cancel", [](Group& g, const std::shared_ptr<Request>& request) { return g.p2p().cancel(request); },
            nb::call_guard<nb::gil_scoped_release>());
  group.def("wait_request", [](Group& g, const std::shared_ptr<Request>& request, double timeout_s) {
    PythonHooks hooks;
    nb::gil_scoped_release release;
    if (timeout_s > 0) return g.p2p().wait_briefly(request, hooks, timeout_s);
    g.p2p().wait(request, hooks, 0);
    return true;
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
    }
  });
  m.def("configure", [](std::vector<std::string> dtypes, std::vector<std::string> reduce_ops, nb::object call_site,
                        nb::object make_error) {
    Names::dtypes = std::move(dtypes);
    Names::reduce_ops = std::move(reduce_ops);
    g_call_site = new nb::object(std::move(call_site));
    g_make_error = new nb::object(std::move(make_error));
  });
  m.def("reduces", [](int dtype, int op) {
    return find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op)) != nullptr;
  }, "True if the reduce operation has a meaning for the dtype.");
  // Buffers of this process, in their order; `out` may be one of them.
  m.def("reduce_buffers", [](Address out, const Addresses& ins, int dtype, int op, std::size_t count) {
    const ReduceFn reduce = find_reduce(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op));
    nb::gil_scoped_release release;
    reduce(pointer(out), inputs(ins).data(), static_cast<int>(ins.size()), count);
  }, nb::arg("out"), nb::arg("ins"), nb::arg("dtype"), nb::arg("op"), nb::arg("count"));
  m.def("simd_level", &simd_level);
  bind_segment(m);
  bind_handles(m);
  bind_group(m);
}
