// Ownership of an object of Python by code that speaks to its C interface, where nanobind would cost too much.
#pragma once

#include <Python.h>

namespace phalanx {

/// Owns a new reference. If the reference is null, clears the exception that was set with it: whoever asks then takes
/// another way, on which the exception is raised again.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (object == nullptr) PyErr_Clear();
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

}  // namespace phalanx
