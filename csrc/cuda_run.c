/* cuda_run.c: one shard of one call: its op issues its kernels to the stream that is entered.
 *
 * Invariant: nothing is issued on a GPU that is lost, or that could not be made current. What
 * failed while the op issued is returned: kernels cannot tell themselves.
 */
#include "cuda.h"

orr_status orr_cuda_run(const orr_work *work, int shard) {
  orr_cuda_queue *s = orr_cuda_current();
  if (!s) return orr_fail(ORR_EDEVICE, "no queue is entered");
  ORR_TRY(orr_cuda_ready(s));
  s->work = work;
  s->shard = shard;
  orr_status status = work->op->run(work, shard);
  s->work = NULL;
  if (!status) return orr_cuda_recorded(s);
  s->failure.status = ORR_OK;
  return status;
}
