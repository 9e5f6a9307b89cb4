/* layout.c: meshes and layouts: which part of a tensor each device of a mesh holds.
 *
 * Invariant: meshes are interned and never freed, so that they compare by pointer. A layout is
 * one block, bounds included, and never changes once made; a layout that replicates on every
 * axis is always the one its mesh owns. Bounds are positions in the global dim, whole and
 * ascending, so that the shards of one axis tile the dim (or, nested, tile the outer shard).
 * To add a kind of placement: a row in orr_place_kind, its word in orr_layout_text and
 * orr_place_parse, its case in orr_place_equal.
 */
#include <ctype.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "orrery_int.h"

const char *(*orr_device_label_hook)(int device, bool in_plan) = NULL;

/* Stands before each interned mesh in memory. */
typedef struct mesh_head {
  struct mesh_head *next;
  orr_layout *whole; /* replicate, or the single device; made at first use */
} mesh_head;

static mesh_head *meshes;
static const orr_mesh *single[ORR_MAX_DEVICES];
static const char *const reduce_names[] = {"sum", "max", "min"};

static orr_mesh *mesh_of(mesh_head *head) { return (orr_mesh *)(head + 1); }
static mesh_head *head_of(const orr_mesh *mesh) { return (mesh_head *)(uintptr_t)mesh - 1; }

static const char *label(int device, bool in_plan, char *buf, size_t size) {
  const char *name = orr_device_label_hook ? orr_device_label_hook(device, in_plan) : NULL;
  if (name) return name;
  snprintf(buf, size, "#%d", device);
  return buf;
}

static bool mesh_is(const orr_mesh *m, int n_axes, const int *size, const char *const *name,
                    unsigned sequence, int n, const int *device) {
  if (m->n_axes != n_axes || m->n != n || m->sequence != sequence) return false;
  for (int a = 0; a < n_axes; a++) {
    if (m->size[a] != size[a] || strcmp(m->name[a], name[a]) != 0) return false;
  }
  return memcmp(m->device, device, (size_t)n * sizeof *device) == 0;
}

static orr_status mesh_check(int n_axes, const int *size, const int *device, int *n) {
  bool seen[ORR_MAX_DEVICES] = {false};
  *n = 1;
  if (n_axes < 0 || n_axes > ORR_MAX_AXES) {
    return orr_fail(ORR_EARG, "a mesh has at most %d axes, not %d", ORR_MAX_AXES, n_axes);
  }
  for (int a = 0; a < n_axes; a++) {
    if (size[a] < 1 || size[a] > ORR_MAX_DEVICES / *n) {
      return orr_fail(ORR_EARG, "a mesh holds 1 to %d devices", ORR_MAX_DEVICES);
    }
    *n *= size[a];
  }
  for (int k = 0; k < *n; k++) {
    char buf[16];
    if (device[k] < 0 || device[k] >= ORR_MAX_DEVICES) {
      return orr_fail(ORR_EARG, "device number %d is not in the device table", device[k]);
    }
    if (seen[device[k]]) {
      return orr_fail(ORR_EARG, "device %s stands twice in one mesh",
                      label(device[k], false, buf, sizeof buf));
    }
    seen[device[k]] = true;
  }
  return ORR_OK;
}

orr_status orr_mesh_get(int n_axes, const int *size, const char *const *name, unsigned sequence,
                        const int *device, const orr_mesh **out) {
  int n;
  size_t text = 0;
  ORR_TRY(mesh_check(n_axes, size, device, &n));
  for (mesh_head *h = meshes; h; h = h->next) {
    if (mesh_is(mesh_of(h), n_axes, size, name, sequence, n, device)) {
      *out = mesh_of(h);
      return ORR_OK;
    }
  }
  for (int a = 0; a < n_axes; a++) text += strlen(name[a]) + 1;
  mesh_head *head =
      calloc(1, sizeof *head + sizeof(orr_mesh) + (size_t)n * sizeof *device + text);
  if (!head) return orr_fail(ORR_EMEM, "out of host memory for a mesh");
  orr_mesh *m = mesh_of(head);
  m->n_axes = n_axes;
  m->sequence = sequence;
  m->n = n;
  memcpy(m->device, device, (size_t)n * sizeof *device);
  char *at = (char *)&m->device[n];
  for (int a = 0; a < n_axes; a++) {
    m->size[a] = size[a];
    m->name[a] = at;
    memcpy(at, name[a], strlen(name[a]) + 1);
    at += strlen(name[a]) + 1;
  }
  head->next = meshes;
  meshes = head;
  *out = m;
  return ORR_OK;
}

const orr_mesh *orr_mesh_single(int device) {
  if (!single[device] && orr_mesh_get(0, NULL, NULL, 0, &device, &single[device])) return NULL;
  return single[device];
}

int orr_mesh_coordinate(const orr_mesh *mesh, int rank, int axis) {
  for (int a = mesh->n_axes - 1; a > axis; a--) rank /= mesh->size[a];
  return mesh->n_axes ? rank % mesh->size[axis] : 0;
}

void orr_mesh_group(const orr_mesh *mesh, int rank, int axis, int *first, int *step) {
  int stride = 1;
  for (int a = mesh->n_axes - 1; a > axis; a--) stride *= mesh->size[a];
  *step = stride;
  *first = rank - orr_mesh_coordinate(mesh, rank, axis) * stride;
}

void orr_balanced_bounds(int64_t size, int parts, int64_t *bounds) {
  int64_t each = size / parts, more = size % parts;
  for (int k = 0; k <= parts; k++) bounds[k] = k * each + (k < more ? k : more);
}

/* Whether axis 1 cuts what axis 0 has cut already. */
static bool is_nested(const orr_place *place, int axis) {
  return axis == 1 && place[0].kind == ORR_SHARD && place[1].kind == ORR_SHARD &&
         place[0].dim == place[1].dim;
}

static int bounds_rows(const orr_mesh *m, const orr_place *place, int axis) {
  if (place[axis].kind != ORR_SHARD) return 0;
  return is_nested(place, axis) ? m->size[0] : 1;
}

/* Fills one row, [lo, hi) cut in `parts`, from `given` (or balanced where NULL). */
static orr_status fill_row(int64_t lo, int64_t hi, int parts, const int64_t *given,
                           const orr_place *p, int64_t *row) {
  int dim = p->dim;
  if (!given) {
    int64_t unit = p->unit > 1 ? p->unit : 1;
    if ((hi - lo) % unit)
      return orr_fail(ORR_EARG,
                      "shard(%d/%" PRId64 "): a size of %" PRId64 " is no multiple of %" PRId64,
                      dim + 1, unit, hi - lo, unit);
    orr_balanced_bounds((hi - lo) / unit, parts, row);
    for (int k = 0; k <= parts; k++) row[k] = lo + row[k] * unit;
    return ORR_OK;
  }
  bool good = given[0] == lo && given[parts] == hi;
  for (int k = 0; k < parts; k++) good = good && given[k] <= given[k + 1];
  if (!good) {
    return orr_fail(ORR_EARG,
                    "the bounds of shard(%d) must ascend from %" PRId64 " to %" PRId64, dim + 1,
                    lo, hi);
  }
  memcpy(row, given, (size_t)(parts + 1) * sizeof *row);
  return ORR_OK;
}

static orr_status fill_axis(orr_layout *l, int axis, const int64_t *given,
                            const int64_t *shape) {
  const orr_mesh *m = l->mesh;
  orr_place *p = &l->axis[axis];
  int rows = bounds_rows(m, l->axis, axis), parts = m->size[axis];
  const int64_t *outer = l->axis[0].bounds;
  for (int r = 0; r < rows; r++) {
    bool nested = outer && is_nested(l->axis, axis);
    size_t at = (size_t)r * (size_t)(parts + 1);
    ORR_TRY(fill_row(nested ? outer[r] : 0, nested ? outer[r + 1] : shape[p->dim], parts,
                     given ? given + at : NULL, p, p->bounds + at));
  }
  return ORR_OK;
}

orr_status orr_layout_new(const orr_mesh *mesh, const orr_place *place, int ndim,
                          const int64_t *shape, orr_layout **out) {
  size_t n_bounds = 0;
  bool whole = true;
  for (int a = 0; a < mesh->n_axes; a++) {
    if (place[a].kind != ORR_REPLICATE) whole = false;
    if (place[a].kind != ORR_SHARD) continue;
    if (place[a].dim < 0 || place[a].dim >= ndim) {
      return orr_fail(ORR_EARG, "shard(%d): the tensor has %d dimensions", place[a].dim + 1,
                      ndim);
    }
    n_bounds += (size_t)bounds_rows(mesh, place, a) * (size_t)(mesh->size[a] + 1);
  }
  if (whole) {
    *out = orr_layout_ref(orr_layout_replicate(mesh));
    return *out ? ORR_OK : orr_fail(ORR_EMEM, "out of host memory for a layout");
  }
  orr_layout *l = calloc(1, sizeof *l + n_bounds * sizeof(int64_t));
  if (!l) return orr_fail(ORR_EMEM, "out of host memory for a layout");
  l->rc = 1;
  l->mesh = mesh;
  int64_t *bounds = (int64_t *)(l + 1);
  for (int a = 0; a < mesh->n_axes; a++) {
    l->axis[a] = place[a];
    l->axis[a].bounds = NULL;
  }
  for (int a = 0; a < mesh->n_axes; a++) {
    if (place[a].kind != ORR_SHARD) continue;
    l->axis[a].bounds = bounds;
    bounds += (size_t)bounds_rows(mesh, place, a) * (size_t)(mesh->size[a] + 1);
    orr_status status = fill_axis(l, a, place[a].bounds, shape);
    l->axis[a].unit = 0;
    if (status) {
      free(l);
      return status;
    }
  }
  *out = l;
  return ORR_OK;
}

orr_layout *orr_layout_replicate(const orr_mesh *m) {
  if (!m) return NULL;
  mesh_head *head = head_of(m);
  if (!head->whole) {
    orr_layout *l = calloc(1, sizeof *l); /* ORR_REPLICATE is 0 */
    if (!l) return NULL;
    l->rc = 1; /* the mesh's own, never given back */
    l->mesh = m;
    head->whole = l;
  }
  return head->whole;
}

orr_layout *orr_layout_single(int device) {
  return orr_layout_replicate(orr_mesh_single(device));
}

orr_layout *orr_layout_ref(orr_layout *layout) {
  if (layout) layout->rc++;
  return layout;
}

void orr_layout_free(orr_layout *layout) {
  if (layout && --layout->rc == 0) free(layout);
}

bool orr_place_equal(const orr_mesh *mesh, int axis, const orr_layout *a, const orr_layout *b) {
  const orr_place *p = &a->axis[axis], *q = &b->axis[axis];
  if (p->kind != q->kind) return false;
  if (p->kind == ORR_PARTIAL) return p->op == q->op;
  if (p->kind == ORR_REPLICATE) return true;
  int rows = bounds_rows(mesh, a->axis, axis);
  if (p->dim != q->dim || rows != bounds_rows(mesh, b->axis, axis)) return false;
  size_t n = (size_t)rows * (size_t)(mesh->size[axis] + 1);
  return memcmp(p->bounds, q->bounds, n * sizeof *p->bounds) == 0;
}

bool orr_layout_equal(const orr_layout *a, const orr_layout *b) {
  if (a == b) return true;
  if (a->mesh != b->mesh) return false;
  for (int axis = 0; axis < a->mesh->n_axes; axis++) {
    if (!orr_place_equal(a->mesh, axis, a, b)) return false;
  }
  return true;
}

bool orr_layout_is_partial(const orr_layout *layout) {
  for (int a = 0; a < layout->mesh->n_axes; a++) {
    if (layout->axis[a].kind == ORR_PARTIAL) return true;
  }
  return false;
}

bool orr_layout_is_replicate(const orr_layout *layout) {
  for (int a = 0; a < layout->mesh->n_axes; a++) {
    if (layout->axis[a].kind != ORR_REPLICATE) return false;
  }
  return true;
}

void orr_layout_range(const orr_layout *layout, int rank, int dim, int64_t size, int64_t *lo,
                      int64_t *hi) {
  const orr_mesh *m = layout->mesh;
  *lo = 0;
  *hi = size;
  for (int a = 0; a < m->n_axes; a++) {
    const orr_place *p = &layout->axis[a];
    if (p->kind != ORR_SHARD || p->dim != dim) continue;
    int row = is_nested(layout->axis, a) ? orr_mesh_coordinate(m, rank, 0) : 0;
    const int64_t *cut = p->bounds + (size_t)row * (size_t)(m->size[a] + 1);
    int c = orr_mesh_coordinate(m, rank, a);
    *lo = cut[c];
    *hi = cut[c + 1];
  }
}

void orr_layout_local(const orr_layout *layout, int rank, int ndim, const int64_t *shape,
                      int64_t *local, int64_t *origin) {
  for (int d = 0; d < ndim; d++) {
    int64_t lo, hi;
    orr_layout_range(layout, rank, d, shape[d], &lo, &hi);
    local[d] = hi - lo;
    if (origin) origin[d] = lo;
  }
}

/* A text that is cut short at the end of its buffer. */
typedef struct text {
  char *buf;
  size_t size, at;
} text;

static void ORR_PRINTF(2, 3) put(text *t, const char *format, ...) {
  va_list ap;
  if (t->at + 1 >= t->size) return;
  va_start(ap, format);
  int n = vsnprintf(t->buf + t->at, t->size - t->at, format, ap);
  va_end(ap);
  if (n > 0) t->at += (size_t)n;
}

static void put_mesh(text *t, const orr_mesh *m, int axis, int first) {
  char buf[16];
  int inner = axis + 1 < m->n_axes ? m->size[axis + 1] : 1;
  put(t, "%s<", m->name[axis]);
  for (int c = 0; c < m->size[axis]; c++) {
    if (axis + 1 < m->n_axes) {
      put(t, c ? ", " : "");
      put_mesh(t, m, axis + 1, first + c * inner);
    } else {
      put(t, c ? ",%s" : "%s", label(m->device[first + c], true, buf, sizeof buf));
    }
  }
  put(t, ">");
}

char *orr_layout_text(const orr_layout *layout, char *buf, size_t size) {
  const orr_mesh *m = layout->mesh;
  text t = {buf, size, 0};
  char name[16];
  if (size) buf[0] = '\0';
  if (m->n_axes == 0) {
    put(&t, "%s", label(m->device[0], false, name, sizeof name));
    return buf;
  }
  put_mesh(&t, m, 0, 0);
  for (int a = 0; a < m->n_axes; a++) {
    const orr_place *p = &layout->axis[a];
    put(&t, a ? ", " : ": ");
    if (p->kind == ORR_REPLICATE) put(&t, "replicate");
    if (p->kind == ORR_SHARD) put(&t, "shard(%d)", p->dim + 1);
    if (p->kind == ORR_PARTIAL) put(&t, "partial(%s)", reduce_names[p->op]);
  }
  return buf;
}

/* The word inside "head( ... )", trimmed; false where text has another form. */
static bool inside(const char *text_in, const char *head, char *word, size_t size) {
  size_t n = strlen(head);
  if (strncmp(text_in, head, n) != 0) return false;
  const char *at = text_in + n;
  while (isspace((unsigned char)*at)) at++;
  if (*at++ != '(') return false;
  while (isspace((unsigned char)*at)) at++;
  const char *end = strchr(at, ')');
  if (!end || end[1 + strspn(end + 1, " \t")] != '\0') return false;
  while (end > at && isspace((unsigned char)end[-1])) end--;
  if (end == at || (size_t)(end - at) >= size) return false;
  memcpy(word, at, (size_t)(end - at));
  word[end - at] = '\0';
  return true;
}

orr_status orr_place_parse(const char *text_in, int ndim, orr_place *out) {
  char word[24], *end;
  *out = (orr_place){.kind = ORR_REPLICATE};
  while (isspace((unsigned char)*text_in)) text_in++;
  if (strncmp(text_in, "replicate", 9) == 0 &&
      text_in[9 + strspn(text_in + 9, " \t")] == '\0') {
    return ORR_OK;
  }
  if (inside(text_in, "shard", word, sizeof word)) {
    long dim = strtol(word, &end, 10);
    int64_t unit = 0;
    if (*end == '/' && isdigit((unsigned char)end[1])) unit = strtoll(end + 1, &end, 10);
    if (*end == '\0' && (dim < -ndim || dim > ndim || dim == 0)) {
      return orr_fail(ORR_EARG, "shard(%s): the tensor has %d dimension%s, counted from 1",
                      word, ndim, ndim == 1 ? "" : "s");
    }
    if (*end == '\0') {
      *out = (orr_place){
          .kind = ORR_SHARD, .dim = (int)(dim < 0 ? ndim + dim : dim - 1), .unit = unit};
      return ORR_OK;
    }
  }
  if (inside(text_in, "partial", word, sizeof word)) {
    for (int k = 0; k < 3; k++) {
      if (strcmp(word, reduce_names[k]) != 0) continue;
      *out = (orr_place){.kind = ORR_PARTIAL, .op = (orr_partial_kind)k};
      return ORR_OK;
    }
  }
  return orr_fail(ORR_EARG,
                  "placement '%.60s' is none of replicate, shard(dimension), "
                  "partial(sum), partial(max), partial(min)",
                  text_in);
}
