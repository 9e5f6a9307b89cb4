/* timeline.h: when each op and each part of a collective ran, on which device and queue, for
 * orrery.timeline.
 *
 * Invariant: while no timeline runs, asking costs one relaxed load and nothing is kept.
 * To add what an event says: orr_timeline_event, filled in orr_timeline_add.
 */
#ifndef ORR_TIMELINE_H
#define ORR_TIMELINE_H

#include "orrery_int.h"

typedef struct orr_timeline_event {
  const char *name; /* of an op or a collective; lives as long as the program */
  const orr_device *device;
  bool use_comm; /* of its two queues */
  orr_mark mark;
  double start, end; /* orr_seconds */
} orr_timeline_event;

double orr_seconds(void); /* of a clock that only goes forward */

bool orr_timeline_on(void);
void orr_timeline_start(void);
/* Events in the order in which they ended, borrowed until the next start; *lost: those for
 * which there was no memory. Call it when nothing is queued. */
int64_t orr_timeline_stop(const orr_timeline_event **events, int64_t *lost);
void orr_timeline_add(const orr_timeline_event *event); /* worker */

/* What is issued from now on belongs to this stage and micro-batch (controller). */
void orr_timeline_mark(const orr_mark *mark);
orr_mark orr_timeline_marked(void);

#endif
