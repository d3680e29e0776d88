// Where the elements of a tensor lie, asked of torch through the C functions that it offers to DLPack's consumers
// (torch.Tensor.__dlpack_c_exchange_api__): no library of torch's is linked, so a wheel outlives torch's versions.
// Needs the GIL.
//
// The direct way into the core trusts addresses, so it asks first whether a tensor is plain: its class is torch's own,
// its layout strided, its device the CPU, its elements in one piece, its dtype one that the core computes with; it is
// neither a negative nor a conjugate view; it has an address, which tensors wrapped by torch.func or functionalization
// lack; and its storage, which may have been resized under it, holds all elements. That takes 0.45 us per tensor.
// Calls that come another way look at the dispatch keys: those of a dense CPU tensor and no others. Anything else goes
// to torch's dispatcher, which unwraps it and comes back with plain tensors, or refuses. Before torch 2.14 it would
// end up in Gloo, so there such tensors are refused.
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

/// Look for torch's functions. `types` are the classes that a plain tensor may have; `strided` is the layout that it must
/// have. Until then, and if torch offers no such functions, no tensor is plain.
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
