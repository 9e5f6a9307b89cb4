/* op_profile.c: the per-op profile (orrery.profile) and anomaly mode (orrery.anomaly).
 *
 * Invariant: rows are found by op name; workers add under one lock, which is only taken while a
 * profile runs. Anomaly mode waits after every op, so the first op that gives a NaN is named.
 * To add a column: orr_profile_row, and fill it in orr_profile_add.
 */
#include "op_profile.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { MAX_ROWS = 256 };
static atomic_bool profiling = false;
static bool anomaly = false;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static orr_profile_row rows[MAX_ROWS];
static int n_rows = 0;

bool orr_profiling(void) { return atomic_load_explicit(&profiling, memory_order_relaxed); }

void orr_profile_start(void) {
  n_rows = 0;
  atomic_store(&profiling, true);
}

int orr_profile_stop(const orr_profile_row **out) {
  atomic_store(&profiling, false);
  *out = rows;
  return n_rows;
}

static orr_profile_row *row_of(const char *name) {
  for (int k = 0; k < n_rows; k++)
    if (strcmp(rows[k].name, name) == 0) return &rows[k];
  if (n_rows == MAX_ROWS) return &rows[MAX_ROWS - 1];
  rows[n_rows] = (orr_profile_row){.name = name};
  return &rows[n_rows++];
}

static int64_t view_bytes(const orr_view *v) {
  return orr_numel(v->ndim, v->shape) * (int64_t)orr_dtype_size(v->dtype);
}

void orr_profile_add(const orr_work *w, int shard, double seconds) {
  int n = w->n_in + w->n_out;
  int64_t bytes = 0;
  for (int k = shard * n; k < (shard + 1) * n; k++)
    if (w->buffer[k]) bytes += view_bytes(&w->view[k]);
  pthread_mutex_lock(&lock);
  orr_profile_row *row = row_of(w->op->name);
  row->calls += shard == 0;
  row->bytes += bytes;
  row->seconds += seconds;
  pthread_mutex_unlock(&lock);
}

static int64_t tensor_bytes(const orr_tensor *t) {
  return t ? orr_tensor_numel(t) * (int64_t)orr_dtype_size(t->meta.dtype) : 0;
}

void orr_profile_count(const orr_call *c) {
  if (!orr_profiling()) return;
  orr_profile_row *row = row_of(c->op->name);
  row->calls++;
  for (int k = 0; k < c->n_in; k++) row->bytes += tensor_bytes(c->in[k]);
  for (int k = 0; k < c->n_out; k++) row->bytes += tensor_bytes(c->out[k]);
}

void orr_anomaly(bool on) { anomaly = on; }

bool orr_anomaly_watching(void) { return anomaly; }

/* The position of the first NaN of t, or -1; t is gathered and cast to f64. */
static orr_status first_nan(orr_tensor *t, int64_t *at) {
  orr_tensor *full, *wide;
  orr_view v;
  ORR_TRY(orr_tensor_full(t, &full));
  orr_status status = orr_cast(full, ORR_F64, &wide);
  orr_tensor_free(full);
  if (status) return status;
  orr_tensor_view(wide, 0, &v);
  const double *x = v.data;
  int64_t n = orr_tensor_numel(wide);
  *at = 0;
  while (*at < n && !isnan(x[*at])) ++*at;
  if (*at == n) *at = -1;
  orr_tensor_free(wide);
  return ORR_OK;
}

orr_status orr_anomaly_check(const orr_call *c) {
  for (int k = 0; k < c->n_out; k++) {
    int64_t at = 0;
    if (!orr_dtype_is_float(c->out[k]->meta.dtype)) continue;
    if (orr_tensor_device(c->out[k], 0)->kind == ORR_DEVICE_META) continue;
    anomaly = false; /* the gather must not check itself */
    bool was = orr_set_grad_mode(false);
    orr_status status = first_nan(c->out[k], &at);
    orr_set_grad_mode(was);
    anomaly = true;
    if (status) return status;
    if (at < 0) continue;
    const char *scope = orr_scope_hook ? orr_scope_hook() : "";
    return orr_fail(ORR_EARG, "anomaly: element %lld of its result is NaN%s%s",
                    (long long)at + 1, *scope ? " in layer " : "", scope);
  }
  return ORR_OK;
}
