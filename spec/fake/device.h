/* device.h: what cudart.cpp (devices, memory), streams.cpp (order) and report.cpp ask of each
 * other.
 * Invariant: all of it is called with orr_fake_lock held.
 */
#ifndef ORR_FAKE_DEVICE_H
#define ORR_FAKE_DEVICE_H

#include "fake.h"

bool orr_fake_is_lost(int ordinal);
bool orr_fake_is_arena(const void *p); /* device memory, held or not */
int orr_fake_owner(const void *p);     /* the device whose memory it is; -1: none's */
int orr_fake_current(void);
cudaError_t orr_fake_injected(cudaError_t plain); /* noted: of a call that was picked */
cudaError_t orr_fake_note(cudaError_t status); /* what cudaGetLastError gives next */
bool orr_fake_is_unsafe(const char *name);     /* graphs.cpp: not while a stream is captured */
void orr_fake_unlock_memory(void);             /* the calling thread may touch device memory */
void orr_fake_lock_memory(void);
void orr_fake_unlock_for(int ordinal); /* ... as that device's kernels may; -1: all of it */
cudaError_t orr_fake_wait_for(int ordinal); /* until nothing is queued on that device */
void orr_fake_drain_all(void);              /* runs all that can run */

#endif
