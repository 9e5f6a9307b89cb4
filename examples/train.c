/* train.c: trains a small classifier from C alone, through orrery.h, on one device and on two.
 *
 *   build/luajit/examples/train [steps]      (made by `make examples`)
 *
 * Two rings of points, 2 classes; an MLP 2-32-2; plain gradient descent. Under "data<0,1>" each
 * device has half of the batch, and the losses are those of one device.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "orrery.h"

enum { N = 301, HIDDEN = 32, N_PARAMETERS = 4 };

/* Every call goes through here: the first failure ends the program, in words. */
static void must(orr_status status) {
  if (!status) return;
  fprintf(stderr, "train: %s\n", orrery_last_error());
  exit(1);
}

static uint64_t state; /* of draw() */

/* Numbers from -1 to 1. */
static double draw(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (double)(state >> 33) / (double)(1u << 30) - 1;
}

/* One op with one result. */
static orr_tensor *op(const char *name, int n_in, orr_tensor *a, orr_tensor *b, orr_tensor *c) {
  orr_tensor *in[3] = {a, b, c}, *y;
  must(orrery_call(name, in, n_in, NULL, 0, &y, 1));
  return y;
}

static orr_tensor *place(orr_tensor *take_t, const orr_mesh *mesh, const char *placement) {
  orr_tensor *placed;
  must(orrery_distribute(take_t, mesh, placement, &placed));
  orrery_free(take_t);
  return placed;
}

/* Uniform in +-1/sqrt(columns), replicated. */
static orr_tensor *parameter(const orr_mesh *mesh, int ndim, int64_t rows, int64_t columns) {
  float data[HIDDEN * HIDDEN];
  int64_t shape[2] = {rows, columns}, n = ndim == 2 ? rows * columns : rows;
  orr_tensor *t;
  for (int64_t k = 0; k < n; k++) data[k] = (float)(draw() / sqrt((double)columns));
  must(orrery_tensor("f32", ndim, shape, data, &t));
  t = place(t, mesh, "replicate");
  must(orrery_require_grad(t, true));
  return t;
}

/* (N, 2) points on two rings, and their (N) labels, which count from 1; split over the mesh. */
static void rings(const orr_mesh *mesh, orr_tensor **x, orr_tensor **y) {
  float point[N][2];
  int64_t label[N], shape[2] = {N, 2};
  for (int k = 0; k < N; k++) {
    double angle = 3.14159265358979 * draw(), radius = 0.5 + 0.5 * (k % 2) + 0.1 * draw();
    point[k][0] = (float)(radius * cos(angle));
    point[k][1] = (float)(radius * sin(angle));
    label[k] = 1 + k % 2;
  }
  must(orrery_tensor("f32", 2, shape, point, x));
  must(orrery_tensor("i64", 1, shape, label, y));
  *x = place(*x, mesh, "shard(1)");
  *y = place(*y, mesh, "shard(1)");
}

static orr_tensor *forward(orr_tensor *x, orr_tensor *const *p) {
  orr_tensor *h = op("linear", 3, x, p[0], p[1]);
  orr_tensor *t = op("tanh", 1, h, NULL, NULL), *y = op("linear", 3, t, p[2], p[3]);
  orrery_free(h);
  orrery_free(t);
  return y;
}

/* p = p - rate * gradient, and the gradient is cleared. */
static void descend(orr_tensor *p, double rate) {
  bool was = orrery_grad_mode(false);
  orr_tensor *g = orrery_grad(p), *change;
  must(orrery_call("mul", &g, 1, &rate, 1, &change, 1));
  must(orrery_call("sub_", (orr_tensor *[]){p, change}, 2, NULL, 0, NULL, 0));
  orrery_free(change);
  orrery_zero_grad(p);
  orrery_grad_mode(was);
}

/* The share of rows whose largest logit is their label's. */
static double accuracy(orr_tensor *x, orr_tensor *y, orr_tensor *const *p) {
  orr_tensor *logits = forward(x, p), *best, *right, *share, *number;
  double value, classes = 2;
  must(orrery_call("argmax", &logits, 1, &classes, 1, &best, 1));
  right = op("eq", 2, best, y, NULL);
  must(orrery_cast(right, "f32", &number));
  share = op("mean", 1, number, NULL, NULL);
  must(orrery_item(share, &value));
  orr_tensor *made[] = {logits, best, right, number, share};
  for (int k = 0; k < 5; k++) orrery_free(made[k]);
  return value;
}

static void train(const char *plan, int steps) {
  const orr_mesh *mesh;
  orr_tensor *x, *y;
  state = 1; /* the same points and parameters under every plan */
  must(orrery_mesh(plan, &mesh));
  rings(mesh, &x, &y);
  orr_tensor *p[N_PARAMETERS] = {parameter(mesh, 2, HIDDEN, 2), parameter(mesh, 1, HIDDEN, 2),
                                 parameter(mesh, 2, 2, HIDDEN), parameter(mesh, 1, 2, HIDDEN)};
  for (int step = 1; step <= steps; step++) {
    orr_tensor *logits = forward(x, p), *loss = op("cross_entropy", 2, logits, y, NULL);
    must(orrery_backward(loss, NULL));
    for (int k = 0; k < N_PARAMETERS; k++) descend(p[k], 0.5);
    double value;
    if (step == 1 || step == steps) {
      must(orrery_item(loss, &value));
      printf("%s: step %d  loss %.6f\n", plan, step, value);
    }
    orrery_free(logits);
    orrery_free(loss);
  }
  printf("%s: accuracy %.1f %%\n", plan, 100 * accuracy(x, y, p));
  for (int k = 0; k < N_PARAMETERS; k++) orrery_free(p[k]);
  orrery_free(x);
  orrery_free(y);
}

int main(int argc, char **argv) {
  int steps = argc > 1 ? atoi(argv[1]) : 400;
  must(orrery_open());
  train("cpu", steps);
  train("data<0,1>", steps);
  orrery_close();
  return 0;
}
