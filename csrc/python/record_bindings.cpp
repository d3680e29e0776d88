// The black box as Python sees it, and how the line of a call is found.
//
// Every event has a source line, so that a rank that is killed while it computes shows the line of its last call.
// Finding the line means walking up Python's frames. 3 to 6 frames belong to torch and to Phalanx, and each frame
// becomes a Python object on the way. Two small tables remember recent functions and instructions, so a line costs up
// to 1 us. Reading the frames in place would cost less, but their layout changes with each version of Python, and a
// mistake would kill a training run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <chrono>
#include <iterator>
#include <string>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "python/python.h"

namespace phalanx {
namespace {

std::string shown_file(PyObject* code) {
  if (g_shown_file == nullptr) return {};  // no group was made yet
  try {
    return nb::cast<std::string>((*g_shown_file)(nb::handle(code)));
  } catch (const nb::python_error& error) {
    // If the recursion is too deep, the event has no line. Any other exception was raised by a signal handler and
    // belongs to the user.
    if (!error.matches(PyExc_RecursionError)) throw;
    return {};
  }
}

/// The files of code objects, as messages show them; empty if a file is not the user's. The map holds a reference to
/// each code object, so that no other code object can get its address.
using Files = std::unordered_map<PyObject*, std::string>;

constexpr std::size_t kMostKnown = 4096;  // a script that runs exec() in a loop makes new code objects without end

struct RecentCode {
  PyObject* code;
  const std::string* file;
};
struct RecentLine {
  const Recorder* writer;
  PyObject* code;
  long instruction;
  std::uint32_t number;
};
// Small hash tables in front of the map; a new entry replaces the old one in its slot.
RecentCode g_recent_codes[256];
RecentLine g_recent_lines[512];

void forget(Files& files) {
  Files gone;
  gone.swap(files);
  for (RecentCode& slot : g_recent_codes) slot = {};
  for (RecentLine& slot : g_recent_lines) slot = {};
  for (const auto& [code, file] : gone) Py_DECREF(code);
}

const std::string& file_of(PyObject* code) {
  RecentCode& slot = g_recent_codes[reinterpret_cast<std::uintptr_t>(code) / 64 % std::size(g_recent_codes)];
  if (slot.code == code) return *slot.file;
  static auto* const files = new Files;  // leaked: see g_call_site
  auto found = files->find(code);
  if (found == files->end()) {
    std::string file = shown_file(code);  // runs Python, which may re-enter this function and change `files`
    if (files->size() >= kMostKnown) forget(*files);
    bool is_new = false;
    std::tie(found, is_new) = files->try_emplace(code, std::move(file));
    if (is_new) Py_INCREF(code);
  }
  slot = {code, &found->second};
  return found->second;
}

// The stable ABI and Python before 3.11 lack the C functions that these two helpers wrap. Without those functions, the
// helpers read an attribute of the frame instead, which creates an object each time.
#if defined(Py_LIMITED_API) || PY_VERSION_HEX < 0x030b0000
nb::object caller_of(PyFrameObject* frame) {
  static PyObject* const f_back = PyUnicode_InternFromString("f_back");
  nb::object back = nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(frame), f_back));
  return back.is_none() ? nb::object() : back;
}
long instruction_of(PyFrameObject* frame) {
  static PyObject* const f_lasti = PyUnicode_InternFromString("f_lasti");
  return PyLong_AsLong(nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(frame), f_lasti)).ptr());
}
#else
nb::object caller_of(PyFrameObject* frame) { return nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame))); }
long instruction_of(PyFrameObject* frame) { return PyFrame_GetLasti(frame); }
#endif

/// Returns the line that a frame of the user's code executes, as the number of a text. To find it, Python decodes the
/// line table of the function, so the results for recent instructions are kept.
std::uint32_t line_of(Recorder& writer, PyFrameObject* frame, PyObject* code, const std::string& file) {
  const long instruction = instruction_of(frame);
  const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(code) / 64 + static_cast<std::uintptr_t>(instruction);
  RecentLine& slot = g_recent_lines[place % std::size(g_recent_lines)];
  if (slot.writer != &writer || slot.code != code || slot.instruction != instruction) {
    const int line = PyFrame_GetLineNumber(frame);
    slot = {&writer, code, instruction, writer.text(file + ":" + std::to_string(line))};
  }
  return slot.number;
}

Recorder* recorder() { return g_recorder.load(std::memory_order_acquire); }

}  // namespace

std::uint32_t recorded_site() {
  Recorder* const writer = recorder();
  if (writer == nullptr) return 0;
  nb::object frame = nb::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame.is_valid()) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const std::string& file = file_of(code.ptr());
    if (!file.empty()) return line_of(*writer, raw, code.ptr(), file);
    frame = caller_of(raw);
  }
  PyErr_Clear();  // set if memory was too short to walk up; the event has no line
  return 0;
}

void bind_recorder(nb::module_& m) {
  m.attr("BOX_BYTES") = kBoxBytes;
  m.def("record_to", [](int fd, std::uint64_t offset, int rank, int world_size) {
    try {
      // RELEASE pairs with every ACQUIRE load. A former recorder is leaked, because another thread may be using it.
      g_recorder.store(new Recorder(fd, offset, rank, world_size), std::memory_order_release);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
  }, nb::arg("fd"), nb::arg("offset"), nb::arg("rank"), nb::arg("world_size"),
     "Record events into BOX_BYTES of a file, at a page-aligned offset. OSError: it can't be mapped.");
  static Recorder* stopped = nullptr;
  m.def("stop_recording", [] {
    if (Recorder* const one = g_recorder.exchange(nullptr, std::memory_order_acq_rel)) stopped = one;
  }, "Stop recording.");
  m.def("resume_recording", [] {
    if (recorder() == nullptr && stopped != nullptr) g_recorder.store(stopped, std::memory_order_release);
  }, "Resume after stop_recording().");
  m.def("is_recording", [] { return recorder() != nullptr; });
  m.def("begin_event", [](int kind, int code, const std::string& text, std::uint64_t seq, std::uint64_t value,
                          const std::string& site) {
    Recorder* const writer = recorder();
    if (writer == nullptr) return std::uint64_t{0};
    return writer->begin(static_cast<EventKind>(kind), static_cast<std::uint16_t>(code), writer->text(text),
                         site.empty() ? recorded_site() : writer->text(site), seq, value);
  }, nb::arg("kind"), nb::arg("code"), nb::arg("text"), nb::arg("seq"), nb::arg("value"), nb::arg("site") = "",
     "Begin an event at `site`, or else at the caller's line; return its number.");
  m.def("end_event", [](std::uint64_t number) {
    if (Recorder* const writer = recorder(); writer != nullptr && number != 0) writer->end(number);
  }, nb::arg("number"));
  m.def("seconds_of_events", [](std::uint64_t count) {
    const auto began = std::chrono::steady_clock::now();
    for (std::uint64_t i = 0; i < count; ++i) Recorded(EventKind::kNote, 0, 0, i, 0);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }, nb::arg("count"), "Begin and end that many events; for benchmarks.");
}

}  // namespace phalanx
