#include "python/tensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "python/reference.h"

namespace phalanx {
namespace {

// The parts of dlpack.h (DLPack 1) that are needed here. Their layout is stable.
struct DLDevice {
  std::int32_t type, id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  std::uint32_t major, minor;
  DLPackExchangeAPI* older;
  void* allocate;
  void* export_managed;
  void* import_managed;
  int (*describe)(void* tensor, DLTensor* out);  // takes no reference; returns -1 and sets an exception on failure
  void* current_stream;
};
constexpr std::int32_t kCpu = 1;
enum : std::uint8_t { kInt, kUint, kFloat, kOpaque, kBfloat, kComplex, kBool };

int (*describe)(void* tensor, DLTensor* out) = nullptr;
std::vector<PyTypeObject*> tensor_types;  // kept forever
PyObject* strided_layout;  // kept forever
PyObject *int8, *uint8;  // kept forever
PyObject *layout, *dtype;  // names
PyObject *is_neg, *is_conj, *storage_offset, *untyped_storage, *nbytes;  // methods, called without a look-up

std::optional<Dtype> find_dtype(DLDataType type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code << 8 | type.bits) {
    case kFloat << 8 | 32: return Dtype::kFloat32;
    case kFloat << 8 | 64: return Dtype::kFloat64;
    case kFloat << 8 | 16: return Dtype::kFloat16;
    case kBfloat << 8 | 16: return Dtype::kBfloat16;
    case kInt << 8 | 8: return Dtype::kInt8;
    case kInt << 8 | 16: return Dtype::kInt16;
    case kInt << 8 | 32: return Dtype::kInt32;
    case kInt << 8 | 64: return Dtype::kInt64;
    case kUint << 8 | 8: return Dtype::kUint8;
    case kUint << 8 | 16: return Dtype::kUint16;
    case kUint << 8 | 32: return Dtype::kUint32;
    case kUint << 8 | 64: return Dtype::kUint64;
    case kBool << 8 | 8: return Dtype::kBool;
    case kComplex << 8 | 64: return Dtype::kComplex64;
    case kComplex << 8 | 128: return Dtype::kComplex128;
    default: return std::nullopt;
  }
}

/// The number of elements if they lie one after the other; otherwise no value.
std::optional<std::size_t> count_in_one_piece(const DLTensor& tensor) {
  std::int64_t count = 1;
  bool in_order = true;
  for (std::int32_t d = tensor.ndim - 1; d >= 0; --d) {
    in_order = in_order && (tensor.shape[d] == 1 || tensor.strides[d] == count);
    count *= tensor.shape[d];
  }
  if (!in_order && count != 0) return std::nullopt;
  return static_cast<std::size_t>(count);
}

PyObject* ask(PyObject* object, PyObject* method) { return PyObject_Vectorcall(method, &object, 1, nullptr); }

bool denies(PyObject* tensor, PyObject* method) { return Reference(ask(tensor, method)).get() == Py_False; }

/// True if the elements are whole bytes. DLPack describes torch's int1 to int7 and uint1 to uint7 as bytes, too, so
/// this function asks torch.
bool are_bytes(PyObject* tensor) {
  const Reference found(PyObject_GetAttr(tensor, dtype));
  return found.get() != nullptr && (found.get() == int8 || found.get() == uint8);
}

std::size_t number(PyObject* object, PyObject* method) {
  const Reference answer(ask(object, method));
  const std::size_t value = answer.get() == nullptr ? 0 : PyLong_AsSize_t(answer.get());
  if (PyErr_Occurred()) PyErr_Clear();
  return value;
}

/// The storage that holds the elements at an address, and the offset of the address from the beginning of that storage,
/// in bytes. Locations are kept, because asking a tensor for its storage and offset costs more than all other checks
/// together. The reference to the storage is weak, so that we notice if the storage has been freed: the address may
/// then belong to another storage.
struct Location {
  const void* data;
  std::size_t offset;
  PyObject* storage;
};
std::array<Location, 256> locations;  // by a hash of the address; a new entry replaces the old one in its slot

std::array<PyObject*, 256> strided_at;  // addresses of objects that were strided tensors; only compared, never followed

/// The number of bytes from a location to the end of its storage.
std::size_t room_at(const Location& location, PyObject* storage) {
  const std::size_t size = number(storage, nbytes);
  return size - std::min(size, location.offset);
}

/// The number of bytes from the address `data` to the end of its storage, if `location` still describes that address;
/// otherwise 0.
std::size_t known_room(const Location& location, const void* data) {
  if (location.storage == nullptr || location.data != data) return 0;
  PyObject* const storage = PyWeakref_GetObject(location.storage);
  if (storage == Py_None) return 0;
  Py_INCREF(storage);
  const Reference kept(storage);
  return room_at(location, storage);
}

/// True if the storage, which may be resized under its tensors, holds all elements.
bool is_stored(PyObject* tensor, const void* data, const Items& items) {
  if (items.count == 0) return true;
  Location& location = locations[reinterpret_cast<std::uintptr_t>(data) / kCacheLine % locations.size()];
  if (known_room(location, data) >= items.bytes()) return true;
  const Reference storage(ask(tensor, untyped_storage));
  if (storage.get() == nullptr) return false;
  PyObject* const known = std::exchange(location.storage, PyWeakref_NewRef(storage.get(), nullptr));
  Py_XDECREF(known);
  if (PyErr_Occurred()) PyErr_Clear();
  location.data = data;
  location.offset = number(tensor, storage_offset) * items.item_bytes;
  return room_at(location, storage.get()) >= items.bytes();
}

bool read_one(PyObject* tensor, Memories& memories) {
  if (std::find(tensor_types.begin(), tensor_types.end(), Py_TYPE(tensor)) == tensor_types.end()) return false;
  // The layout is checked first, because torch takes milliseconds to report that a sparse tensor has no address. If the
  // last tensor object at this address was strided, this one almost certainly is, too, and is not checked. If that
  // is wrong, the only cost is those milliseconds.
  PyObject*& known = strided_at[reinterpret_cast<std::uintptr_t>(tensor) / kCacheLine % strided_at.size()];
  if (known != tensor && Reference(PyObject_GetAttr(tensor, layout)).get() != strided_layout) return false;
  known = tensor;
  DLTensor found;
  if (describe(tensor, &found) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto type = find_dtype(found.dtype);
  const auto count = count_in_one_piece(found);
  // Some tensors have no memory: wrappers of other tensors, and zeros that were never written.
  if (found.device.type != kCpu || !type || !count || (found.data == nullptr && *count != 0)) return false;
  const Items items{static_cast<std::uint8_t>(*type), found.dtype.bits / std::size_t{8}, *count};
  if ((type == Dtype::kInt8 || type == Dtype::kUint8) && !are_bytes(tensor)) return false;
  if (!denies(tensor, is_neg) || (found.dtype.code == kComplex && !denies(tensor, is_conj))) return false;
  auto* const data = static_cast<std::byte*>(found.data) + found.byte_offset;
  if (!is_stored(tensor, data, items)) return false;
  const std::size_t rows = found.ndim == 0 ? 1 : static_cast<std::size_t>(found.shape[0]);
  memories.push_back(Memory{data, items, rows});
  return true;
}

}  // namespace

void set_tensor_types(PyObject* const* types, std::size_t num_types, PyObject* strided) {
  const Reference capsule(PyObject_GetAttrString(types[0], "__dlpack_c_exchange_api__"));
  if (capsule.get() == nullptr) return;
  auto* api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (api != nullptr && api->major > 1) api = api->older;
  if (api == nullptr || api->major != 1 || api->describe == nullptr) {
    PyErr_Clear();
    return;
  }
  const Reference torch(PyImport_ImportModule("torch"));
  if (torch.get() == nullptr) return;
  int8 = PyObject_GetAttrString(torch.get(), "int8");
  uint8 = PyObject_GetAttrString(torch.get(), "uint8");
  layout = PyUnicode_InternFromString("layout");
  dtype = PyUnicode_InternFromString("dtype");
  is_neg = PyObject_GetAttrString(types[0], "is_neg");
  is_conj = PyObject_GetAttrString(types[0], "is_conj");
  storage_offset = PyObject_GetAttrString(types[0], "storage_offset");
  untyped_storage = PyObject_GetAttrString(types[0], "untyped_storage");
  const Reference storage(PyObject_GetAttrString(torch.get(), "UntypedStorage"));
  nbytes = storage.get() == nullptr ? nullptr : PyObject_GetAttrString(storage.get(), "nbytes");
  for (PyObject* method : {is_neg, is_conj, storage_offset, untyped_storage, nbytes})
    if (method == nullptr) return PyErr_Clear();
  for (std::size_t i = 0; i < num_types; ++i) {
    Py_INCREF(types[i]);
    tensor_types.push_back(reinterpret_cast<PyTypeObject*>(types[i]));
  }
  Py_INCREF(strided);
  strided_layout = strided;
  describe = api->describe;
}

bool read_plain(PyObject* tensors, Memories& memories) {
  if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) return read_one(tensors, memories);
  const Py_ssize_t num = PySequence_Size(tensors);
  memories.reserve(static_cast<std::size_t>(num));
  for (Py_ssize_t i = 0; i < num; ++i) {
    const Reference tensor(PySequence_GetItem(tensors, i));
    if (tensor.get() == nullptr || !read_one(tensor.get(), memories)) return false;
  }
  return true;
}

bool overlap(std::pmr::vector<Range>& writes, const std::pmr::vector<Range>& reads) {
  const auto is_empty = [](const Range& range) { return range.begin == range.end; };
  std::erase_if(writes, is_empty);
  std::sort(writes.begin(), writes.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < writes.size(); ++i)
    if (writes[i].begin < writes[i - 1].end) return true;
  return std::any_of(reads.begin(), reads.end(), [&](const Range& read) {
    // Find the first write that ends after the read begins. The writes are disjoint, so sorting them by their
    // beginnings also sorts their ends.
    const auto next = std::upper_bound(writes.begin(), writes.end(), read.begin,
                                       [](const std::byte* begin, const Range& range) { return begin < range.end; });
    return !is_empty(read) && next != writes.end() && next->begin < read.end;
  });
}

}  // namespace phalanx
