// 128-bit digests at the speed of memory. Ranks compare them to see whether they hold the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phalanx {

/// XXH3's 128 bits, low half first. Not cryptographic: a digest detects mistakes, not attacks.
using Digest = std::array<std::uint64_t, 2>;

using Bytes = std::span<const std::byte>;

/// The shortest message that can be hashed here; XXH3 hashes shorter ones in other ways.
constexpr std::size_t kLeastDigestBytes = 241;

/// The digest of each piece. A piece must have at least `kLeastDigestBytes`. Up to `num_threads` threads work, this one
/// included.
std::vector<Digest> digests(std::span<const Bytes> pieces, int num_threads);

}  // namespace phalanx
