// Where the elements of a tensor lie, asked of torch through the C functions that it offers to DLPack's consumers: no
// library of torch's is linked. Needs the GIL.
#pragma once

#include <Python.h>

#include <cstddef>
#include <memory_resource>
#include <vector>

#include "collectives/collectives.h"

namespace phalanx {

/// The memory of a plain tensor, which the core may read and write as it is.
struct Memory {
  std::byte* data;
  Items items;
  std::size_t rows;  // its first dimension, 1 without one

  std::byte* end() const { return data + items.bytes(); }
};
using Memories = std::pmr::vector<Memory>;

/// Look for torch's functions: `types` are the classes of which a tensor may be, others answer for themselves; `strided` is
/// the layout that it must have. Until then, and if torch offers no such functions, no tensor is plain.
void set_tensor_types(PyObject* const* types, std::size_t num_types, PyObject* strided);

/// Append the memory of a tensor, or of each in a list or tuple; false if any of them needs a closer look than this: it is
/// no CPU tensor in one piece, its bits are not its values (a conjugate, a negative), its storage is too small for it, or its
/// dtype has no arithmetic.
bool read_plain(PyObject* tensors, Memories& memories);

/// A range of bytes in memory: [begin, end).
struct Range {
  const std::byte* begin;
  const std::byte* end;
};

/// True if a range that is written overlaps another one, or one that is read. Sorts `writes`.
bool overlap(std::pmr::vector<Range>& writes, const std::pmr::vector<Range>& reads);

}  // namespace phalanx
