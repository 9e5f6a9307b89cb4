/* cuda_table.c: plans of a library, found again by what they depend on.
 *
 * Invariant: an entry begins with its key, key_bytes of it without padding, and belongs to the
 * table. One thread uses a table. A table that has seen too many shapes begins again.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { FIRST_SLOTS = 64, MOST_ENTRIES = 4096 };

static uint64_t hash(const void *key, size_t bytes) {
  const unsigned char *byte = key;
  uint64_t h = 14695981039346656037ull;
  for (size_t k = 0; k < bytes; k++) h = (h ^ byte[k]) * 1099511628211ull;
  return h ^ h >> 29;
}

/* Where the key is, or would be. */
static void **place(void **slot, int cap, const void *key, size_t bytes) {
  unsigned mask = (unsigned)cap - 1, at = (unsigned)hash(key, bytes) & mask;
  while (slot[at] && memcmp(slot[at], key, bytes) != 0) at = (at + 1) & mask;
  return &slot[at];
}

void orr_cuda_table_clear(orr_cuda_table *t) {
  for (int k = 0; k < t->cap; k++)
    if (t->slot[k]) t->entry_free(t->slot[k]);
  free(t->slot);
  t->slot = NULL;
  t->n = t->cap = 0;
}

void *orr_cuda_table_find(const orr_cuda_table *t, const void *key) {
  return t->cap ? *place(t->slot, t->cap, key, t->key_bytes) : NULL;
}

static bool grow(orr_cuda_table *t) {
  if (t->n >= MOST_ENTRIES) orr_cuda_table_clear(t);
  if (2 * t->n < t->cap) return true;
  int cap = t->cap ? 2 * t->cap : FIRST_SLOTS;
  void **wider = calloc((size_t)cap, sizeof *wider);
  if (!wider) return false;
  for (int k = 0; k < t->cap; k++)
    if (t->slot[k]) *place(wider, cap, t->slot[k], t->key_bytes) = t->slot[k];
  free(t->slot);
  t->slot = wider;
  t->cap = cap;
  return true;
}

orr_status orr_cuda_table_add(orr_cuda_table *t, void *take_entry) {
  if (!grow(t)) {
    t->entry_free(take_entry);
    return orr_fail(ORR_EMEM, "out of host memory for the plans of a GPU's library");
  }
  *place(t->slot, t->cap, take_entry, t->key_bytes) = take_entry;
  t->n++;
  return ORR_OK;
}
