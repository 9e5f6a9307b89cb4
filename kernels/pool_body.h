/* pool_body.h: rows of lanes of pooling; pool.c includes it once for float, once for double.
 *
 * Invariant: REAL, FN(name), READ and WRITE are defined by the includer. A row starts at (n, c,
 * h, w) of the result and goes along channels or along width (pool.along_channels).
 * To add a pooling: a row function as these, and its use in pool.c.
 */

static void FN(max_row)(const pool *p, const place *at, int64_t lanes) {
  REAL buf[LANES], best[LANES];
  int64_t where[LANES], xs = step(p, p->from, p->w->stride[1]);
  for (int64_t j = 0; j < lanes; j++) best[j] = -(REAL)INFINITY, where[j] = -1;
  for (int64_t a = 0; a < p->w->kernel[0]; a++) {
    orr_lanes h = orr_window_inputs(p->w, 0, a, at->h, 1, p->from->shape[2]);
    for (int64_t b = 0; h.count > 0 && b < p->w->kernel[1]; b++) {
      orr_lanes l = inputs_of(p, b, at->w, lanes);
      int64_t pos = h.from * p->from->shape[3] + l.from;
      int64_t by = p->along_channels ? 0 : p->w->stride[1];
      const REAL *x = READ(p->from, offset(p->from, at, h.from, l.from), xs, l.count, buf);
      REAL *m = best + l.first;
      int64_t *k = where + l.first;
      for (int64_t j = 0; j < l.count; j++) {
        bool take = x[j] > m[j] || x[j] != x[j] || k[j] < 0;
        m[j] = take ? x[j] : m[j];
        k[j] = take ? pos + j * by : k[j];
      }
    }
  }
  int64_t to = offset(p->to, at, at->h, at->w);
  WRITE(p->to, to, step(p, p->to, 1), lanes, best);
  orr_k_write_i64(p->indices, offset(p->indices, at, at->h, at->w), step(p, p->indices, 1),
                  lanes, where);
}

static void FN(max_back_row)(const pool *p, const place *at, int64_t lanes) {
  REAL buf[LANES], sum[LANES];
  int64_t kbuf[LANES], pos = at->h * p->to->shape[3] + at->w;
  for (int64_t j = 0; j < lanes; j++) sum[j] = 0;
  for (int64_t a = 0; a < p->w->kernel[0]; a++) {
    orr_lanes h = orr_window_outputs(p->w, 0, a, at->h, 1, p->from->shape[2]);
    for (int64_t b = 0; h.count > 0 && b < p->w->kernel[1]; b++) {
      orr_lanes l = outputs_of(p, b, at->w, lanes);
      int64_t by = p->along_channels ? 1 : p->w->stride[1], move = p->along_channels ? 0 : 1;
      const REAL *g =
          READ(p->from, offset(p->from, at, h.from, l.from), step(p, p->from, 1), l.count, buf);
      const int64_t *k = orr_k_read_i64(p->indices, offset(p->indices, at, h.from, l.from),
                                        step(p, p->indices, 1), l.count, kbuf);
      for (int64_t j = 0; j < l.count; j++) {
        int64_t lane = l.first + j * by;
        sum[lane] += k[j] == pos + lane * move ? g[j] : 0;
      }
    }
  }
  WRITE(p->to, offset(p->to, at, at->h, at->w), step(p, p->to, 1), lanes, sum);
}

static void FN(avg_row)(const pool *p, const place *at, int64_t lanes) {
  REAL buf[LANES], sum[LANES];
  int64_t xs = step(p, p->from, p->w->stride[1]);
  for (int64_t j = 0; j < lanes; j++) sum[j] = 0;
  for (int64_t a = 0; a < p->w->kernel[0]; a++) {
    orr_lanes h = orr_window_inputs(p->w, 0, a, at->h, 1, p->from->shape[2]);
    for (int64_t b = 0; h.count > 0 && b < p->w->kernel[1]; b++) {
      orr_lanes l = inputs_of(p, b, at->w, lanes);
      const REAL *x = READ(p->from, offset(p->from, at, h.from, l.from), xs, l.count, buf);
      for (int64_t j = 0; j < l.count; j++) sum[l.first + j] += x[j];
    }
  }
  for (int64_t j = 0; j < lanes; j++)
    sum[j] /= (REAL)divisor(p, p->from, at->h, at->w + (p->along_channels ? 0 : j));
  WRITE(p->to, offset(p->to, at, at->h, at->w), step(p, p->to, 1), lanes, sum);
}

static void FN(avg_back_row)(const pool *p, const place *at, int64_t lanes) {
  REAL buf[LANES], sum[LANES];
  for (int64_t j = 0; j < lanes; j++) sum[j] = 0;
  for (int64_t a = 0; a < p->w->kernel[0]; a++) {
    orr_lanes h = orr_window_outputs(p->w, 0, a, at->h, 1, p->from->shape[2]);
    for (int64_t b = 0; h.count > 0 && b < p->w->kernel[1]; b++) {
      orr_lanes l = outputs_of(p, b, at->w, lanes);
      int64_t by = p->along_channels ? 1 : p->w->stride[1];
      const REAL *g =
          READ(p->from, offset(p->from, at, h.from, l.from), step(p, p->from, 1), l.count, buf);
      REAL scale =
          p->include_pad || p->along_channels ? 1 / (REAL)divisor(p, p->to, h.from, l.from) : 0;
      for (int64_t j = 0; scale != 0 && j < l.count; j++) sum[l.first + j * by] += g[j] * scale;
      for (int64_t j = 0; scale == 0 && j < l.count; j++)
        sum[l.first + j * by] += g[j] / (REAL)divisor(p, p->to, h.from, l.from + j);
    }
  }
  WRITE(p->to, offset(p->to, at, at->h, at->w), step(p, p->to, 1), lanes, sum);
}
