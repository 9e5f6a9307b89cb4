/* interrupt.h: the one flag behind Ctrl-C.
 *
 * Invariant: a signal handler raises it, whoever stops the running step clears it; both are
 * lock-free and safe in a handler and on any thread.
 * To react to it in a new waiting loop: poll orr_interrupt_pending() and return ORR_EINTERRUPT;
 * the code that turns that status into a Lua error calls orr_interrupt_clear().
 */
#ifndef ORR_INTERRUPT_H
#define ORR_INTERRUPT_H

#include <stdbool.h>

/* How many times the flag was raised since it was last cleared, this time included. */
int orr_interrupt_raise(void);

bool orr_interrupt_pending(void);

void orr_interrupt_clear(void);

#endif
