/* random_state.c: the one state of all random numbers (random_state.h).
 * Invariant: the state moves by draws and by being set, by nothing else.
 * To add to it: a field of orr_random_state; the binding saves and restores all of them.
 */
#include "random_state.h"

#include <string.h>

const char *const orr_random_stream_names[ORR_N_STREAMS] = {"user", "init", "dropout",
                                                            "loader"};

static orr_random_state state;
static orr_random_stream used = ORR_STREAM_USER;

static orr_random_micro micro;

void orr_random_set_micro(const orr_random_micro *m) { micro = *m; }

orr_random_micro orr_random_get_micro(void) { return micro; }

void orr_random_seed(uint64_t seed) {
  if (orr_host_hook) orr_host_hook("sets the seed");
  memset(&state, 0, sizeof state);
  state.seed = seed;
}

orr_random_state orr_random_get(void) { return state; }

void orr_random_set(const orr_random_state *s) { state = *s; }

void orr_random_next(orr_random_stream stream, orr_args *args) {
  args->i[0] = (int64_t)state.seed;
  args->i[1] = stream;
  args->i[2] = (int64_t)state.stream[stream].step;
  args->i[3] = (int64_t)state.stream[stream].call++;
}

orr_random_stream orr_random_use(orr_random_stream stream) {
  orr_random_stream was = used;
  used = stream;
  return was;
}

orr_random_stream orr_random_used(void) { return used; }
