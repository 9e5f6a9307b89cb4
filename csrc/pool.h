/* pool.h: recycled blocks of one size, for the small structs that every op makes and drops.
 *
 * Invariant: the controller's alone. A block's first word links it while it lies in the pool;
 * the test build recycles nothing, so that sanitizers see every use after the end.
 * To use: one static orr_pool a size.
 */
#ifndef ORR_POOL_H
#define ORR_POOL_H

#include <stddef.h>
#include <stdlib.h>

#ifdef ORR_TEST
enum { ORR_POOL_KEEP = 0 };
#else
enum { ORR_POOL_KEEP = 8192 };
#endif

typedef struct orr_pool {
  void *head;
  int n;
} orr_pool;

/* Not initialised; NULL where memory is out. */
static inline void *orr_pool_get(orr_pool *p, size_t size) {
  void *block = p->head;
  if (!block) return malloc(size);
  p->head = *(void **)block;
  p->n--;
  return block;
}

static inline void orr_pool_put(orr_pool *p, void *take_block) {
  if (p->n >= ORR_POOL_KEEP) {
    free(take_block);
    return;
  }
  *(void **)take_block = p->head;
  p->head = take_block;
  p->n++;
}

#endif
