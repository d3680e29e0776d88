// Compiled once per instruction set, under the rules of reduce_kernels.cpp: only builtin types, and no inline functions
// from other headers.
//
// Source: XXH3_128bits() of https://github.com/Cyan4973/xxHash, in its variant for messages of more than 240 bytes,
// with the default secret. stripe: 64 bytes, eight for each of the eight accumulators ("lanes"); block: 16 stripes,
// after which the lanes are scrambled.
#include <cstddef>
#include <cstdint>

namespace phalanx::PHALANX_SIMD {
namespace {

using u8 = unsigned char;
using u64 = std::uint64_t;
__extension__ typedef unsigned __int128 u128;
typedef u64 Lanes __attribute__((vector_size(64)));

constexpr std::size_t kStripe = 64, kStripesPerBlock = 16, kBlock = kStripe * kStripesPerBlock;
constexpr u64 kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr u64 kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                            0x27D4EB2F165667C5};
constexpr u8 kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline Lanes load(const u8* from) {
  Lanes lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes swap_neighbours(Lanes lanes) {
#if defined(__clang__)
  return __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shuffle(lanes, Lanes{1, 0, 3, 2, 5, 4, 7, 6});
#endif
}

inline void accumulate(Lanes& lanes, const u8* stripe, const u8* secret) {
  const Lanes data = load(stripe), key = data ^ load(secret);
  lanes += swap_neighbours(data) + (key & 0xffffffff) * (key >> 32);
}

inline u64 merge(const Lanes& lanes, const u8* secret, u64 start) {
  const Lanes keyed = lanes ^ load(secret);
  u64 sum = start;
  for (int i = 0; i < 8; i += 2) {
    const u128 product = static_cast<u128>(keyed[i]) * keyed[i + 1];
    sum += static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
  }
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
  return sum ^ sum >> 32;
}

}  // namespace

void digest(const void* bytes, std::size_t size, std::uint64_t out[2]) {
  const u8* data = static_cast<const u8*>(bytes);
  const u8* last_secret = kSecret + sizeof kSecret - kStripe;
  Lanes lanes = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  const u8* const last_block = data + (size - 1) / kBlock * kBlock;
  const u8* const end = data + size;
  for (; data != last_block; data += kBlock) {
    for (std::size_t i = 0; i < kStripesPerBlock; ++i) accumulate(lanes, data + kStripe * i, kSecret + 8 * i);
    lanes = (lanes ^ lanes >> 47 ^ load(last_secret)) * kPrime32[0];
  }
  for (const u8* secret = kSecret; end - data > static_cast<std::ptrdiff_t>(kStripe); data += kStripe, secret += 8)
    accumulate(lanes, data, secret);
  accumulate(lanes, end - kStripe, last_secret - 7);
  out[0] = merge(lanes, kSecret + 11, size * kPrime64[0]);
  out[1] = merge(lanes, last_secret - 11, ~(size * kPrime64[1]));
}

}  // namespace phalanx::PHALANX_SIMD
