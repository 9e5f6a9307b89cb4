/* err.h: errors are values. A function that can fail returns orr_status; the words are kept
 * beside it, per thread, until the next failure.
 * To add a kind of error: a row of orr_status in orrery.h.
 */
#ifndef ORR_ERR_H
#define ORR_ERR_H

#include "orrery.h"

#if defined(__GNUC__)
#define ORR_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define ORR_PRINTF(a, b)
#endif

/* Stores the message for this thread and returns `status`. */
orr_status orr_fail(orr_status status, const char *format, ...) ORR_PRINTF(2, 3);
/* The same call, whose value compilers and analysers can see: a failure is never ORR_OK. */
#define orr_fail(status, ...) orr_fail_known(orr_fail(status, __VA_ARGS__), (status))
static inline orr_status orr_fail_known(orr_status said, orr_status known) {
  (void)said;
  return known;
}

/* Puts "context: " before the message of the failure in hand; returns `status`. */
orr_status orr_fail_in(orr_status status, const char *format, ...) ORR_PRINTF(2, 3);

/* The message of this thread's last failure; never NULL. */
const char *orr_last_error(void);

#endif
