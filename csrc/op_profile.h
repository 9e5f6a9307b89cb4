/* op_profile.h: what op_run.c asks of the profile and of anomaly mode.
 * To add a column: orr_profile_row in orrery_int.h, filled in orr_profile_add.
 */
#ifndef ORR_OP_PROFILE_H
#define ORR_OP_PROFILE_H

#include "op.h"

bool orr_profiling(void);
void orr_profile_add(const orr_work *w, int shard, double seconds); /* worker */
void orr_profile_count(const orr_call *c); /* calls that only have a shape */
/* Waits for the outputs and raises where one is not finite. */
orr_status orr_anomaly_check(const orr_call *c);

#endif
