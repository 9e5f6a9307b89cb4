/* random_state.h: where the next random numbers come from: a seed, and a count of draws a
 * stream.
 *
 * Invariant: controller only. A draw's key is (seed, stream, step, call); calls are counted in
 * the order in which the script makes them, so devices and placements do not matter.
 * To add a stream: its name in orr_random_stream_names; never renumber, keys depend on it.
 */
#ifndef ORR_RANDOM_STATE_H
#define ORR_RANDOM_STATE_H

#include "orrery_int.h"

typedef enum orr_random_stream {
  ORR_STREAM_USER,
  ORR_STREAM_INIT,
  ORR_STREAM_DROPOUT,
  ORR_STREAM_LOADER,
  ORR_N_STREAMS
} orr_random_stream;

extern const char *const orr_random_stream_names[ORR_N_STREAMS];

typedef struct orr_random_state {
  uint64_t seed;
  struct {
    uint64_t step, call;
  } stream[ORR_N_STREAMS];
} orr_random_state;

/* The micro-batch being run: `n` rows from `first` on (from 0) of a batch of `rows`. rows 0:
 * none. */
typedef struct orr_random_micro {
  int64_t rows, first, n;
} orr_random_micro;
void orr_random_set_micro(const orr_random_micro *micro);
orr_random_micro orr_random_get_micro(void);

/* Starts every stream anew. */
void orr_random_seed(uint64_t seed);
orr_random_state orr_random_get(void);
void orr_random_set(const orr_random_state *state);
/* The key of the next draw, into args->i[0..3]: seed, stream, step, call. */
void orr_random_next(orr_random_stream stream, orr_args *args);
/* The stream of rand and its like; returns what it was. */
orr_random_stream orr_random_use(orr_random_stream stream);
orr_random_stream orr_random_used(void);

#endif
