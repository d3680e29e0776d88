// 128-bit digests, computed at memory speed. Ranks compare digests to check that they hold the same bytes.
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

/// Size of the shortest piece that digests() accepts. XXH3 hashes shorter messages with other algorithms, which this
/// code lacks.
constexpr std::size_t kLeastDigestBytes = 241;

/// Return the digest of each piece. Each piece must have at least `kLeastDigestBytes`. Uses at most `num_threads`
/// threads, the calling thread included.
std::vector<Digest> digests(std::span<const Bytes> pieces, int num_threads);

}  // namespace phalanx
