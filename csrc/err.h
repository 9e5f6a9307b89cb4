/* err.h: errors are values. A function that can fail returns orr_status; the words are kept beside
 * it, per thread, until the next failure.
 * To add a kind of error: a row in orr_status, and its word in err.c.
 */
#ifndef ORR_ERR_H
#define ORR_ERR_H

typedef enum orr_status {
  ORR_OK = 0,
  ORR_EARG,       /* the caller's mistake: shape, dtype, device, option */
  ORR_EMEM,       /* a device's or the host's memory is used up */
  ORR_EDEVICE,    /* a device, or work queued on it, failed */
  ORR_EINTERRUPT, /* the user asked to stop */
  ORR_EIO         /* a file or stream */
} orr_status;

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
