// 128-bit digests at the speed of memory, by which ranks see whether they hold the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phalanx {

/// XXH3's 128 bits, low half first. Not cryptographic: ranks mean no harm to each other.
using Digest = std::array<std::uint64_t, 2>;

using Bytes = std::span<const std::byte>;

/// XXH3 hashes shorter messages in other ways, which are not needed here.
constexpr std::size_t kLeastDigestBytes = 241;

/// The digest of each piece, which has at least `kLeastDigestBytes`, by up to `num_threads` threads including this one.
std::vector<Digest> digests(std::span<const Bytes> pieces, int num_threads);

}  // namespace phalanx
