/* interrupt.c: the one flag behind Ctrl-C, a count so that a handler can tell impatience.
 *
 * Invariant: zero means nobody asked to stop.
 * To add a source of interrupts: call orr_interrupt_raise() from it.
 */
#include "interrupt.h"

#include <stdatomic.h>

static atomic_int raised;

int orr_interrupt_raise(void) { return atomic_fetch_add(&raised, 1) + 1; }

bool orr_interrupt_pending(void) {
  return atomic_load_explicit(&raised, memory_order_relaxed) != 0;
}

void orr_interrupt_clear(void) { atomic_store(&raised, 0); }
