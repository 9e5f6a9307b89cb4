/* err.c: the per-thread message behind every orr_status.
 *
 * Invariant: a non-zero orr_status travels with exactly one message, set where the failure was
 * seen.
 */
#include "err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[2048] = "";

orr_status(orr_fail)(orr_status status, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  vsnprintf(message, sizeof message, format, ap);
  va_end(ap);
  return status;
}

orr_status orr_fail_in(orr_status status, const char *format, ...) {
  char context[512], old[sizeof message];
  va_list ap;
  va_start(ap, format);
  vsnprintf(context, sizeof context, format, ap);
  va_end(ap);
  memcpy(old, message, sizeof old);
  snprintf(message, sizeof message, "%s: %.1500s", context, old);
  return status;
}

const char *orr_last_error(void) { return message; }
