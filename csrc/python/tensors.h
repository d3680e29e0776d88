// Finds where the elements of a tensor lie in memory, through the C functions that torch offers to consumers of DLPack
// (torch.Tensor.__dlpack_c_exchange_api__). No torch library is linked, so one wheel serves many versions of torch. All
// functions need the GIL.
//
// The direct path into the core trusts addresses, so it first checks that a tensor is plain: its class is torch's own,
// its layout is strided, its device is the CPU, its elements lie in one piece, and the core computes with its dtype.
// The tensor is neither a negative nor a conjugate view. It has an address, which tensors wrapped by torch.func or
// functionalization lack. Its storage, which may have been resized since the tensor was made, holds all elements. These
// checks take 0.45 us per tensor. Calls that take another path check in Python that a tensor has the dispatch keys of a
// dense CPU tensor and no others. Any other tensor goes to torch's dispatcher, which unwraps it and calls us again with
// plain tensors, or refuses it. Before torch 2.14, the dispatcher would call Gloo instead, so with these versions
// Phalanx refuses such tensors.
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
  std::size_t rows;  // size of the tensor's first dimension, 1 if there is none

  std::byte* end() const { return data + items.bytes(); }
};
using Memories = std::pmr::vector<Memory>;

/// Look up torch's functions. `types` are the classes that a plain tensor may have; `strided` is the layout that it must
/// have. Before this call, and if torch offers no such functions, no tensor counts as plain.
void set_tensor_types(PyObject* const* types, std::size_t num_types, PyObject* strided);

/// Append the memory of a tensor, or of each tensor in a list or tuple. Returns false if any of them is not plain.
bool read_plain(PyObject* tensors, Memories& memories);

/// A range of bytes in memory: [begin, end).
struct Range {
  const std::byte* begin;
  const std::byte* end;
};

/// True if two of `writes` overlap, or one of `writes` overlaps one of `reads`. Sorts `writes`.
bool overlap(std::pmr::vector<Range>& writes, const std::pmr::vector<Range>& reads);

}  // namespace phalanx
