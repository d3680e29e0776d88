// The short way from torch's front end into the core, on which no Python function of ours runs.
//
// Each operation of `PhalanxGroup` is an EntryPoint: a method that wraps a Python function. If the call is usual, that
// is, if nothing listens to it, it blocks, its timeout is the group's, the core runs on this host alone, and all tensors
// are plain, the entry point runs the operation itself. In any other case it does nothing and calls the Python function
// with the same arguments, so that this function alone decides what an unusual call means and explains mistakes.
//
// Reading torch's options by their properties would cost as much as the rest of the call, so an entry point reads them
// where they lie in memory. src/phalanx/_torch/options.py finds out where that is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string_view>

#include "python/python.h"
#include "python/reference.h"

namespace phalanx {
namespace {

/// The side on which torch passes a list with one list of tensors. Ranks other than a root pass an empty list there.
enum class Nested { kNeither, kOuts, kIns };

constexpr std::int64_t kUnset = -1;  // torch's value for the group's own timeout, in milliseconds
constexpr std::int64_t kMostRanks = 1 << 20;

/// How an operation takes its arguments: outputs, inputs, other arguments, options.
struct Form {
  std::string_view name;  // of the method of `Operations`
  Op op;
  std::size_t num_args;  // before the options
  Nested nested = Nested::kNeither;
};
constexpr Form kForms[] = {
    {"barrier", Op::kBarrier, 0},
    {"broadcast", Op::kBroadcast, 1},
    {"allreduce", Op::kAllReduce, 1},
    {"reduce", Op::kReduce, 1},
    {"allgather", Op::kAllGather, 2, Nested::kOuts},
    {"all_gather_single", Op::kAllGather, 2},
    {"gather", Op::kGather, 2, Nested::kOuts},
    {"scatter", Op::kScatter, 2, Nested::kIns},
    {"reduce_scatter", Op::kReduceScatter, 2, Nested::kIns},
    {"reduce_scatter_single", Op::kReduceScatter, 2},
    {"all_to_all_single", Op::kAllToAll, 4},
};

/// Offsets of the fields in torch's options, see `Layout` in src/phalanx/_torch/options.py.
struct Layout {
  int async_op, timeout, reduce_op, root;
};

struct EntryPoint {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* method;  // the Python function, which runs every call that is not usual
  PyTypeObject* options;
  Layout layout;
  const Form* form;
};
PyTypeObject* entry_point_type;

// What all entry points need of torch. Kept forever.
PyObject *is_profiling, *num_dispatch_modes;
std::array<int, 32> reduce_codes;  // by torch's number of a reduce operation; -1 if only Python knows the operation
PyObject* bound_method;  // the type of bound methods, which the stable ABI does not offer
PyObject *direct, *operations, *core, *num_barriers, *opts, *none_listed;

PyObject* ask(PyObject* function) { return PyObject_Vectorcall(function, nullptr, 0, nullptr); }

/// The number that a function returns; -1 if it raises an exception.
int number(PyObject* answer) {
  const Reference found(answer);
  if (found.get() == nullptr) return -1;
  const long value = PyLong_AsLong(found.get());
  if (value == -1) PyErr_Clear();
  return static_cast<int>(value);
}

/// True if a hook, a debug wrapper, a dispatch mode or a profiler may want to see the calls of a group, see
/// `PhalanxGroup.goes_direct`.
bool is_observed(PyObject* group) {
  if (Reference(PyObject_GetAttr(group, direct)).get() != Py_True) return true;
  return Reference(ask(is_profiling)).get() != Py_False || number(ask(num_dispatch_modes)) != 0;
}

/// The options of a usual call.
struct Options {
  int root = -1;
  int kernel = 0, code = -1;
};

/// Reads a field of an object that C++ code of torch has made.
template <class Field>
Field field(const std::byte* object, int offset) {
  Field value;
  std::memcpy(&value, object + offset, sizeof(value));
  return value;
}

/// Returns false if the options are not those of a usual call.
bool read_options(const EntryPoint& self, PyObject* given, Options& found) {
  if (Py_TYPE(given) != self.options) return false;
  const auto* held = field<const std::byte*>(reinterpret_cast<const std::byte*>(given), sizeof(PyObject));
  const Layout& at = self.layout;
  if (held == nullptr) return false;  // an object whose constructor has not run
  if (field<std::uint8_t>(held, at.async_op) != 0 || field<std::int64_t>(held, at.timeout) != kUnset) return false;
  if (at.reduce_op >= 0) {
    const auto number = field<std::uint8_t>(held, at.reduce_op);
    if (number >= reduce_codes.size() || reduce_codes[number] < 0) return false;
    found.kernel = found.code = reduce_codes[number];
  }
  if (at.root >= 0) {
    const auto root = field<std::int64_t>(held, at.root);
    if (root < 0 || root > kMostRanks) return false;
    found.root = static_cast<int>(root);
  }
  return true;
}

/// The only item of a list; null, without an exception, if there is no such item.
PyObject* only(PyObject* list) {
  if (!PyList_Check(list) || PyList_Size(list) != 1) return nullptr;
  PyObject* const item = PyList_GetItem(list, 0);
  Py_INCREF(item);  // another thread may change the list while this call runs
  return item;
}

bool is_empty(PyObject* list) { return PyList_Check(list) && PyList_Size(list) == 0; }

/// Replaces the nested side by its only inner list. A rank that is not the root passes no inner list: the side is then
/// replaced by an empty list.
bool take_out(PyObject*& side, nb::object& kept, bool is_expected) {
  if (!is_expected) {
    if (!is_empty(side)) return false;
    side = none_listed;
    return true;
  }
  kept = nb::steal(only(side));
  side = kept.ptr();
  return side != nullptr;
}

/// Adds 1 to a number that Python code counts.
void count(nb::handle holder, nb::handle name) { nb::setattr(holder, name, nb::getattr(holder, name) + nb::int_(1)); }

/// Runs a call if it is usual: returns true if it ran, and false if it did nothing.
bool run_usual(const EntryPoint& self, PyObject* group, PyObject* const* args, PyObject* given) {
  const Form& form = *self.form;
  Options options;
  if (is_observed(group) || !read_options(self, given, options)) return false;
  if (form.op == Op::kAllToAll && (!is_empty(args[2]) || !is_empty(args[3]))) return false;  // uneven splits
  const Reference held(PyObject_GetAttr(group, operations));
  if (held.get() == nullptr) return false;
  const Reference found(PyObject_GetAttr(held.get(), core));  // kept, because another thread may leave the group
  Group* g = nullptr;
  if (!nb::try_cast<Group*>(nb::handle(found.get()), g, false) || g == nullptr) return false;
  PyObject* outs = form.num_args == 0 ? none_listed : args[0];
  PyObject* ins = form.num_args < 2 ? outs : args[1];
  nb::object kept;
  const bool may_be_away = form.op == Op::kGather || form.op == Op::kScatter;
  const bool is_expected = !may_be_away || g->control().rank() == options.root;
  if (form.nested != Nested::kNeither && !take_out(form.nested == Nested::kOuts ? outs : ins, kept, is_expected))
    return false;
  if (!run_plain(*g, form.op, ins, outs, options.root, options.kernel, options.code, Timeout(0))) return false;
  if (form.op == Op::kBarrier) count(held.get(), num_barriers);
  return true;
}

/// True if a call has the arguments of an operation and nothing else. torch passes the options by position or as `opts`.
bool has_form(const EntryPoint& self, std::size_t num_given, PyObject* names) {
  const Py_ssize_t num_named = names == nullptr ? 0 : PyTuple_Size(names);
  if (num_named > 1 || (num_named == 1 && PyTuple_GetItem(names, 0) != opts)) return false;
  return num_given + static_cast<std::size_t>(num_named) == self.form->num_args + 2;  // the group and the options as well
}

PyObject* call(PyObject* callable, PyObject* const* args, std::size_t num_and_flag, PyObject* names) {
  const auto& self = *reinterpret_cast<EntryPoint*>(callable);
  const auto num_given = static_cast<std::size_t>(PyVectorcall_NARGS(num_and_flag));
  try {
    if (has_form(self, num_given, names) && run_usual(self, args[0], args + 1, args[self.form->num_args + 1]))
      return nb::none().release().ptr();
  } catch (...) {
    set_exception(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(self.method, args, num_and_flag, names);
}

// ---- the type: a method that looks like the Python function that it wraps ----

PyObject* bind(PyObject* self, PyObject* group, PyObject*) {
  if (group == nullptr || group == Py_None) return Py_NewRef(self);
  return PyObject_CallFunctionObjArgs(bound_method, self, group, nullptr);
}

PyObject* attribute(PyObject* self, PyObject* name) {
  return PyObject_GetAttr(reinterpret_cast<EntryPoint*>(self)->method, name);
}

PyObject* shown(PyObject* self) { return PyObject_Repr(reinterpret_cast<EntryPoint*>(self)->method); }

PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(EntryPoint, call), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                       {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                       {Py_tp_repr, reinterpret_cast<void*>(shown)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"phalanx._core.EntryPoint", sizeof(EntryPoint), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                        Py_TPFLAGS_DISALLOW_INSTANTIATION,
                    slots};

/// Makes an entry point, which lives forever, as do the classes that have it.
nb::object make(const nb::object& method, const std::string& name, const nb::object& options, int async_op, int timeout,
                int reduce_op, int root) {
  const auto* form = std::find_if(std::begin(kForms), std::end(kForms), [&](const Form& f) { return f.name == name; });
  if (form == std::end(kForms)) return method;
  auto* self = PyObject_New(EntryPoint, entry_point_type);
  if (self == nullptr) throw nb::python_error();
  self->call = call;
  self->method = method.inc_ref().ptr();
  self->options = reinterpret_cast<PyTypeObject*>(options.inc_ref().ptr());
  self->layout = {async_op, timeout, reduce_op, root};
  self->form = form;
  return nb::borrow(reinterpret_cast<PyObject*>(self));  // the first reference is never given back
}

}  // namespace

void bind_entry_points(nb::module_& m) {
  entry_point_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (entry_point_type == nullptr) throw nb::python_error();
  bound_method = nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
  direct = PyUnicode_InternFromString("_direct");
  operations = PyUnicode_InternFromString("_operations");
  core = PyUnicode_InternFromString("_core");
  num_barriers = PyUnicode_InternFromString("num_barriers");
  opts = PyUnicode_InternFromString("opts");
  none_listed = PyTuple_New(0);
  m.def("configure_entry_points", [](nb::object profiling, nb::object modes, nb::dict codes) {
    is_profiling = profiling.release().ptr();
    num_dispatch_modes = modes.release().ptr();
    reduce_codes.fill(-1);
    for (const auto [number, code] : codes) reduce_codes.at(nb::cast<std::size_t>(number)) = nb::cast<int>(code);
  }, nb::arg("is_profiling"), nb::arg("num_dispatch_modes"), nb::arg("reduce_codes"));
  m.def("entry_point", &make, nb::arg("method"), nb::arg("name"), nb::arg("options"), nb::arg("async_op"),
        nb::arg("timeout"), nb::arg("reduce_op"), nb::arg("root"),
        "A method that runs usual calls itself, and calls `method` otherwise; `method` if there is no short way.");
}

}  // namespace phalanx
