#include "process/interpose.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace phalanx {
namespace {

/// A pointer through which the library makes a call, and the function to store there.
using Slot = std::pair<void**, void*>;

/// The parts of a library's dynamic section that matter here. Source: elf(5).
struct Dynamic {
  const char* names = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const ElfW(Rela)* relocations[2] = {};
  std::size_t sizes[2] = {};

  explicit Dynamic(const dl_phdr_info& library) {
    for (int i = 0; i < library.dlpi_phnum; ++i)
      if (library.dlpi_phdr[i].p_type == PT_DYNAMIC)
        read(reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr), library.dlpi_addr);
  }

 private:
  void read(const ElfW(Dyn)* entry, ElfW(Addr) base) {
    // If the section is writable, glibc has replaced the offsets in it by addresses.
    const auto at = [base](ElfW(Addr) value) { return value < base ? base + value : value; };
    for (; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_STRTAB: names = reinterpret_cast<const char*>(at(entry->d_un.d_ptr)); break;
        case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr)); break;
        case DT_RELA: relocations[0] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
        case DT_RELASZ: sizes[0] = entry->d_un.d_val; break;
        case DT_JMPREL: relocations[1] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
        case DT_PLTRELSZ: sizes[1] = entry->d_un.d_val; break;
        default: break;
      }
    }
  }
};

bool has_name(const dl_phdr_info& library, std::string_view name) {
  const std::string_view path = library.dlpi_name;
  return path.substr(path.rfind('/') + 1) == name;
}

bool holds(const dl_phdr_info& library, const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  return std::any_of(library.dlpi_phdr, library.dlpi_phdr + library.dlpi_phnum, [&](const ElfW(Phdr)& segment) {
    return segment.p_type == PT_LOAD && wanted - library.dlpi_addr - segment.p_vaddr < segment.p_memsz;
  });
}

struct Search {
  std::function<bool(const dl_phdr_info&)> is_wanted;
  std::span<const Replacement> replacements;
  std::vector<Slot> slots;
  std::size_t num_found = 0;  // number of replacements for which a slot was found
};

int search(dl_phdr_info* library, std::size_t, void* data) {
  auto& wanted = *static_cast<Search*>(data);
  if (!wanted.is_wanted(*library)) return 0;
  const Dynamic dynamic(*library);
  if (!dynamic.names || !dynamic.symbols) return 1;
  for (const Replacement& replacement : wanted.replacements) {
    const std::size_t before = wanted.slots.size();
    for (int table = 0; table < 2; ++table) {
      const std::size_t num = dynamic.relocations[table] ? dynamic.sizes[table] / sizeof(ElfW(Rela)) : 0;
      for (std::size_t i = 0; i < num; ++i) {
        const ElfW(Rela)& relocation = dynamic.relocations[table][i];
        const std::size_t symbol = ELF64_R_SYM(relocation.r_info);
        if (symbol && !std::strcmp(dynamic.names + dynamic.symbols[symbol].st_name, replacement.symbol))
          wanted.slots.emplace_back(reinterpret_cast<void**>(library->dlpi_addr + relocation.r_offset),
                                    replacement.function);
      }
    }
    wanted.num_found += wanted.slots.size() > before;
  }
  return 1;
}

/// Makes the pages of these slots writable, because the dynamic loader may have protected them; false if the system
/// refuses.
bool make_writable(std::span<const Slot> slots) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [slot, function] : slots) {
    const auto address = reinterpret_cast<std::uintptr_t>(slot) / page * page;
    if (mprotect(reinterpret_cast<void*>(address), page, PROT_READ | PROT_WRITE) != 0) return false;
  }
  return true;
}

bool replace(std::function<bool(const dl_phdr_info&)> is_wanted, std::span<const Replacement> replacements) {
  Search found{std::move(is_wanted), replacements, {}, 0};
  dl_iterate_phdr(search, &found);
  if (found.num_found != replacements.size() || !make_writable(found.slots)) return false;
  for (const auto& [slot, function] : found.slots)
    std::atomic_ref(*slot).store(function, std::memory_order_release);
  return true;
}

}  // namespace

bool interpose(const char* library, std::span<const Replacement> replacements) {
  return replace([=](const dl_phdr_info& loaded) { return has_name(loaded, library); }, replacements);
}

bool interpose_at(const void* address, std::span<const Replacement> replacements) {
  return replace([=](const dl_phdr_info& loaded) { return holds(loaded, address); }, replacements);
}

}  // namespace phalanx
