/* philox.h: counter-based random words: Philox4x32-10. Salmon, Moraes, Dror and Shaw, "Parallel
 * random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
 *
 * Invariant: a word is a function of the key, the plane and the element's index alone. Words 4k
 * to 4k + 3 of a plane are the block of counter k. Planes give an element more than one word.
 * To add a source of numbers: take words here; never keep a state.
 */
#ifndef ORR_PHILOX_H
#define ORR_PHILOX_H

#include "vector.h"

#include <stdint.h>

typedef struct orr_philox {
  uint32_t key[2];
  uint32_t upper[2]; /* of the counter */
} orr_philox;

/* The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA'14, figure 16). */
ORR_SCALAR uint64_t orr_mix64(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* The high half of a 64 by 64 bit product. */
ORR_SCALAR uint64_t orr_mul_high64(uint64_t a, uint64_t b) {
  uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
  uint64_t low = a0 * b0, mid = a1 * b0 + (low >> 32), cross = a0 * b1 + (uint32_t)mid;
  return a1 * b1 + (mid >> 32) + (cross >> 32);
}

/* One block, as the paper's table gives it; what the CUDA side calls. */
ORR_SCALAR void orr_philox_block(const uint32_t key[2], const uint32_t counter[4],
                                 uint32_t out[4]) {
  uint32_t k0 = key[0], k1 = key[1];
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xd2511f53u * c0, p1 = (uint64_t)0xcd9e8d57u * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* 16 blocks side by side, from counter `first`: lanes are what the compiler makes vectors of.
 */
#define ORR_PHILOX_LANES 16

static inline void orr_philox_blocks(const orr_philox *p, uint32_t plane, uint64_t first,
                                     uint32_t out[4 * ORR_PHILOX_LANES]) {
  uint32_t c0[ORR_PHILOX_LANES], c1[ORR_PHILOX_LANES], c2[ORR_PHILOX_LANES],
      c3[ORR_PHILOX_LANES];
  uint32_t k0 = p->key[0], k1 = p->key[1];
  ORR_SIMD
  for (int i = 0; i < ORR_PHILOX_LANES; i++) {
    c0[i] = (uint32_t)(first + (uint64_t)i);
    c1[i] = (uint32_t)((first + (uint64_t)i) >> 32);
    c2[i] = p->upper[0];
    c3[i] = p->upper[1] ^ plane;
  }
  for (int round = 0; round < 10; round++) {
    ORR_SIMD
    for (int i = 0; i < ORR_PHILOX_LANES; i++) {
      uint64_t p0 = (uint64_t)0xd2511f53u * c0[i], p1 = (uint64_t)0xcd9e8d57u * c2[i];
      c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = (uint32_t)p1;
      c3[i] = (uint32_t)p0;
    }
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  ORR_SIMD
  for (int i = 0; i < ORR_PHILOX_LANES; i++) {
    out[4 * i] = c0[i], out[4 * i + 1] = c1[i], out[4 * i + 2] = c2[i], out[4 * i + 3] = c3[i];
  }
}

#endif
