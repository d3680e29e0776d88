// The collectives and messages of a group as Python calls them. A change to a function here also changes its stub in
// src/phalanx/_core.pyi and its callers in src/phalanx/backend/calls. Each collective is described as a Collective, and
// run_here() or queue() runs it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/chrono.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory_resource>
#include <optional>
#include <stdexcept>
#include <utility>

#include "p2p/signals.h"
#include "python/python.h"
#include "python/tensors.h"

namespace phalanx {
namespace {

using Inputs = std::span<const void* const>;
using Outputs = std::span<void* const>;
using CountList = std::vector<std::uint64_t>;

/// One collective: what its ranks agree on, and how it is computed.
struct Collective {
  Op op = Op::kNone;
  Items items{};
  int kernel = 0;  // for a reduction, the ReduceOp to compute
  int code = -1;   // for a reduction, the code that ranks must agree on; PREMUL_SUM has its own
  int root = -1;
  CountList in_counts{}, out_counts{};  // elements of each rank's block, if the blocks differ in size

  Reduction reduction() const {
    return {static_cast<std::uint8_t>(code + 1),
            find_reduce(static_cast<Dtype>(items.dtype), static_cast<ReduceOp>(kernel))};
  }
  void run(Collectives& c, const Context& x, Inputs ins, Outputs outs) const;
};

void Collective::run(Collectives& c, const Context& x, Inputs ins, Outputs outs) const {
  switch (op) {
    case Op::kBarrier: return c.barrier(x);
    case Op::kBroadcast: return c.broadcast(x, outs[0], items, root);
    case Op::kAllReduce: return c.all_reduce(x, ins[0], outs[0], items, reduction());
    case Op::kReduce: return c.reduce(x, ins[0], outs[0], items, reduction(), root);
    case Op::kReduceScatter: return c.reduce_scatter(x, ins, outs[0], items, reduction(), in_counts);
    case Op::kAllGather: return c.all_gather(x, ins[0], outs, items, out_counts);
    case Op::kGather: return c.gather(x, ins[0], outs, items, root);
    case Op::kScatter: return c.scatter(x, ins, outs[0], items, root);
    case Op::kAllToAll:
      if (in_counts.empty()) return c.all_to_all(x, ins, outs, items);
      return c.all_to_all_split(x, ins, in_counts, outs, out_counts, items);
    default: throw std::invalid_argument(std::string(op_name(op)) + " is not a collective");
  }
}

Op find_op(const std::string& name) {
  for (int code = static_cast<int>(Op::kBarrier); code <= static_cast<int>(Op::kAllToAll); ++code)
    if (name == op_name(static_cast<Op>(code))) return static_cast<Op>(code);
  throw std::invalid_argument(name + " is not a collective");
}

bool reduces(Op op) { return op == Op::kAllReduce || op == Op::kReduce || op == Op::kReduceScatter; }

/// Number of blocks that a rank passes in, and number of blocks that it gets out.
std::pair<std::size_t, std::size_t> num_blocks(Op op, std::size_t size, bool on_root) {
  switch (op) {
    case Op::kBarrier: return {0, 0};
    case Op::kAllGather: return {1, size};
    case Op::kReduceScatter: return {size, 1};
    case Op::kAllToAll: return {size, size};
    case Op::kGather: return {1, on_root ? size : 0};
    case Op::kScatter: return {on_root ? size : 0, 1};
    default: return {1, 1};
  }
}

/// The inputs or the outputs of a call, as blocks: each tensor of a list is one block, and a single tensor holds all
/// blocks.
class Side {
 public:
  explicit Side(std::pmr::memory_resource* room) : blocks(room), ranges(room), memories_(room) {}

  bool read(nb::handle tensors, std::size_t num_blocks, bool by_rows) {
    if (!read_plain(tensors.ptr(), memories_)) return false;
    if (memories_.empty()) return num_blocks == 0;
    items = memories_[0].items;
    const bool is_whole = !PyList_Check(tensors.ptr()) && !PyTuple_Check(tensors.ptr());
    if (is_whole && num_blocks > 1) {
      if (items.count % num_blocks != 0 || (by_rows && memories_[0].rows % num_blocks != 0)) return false;
      items.count /= num_blocks;
      for (std::size_t i = 0; i < num_blocks; ++i) blocks.push_back(memories_[0].data + i * items.bytes());
    } else {
      for (const Memory& memory : memories_) {
        if (memory.items.dtype != items.dtype || memory.items.count != items.count) return false;
        blocks.push_back(memory.data);
      }
    }
    for (const Memory& memory : memories_) ranges.push_back(Range{memory.data, memory.end()});
    return blocks.size() == num_blocks;
  }

  Items items{};
  std::pmr::vector<void*> blocks;
  std::pmr::vector<Range> ranges;

 private:
  Memories memories_;
};

/// True if no output overlaps another output or an input. The block that a rank passes to itself may be the same memory
/// as input and as output.
bool are_apart(Side& ins, Side& outs, std::size_t rank) {
  const bool is_gathered = ins.blocks.size() == 1;
  if (!is_gathered && outs.blocks.size() != 1) return !overlap(outs.ranges, ins.ranges);
  void* const own_in = ins.blocks.empty() ? nullptr : ins.blocks[is_gathered ? 0 : rank];
  void* const own_out = outs.blocks.empty() ? nullptr : outs.blocks[is_gathered && outs.blocks.size() > 1 ? rank : 0];
  if (own_in != own_out || own_in == nullptr) return !overlap(outs.ranges, ins.ranges);
  if (is_gathered) {
    ins.ranges.clear();
  } else if (ins.ranges.size() == 1) {
    outs.ranges.clear();
  } else {
    ins.ranges.erase(ins.ranges.begin() + static_cast<std::ptrdiff_t>(rank));
  }
  return !overlap(outs.ranges, ins.ranges);
}

/// The sum of squares over the pieces that are marked as `squared`, and the seconds until all ranks had arrived.
using Reduced = std::pair<double, double>;

Reduced reduce_pieces(Group& g, const Collective& call, std::span<const Piece> pieces, bool with_squares, Timeout timeout) {
  double squares = 0, waited_s = 0;
  run_here(g, Op::kAllReduce, timeout.count(), [&](Collectives& c, const Context& x) {
    squares = c.all_reduce(x, pieces, call.items, call.reduction(),
                           with_squares ? find_squares(static_cast<Dtype>(call.items.dtype)) : nullptr);
    waited_s = c.arrival_wait_s();
  });
  return {squares, waited_s};
}

/// Reduces a message that lies in several pieces, without first copying the pieces into one.
Reduced all_reduce_pieces(Group& g, const Collective& call, const Addresses& ins, const Addresses& outs,
                          const CountList& counts, std::size_t num_squared, Timeout timeout) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < ins.size(); ++i)
    pieces.push_back(Piece{pointer(ins[i]), pointer(outs[i]), counts[i], i < num_squared});
  return reduce_pieces(g, call, pieces, num_squared > 0, timeout);
}

/// Averages `tensors` and `marks` in place. `with_squares`: also add up the squares of `tensors`, but not of `marks`.
/// Returns no value, and does nothing, if a tensor is not plain or the dtypes differ.
std::optional<Reduced> average_plain(Group& g, nb::handle tensors, nb::handle marks, bool with_squares, Timeout timeout) {
  std::array<std::byte, 4096> room;
  std::pmr::monotonic_buffer_resource resource(room.data(), room.size());
  Memories memories(&resource);
  if (!read_plain(tensors.ptr(), memories) || memories.empty()) return std::nullopt;
  const std::size_t num_tensors = memories.size();
  if (!read_plain(marks.ptr(), memories)) return std::nullopt;
  constexpr int kAverage = static_cast<int>(ReduceOp::kAvg);
  Collective call{Op::kAllReduce, {memories[0].items.dtype, memories[0].items.item_bytes, 0}, kAverage, kAverage};
  std::vector<Piece> pieces;
  for (const Memory& memory : memories) {
    if (memory.items.dtype != call.items.dtype) return std::nullopt;
    call.items.count += memory.items.count;
    pieces.push_back(Piece{memory.data, memory.data, memory.items.count, pieces.size() < num_tensors});
  }
  if (call.reduction().apply == nullptr) return std::nullopt;
  return reduce_pieces(g, call, pieces, with_squares, timeout);
}

/// Returns the memory of a plain tensor, or of the only tensor in a list, for a message to or from `peer`. Returns no
/// value if the tensor is not plain, or `peer` is neither a rank of the group nor, for a receive, -1 (any source).
std::optional<Memory> plain_message(Group& g, Op op, nb::handle tensor, int peer) {
  std::array<std::byte, 2 * sizeof(Memory)> room;
  std::pmr::monotonic_buffer_resource resource(room.data(), room.size());
  Memories memories(&resource);
  const bool is_rank = peer >= (op == Op::kRecv ? -1 : 0) && peer < g.control().size();
  if (!is_rank || !read_plain(tensor.ptr(), memories) || memories.size() != 1) return std::nullopt;
  return memories[0];
}

std::shared_ptr<Request> post(Group& g, Op op, const Memory& memory, int peer, std::int64_t tag, std::string site) {
  nb::gil_scoped_release release;
  return guarded(g, op, [&] { return g.p2p().post(op, memory.data, memory.items, peer, tag, std::move(site)); });
}

}  // namespace

bool run_plain(Group& g, Op op, nb::handle inputs, nb::handle outputs, int root, int kernel, int code, Timeout timeout) {
  const auto size = static_cast<std::size_t>(g.control().size());
  const auto rank = static_cast<std::size_t>(g.control().rank());
  std::array<std::byte, 2048> room;
  std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
  Side ins(&memory), outs(&memory);
  const auto [num_ins, num_outs] = num_blocks(op, size, g.control().rank() == root);
  const bool by_rows = op == Op::kAllToAll;
  if (!ins.read(inputs, num_ins, by_rows)) return false;
  if (inputs.is(outputs)) {
    if (num_ins != num_outs) return false;
    outs.blocks = ins.blocks;
  } else {
    if (!outs.read(outputs, num_outs, by_rows)) return false;
    const bool are_alike = outs.items.dtype == ins.items.dtype && outs.items.count == ins.items.count;
    if (num_ins != 0 && num_outs != 0 && (!are_alike || !are_apart(ins, outs, rank))) return false;
  }
  const Collective call{op, num_ins != 0 ? ins.items : outs.items, kernel, reduces(op) ? code : -1, root};
  if (reduces(op) && (kernel != code || call.reduction().apply == nullptr)) return false;
  const bool has_root = op == Op::kBroadcast || op == Op::kReduce || op == Op::kGather || op == Op::kScatter;
  if (has_root && (root < 0 || root >= g.control().size())) return false;
  run_here(g, op, timeout.count(), [&](Collectives& c, const Context& x) {
    call.run(c, x, {ins.blocks.data(), ins.blocks.size()}, outs.blocks);
  });
  return true;
}

void bind_calls(nb::module_& m, nb::class_<Group>& group) {
  nb::class_<Collective>(m, "Call")
      .def("__init__",
           [](Collective* self, const std::string& op, int dtype, std::size_t item, std::size_t count, int kernel, int code,
              int root, std::optional<CountList> in_counts, std::optional<CountList> out_counts) {
             new (self) Collective{find_op(op), Items{static_cast<std::uint8_t>(dtype), item, count}, kernel, code, root,
                                   in_counts.value_or(CountList{}), out_counts.value_or(CountList{})};
           },
           nb::arg("op"), nb::arg("dtype") = 0, nb::arg("item") = 0, nb::arg("count") = 0, nb::arg("kernel") = 0,
           nb::arg("code") = -1, nb::arg("root") = -1, nb::arg("in_counts") = nb::none(),
           nb::arg("out_counts") = nb::none())
      .def_prop_ro("op", [](const Collective& self) { return op_name(self.op); })
      .def_prop_ro("dtype", [](const Collective& self) { return self.items.dtype; })
      .def_prop_ro("item", [](const Collective& self) { return self.items.item_bytes; })
      .def_prop_ro("count", [](const Collective& self) { return self.items.count; })
      .def_ro("kernel", &Collective::kernel)
      .def_ro("code", &Collective::code)
      .def_ro("root", &Collective::root)
      .def_ro("in_counts", &Collective::in_counts)
      .def_ro("out_counts", &Collective::out_counts);
  m.def("set_tensor_types", [](const std::vector<nb::object>& types, nb::handle strided) {
    std::vector<PyObject*> given;
    for (const nb::object& type : types) given.push_back(type.ptr());
    set_tensor_types(given.data(), given.size(), strided.ptr());
  }, nb::arg("types"), nb::arg("strided"));
  m.def("is_plain", [](nb::handle tensor) {
    std::array<std::byte, sizeof(Memory)> room;
    std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
    Memories memories(&memory);
    memories.reserve(1);
    return read_plain(tensor.ptr(), memories);
  }, nb::arg("tensor").none(), "True if the core may read and write the memory of a tensor, or of all in a list, as it is.");
  m.def("overlap", [](const Addresses& writes, const Addresses& write_bytes, const Addresses& reads,
                      const Addresses& read_bytes) {
    const auto ranges = [](const Addresses& begins, const Addresses& sizes) {
      std::pmr::vector<Range> made;
      for (std::size_t i = 0; i < begins.size(); ++i) {
        const auto* begin = static_cast<const std::byte*>(pointer(begins[i]));
        made.push_back(Range{begin, begin + sizes[i]});
      }
      return made;
    };
    std::pmr::vector<Range> written = ranges(writes, write_bytes);
    return overlap(written, ranges(reads, read_bytes));
  }, nb::arg("writes"), nb::arg("write_bytes"), nb::arg("reads"), nb::arg("read_bytes"),
     "True if two written ranges overlap, or a written and a read one.");
  group.def("run", [](Group& g, const Collective& call, Addresses ins, Addresses outs, Timeout timeout,
                      const std::optional<std::string>& site) -> std::shared_ptr<CollectiveWork> {
    auto body = [call, ins = std::move(ins), outs = std::move(outs)](Collectives& c, const Context& x) {
      call.run(c, x, inputs(ins), outputs(outs));
    };
    if (site) return queue(g, call.op, *site, timeout.count(), std::move(body));
    run_here(g, call.op, timeout.count(), std::move(body));
    return nullptr;
  }, nb::arg("call"), nb::arg("ins"), nb::arg("outs"), nb::arg("timeout"), nb::arg("site").none(),
     "Run a collective in this thread; with `site`, queue it and return its CollectiveWork.");
  group.def("run_plain", [](Group& g, const Collective& kind, nb::handle ins, nb::handle outs, int root, int kernel, int code,
                            Timeout timeout) {
    return run_plain(g, kind.op, ins, outs, root, kernel, code, timeout);
  }, nb::arg("kind"), nb::arg("ins").none(), nb::arg("outs").none(), nb::arg("root"),
            nb::arg("kernel"), nb::arg("code"), nb::arg("timeout"));
  group.def("all_reduce_pieces", &all_reduce_pieces);
  group.def("average_plain", &average_plain);
  // The next four functions serve windows. During a call, Python keeps the memory of the window's counters mapped.
  group.def("require_peer", [](Group& g, int peer, bool is_put) {
    WithoutGil thread;
    PythonHooks hooks(thread);
    Call call;
    call.op = is_put ? Op::kPut : Op::kMap;
    g.control().require_peer(call, peer, hooks);
  }, nb::arg("peer"), nb::arg("is_put"),
     "Throw if the group has ended, or `peer` has ended or left it.");
  group.def("signal", [](Group& g, Address counter, int peer) {
    WithoutGil thread;
    PythonHooks hooks(thread);
    send_signal(g.control(), *static_cast<SignalCounter*>(pointer(counter)), peer, hooks);
  }, nb::arg("counter"), nb::arg("peer"));
  group.def("wait_signal", [](Group& g, Address counter, std::uint64_t number, int peer, Timeout timeout) {
    run_without_gil([&](Hooks& hooks) {
      await_signal(g.control(), *static_cast<SignalCounter*>(pointer(counter)), number, peer, hooks, bounded(timeout.count()));
    });
  }, nb::arg("counter"), nb::arg("number"), nb::arg("peer"), nb::arg("timeout"));
  group.def("has_signal", [](Group&, Address counter, std::uint64_t number) {
    return static_cast<SignalCounter*>(pointer(counter))->load(std::memory_order_acquire) >= number;
  }, nb::arg("counter"), nb::arg("number"));
  for (const Op op : {Op::kSend, Op::kRecv}) {
    group.def(op_name(op), [op](Group& g, Address data, int dtype, std::size_t item, std::size_t count, int peer,
                                std::int64_t tag, std::string site) {
      const Items items{static_cast<std::uint8_t>(dtype), item, count};
      return post(g, op, Memory{static_cast<std::byte*>(pointer(data)), items, 1}, peer, tag, std::move(site));
    });
    // The same for a plain tensor. Returns None, and does nothing, if the tensor is not plain. Returns the peer's rank
    // if the message is already done; otherwise, the request.
    group.def(op == Op::kSend ? "send_plain" : "recv_plain",
              [op](Group& g, nb::handle tensor, int peer, std::int64_t tag) -> nb::object {
      const auto memory = plain_message(g, op, tensor, peer);
      if (!memory) return nb::none();
      // Only a receive needs its line: if the message has another size or dtype, the receive's error shows the line.
      std::string site = op == Op::kRecv ? nb::cast<std::string>((*g_call_site)()) : "";
      const auto request = post(g, op, *memory, peer, tag, std::move(site));
      if (request->done() && !request->error()) return nb::int_(request->source());
      return nb::cast(request);
    }, nb::arg("tensor").none(), nb::arg("peer"), nb::arg("tag"));
    // The same, but blocks until the message is done. Returns the peer's rank.
    group.def(op == Op::kSend ? "send_now" : "recv_now",
              [op](Group& g, nb::handle tensor, int peer, std::int64_t tag) -> std::optional<int> {
      const auto memory = plain_message(g, op, tensor, peer);
      if (!memory) return std::nullopt;
      run_without_gil([&](Hooks& hooks) {
        peer = guarded(g, op, [&] { return g.p2p().run(op, memory->data, memory->items, peer, tag, hooks); });
      });
      return peer;
    }, nb::arg("tensor").none(), nb::arg("peer"), nb::arg("tag"));
  }
}

}  // namespace phalanx
