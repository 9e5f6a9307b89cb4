/* optim.cu: SGD, Adam, RMSprop over lists of parameters on CUDA, many tensors a launch.
 *
 * Invariant: formulas, masters and rounding are those of optim.c; f16 and bf16 parameters are
 * computed in f32. Where the step's numbers are worthless (orr_cuda_poison) parameters and state keep
 * theirs.
 * To add an optimiser: a body with `update`, and its function.
 */
#include "device_number.cuh"

extern "C" {
#include "optim.h"
}

enum { MOST_ITEMS = 48 }; /* of one launch: its parameters are 4 KiB at most */

struct items {
  int n;
  struct {
    void *param;
    const void *grad;
    void *state[3];
    float *master;
    int64_t n;
  } at[MOST_ITEMS];
};

template <typename E, typename B>
static __global__ void __launch_bounds__(ORR_BLOCK) update_kernel(items list, B body,
                                                                  const int *poison) {
  typedef orr_compute<E> C;
  if (poison && *poison) return;
  const auto &item = list.at[blockIdx.y];
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < item.n;
       i += (int64_t)gridDim.x * blockDim.x) {
    E *p = (E *)item.param + i;
    C *state[3];
    for (int s = 0; s < 3; s++) state[s] = item.state[s] ? (C *)item.state[s] + i : NULL;
    C value = orr_get(p);
    if (item.master) {
      C master = item.master[i];
      E rounded;
      orr_put(&rounded, master);
      if (orr_get(&rounded) == value) value = master;
    }
    value = body.update(value, orr_get((const E *)item.grad + i), state);
    if (item.master) item.master[i] = (float)value;
    orr_put(p, value);
  }
}

template <typename E, typename B>
static void launch(const items &list, int64_t longest, const B &body) {
  const dim3 grid(orr_grid(longest, 4 * ORR_BLOCK), (unsigned)list.n);
  ORR_LAUNCH((update_kernel<E, B>), grid, ORR_BLOCK, 0, list, body, orr_cuda_poison());
}

/* make(C{}): the body that computes in that type. */
template <typename F> static void run(const orr_optim_item *item, int n, F make) {
  for (int dtype = ORR_F64; dtype <= ORR_BF16; dtype++) {
    orr_by_float((orr_dtype)dtype, [&](auto tag) {
      typedef typename decltype(tag)::type E;
      items list = {};
      int64_t longest = 0;
      for (int k = 0; k <= n; k++) {
        if (list.n == MOST_ITEMS || (k == n && list.n > 0)) {
          launch<E>(list, longest, make(orr_compute<E>()));
          list.n = 0;
          longest = 0;
        }
        if (k == n || item[k].dtype != dtype || item[k].n == 0) continue;
        auto &to = list.at[list.n++];
        to.param = item[k].param;
        to.grad = item[k].grad;
        to.master = item[k].master;
        to.n = item[k].n;
        for (int s = 0; s < 3; s++) to.state[s] = item[k].state[s];
        if (to.n > longest) longest = to.n;
      }
    });
  }
}

template <typename C> struct sgd_body {
  C lr, decay, scale, keep, fresh, of_g, of_v;
  __device__ C update(C p, C g, C *const (&state)[3]) const {
    C d = scale * g + decay * p;
    if (!state[0]) return p - lr * d;
    C v = keep * *state[0] + fresh * d;
    *state[0] = v;
    return p - lr * (of_g * d + of_v * v);
  }
};

ORR_EXPORT void orr_cuda_sgd(const orr_sgd *o, const orr_optim_item *item, int n) {
  run(item, n, [&](auto zero) {
    typedef decltype(zero) C;
    return sgd_body<C>{(C)o->lr,
                       (C)o->weight_decay,
                       (C)o->grad_scale,
                       (C)(o->first ? 0 : o->momentum),
                       (C)(o->first ? 1 : 1 - o->dampening),
                       (C)(o->nesterov ? 1 : 0),
                       (C)(o->nesterov ? o->momentum : 1)};
  });
}

template <typename C> struct adam_body {
  C b1, c1, b2, c2, step, root, eps, decay, scale, shrink;
  __device__ C update(C p, C g, C *const (&state)[3]) const {
    C d = scale * g + decay * p;
    C m = b1 * *state[0] + c1 * d, v = b2 * *state[1] + c2 * d * d;
    *state[0] = m;
    *state[1] = v;
    return shrink * p - step * m / (orr_m_sqrt(v) * root + eps);
  }
};

ORR_EXPORT void orr_cuda_adam(const orr_adam *o, const orr_optim_item *item, int n) {
  run(item, n, [&](auto zero) {
    typedef decltype(zero) C;
    return adam_body<C>{(C)o->beta1,
                        (C)(1 - o->beta1),
                        (C)o->beta2,
                        (C)(1 - o->beta2),
                        (C)(o->lr / (1 - pow(o->beta1, o->t))),
                        (C)(1 / sqrt(1 - pow(o->beta2, o->t))),
                        (C)o->eps,
                        (C)(o->decoupled ? 0 : o->weight_decay),
                        (C)o->grad_scale,
                        (C)(o->decoupled ? 1 - o->lr * o->weight_decay : 1)};
  });
}

template <typename C> struct rmsprop_body {
  C keep, fresh, eps, lr, decay, momentum, scale;
  bool centered;
  __device__ C update(C p, C g, C *const (&state)[3]) const {
    C d = scale * g + decay * p, square = keep * *state[0] + fresh * d * d;
    *state[0] = square;
    if (centered) {
      C mean = keep * *state[2] + fresh * d;
      *state[2] = mean;
      square -= mean * mean;
    }
    C move = d / (orr_m_sqrt(square) + eps);
    if (state[1]) move = *state[1] = momentum * *state[1] + move;
    return p - lr * move;
  }
};

ORR_EXPORT void orr_cuda_rmsprop(const orr_rmsprop *o, const orr_optim_item *item, int n) {
  run(item, n, [&](auto zero) {
    typedef decltype(zero) C;
    return rmsprop_body<C>{(C)o->alpha,        (C)(1 - o->alpha), (C)o->eps,
                           (C)o->lr,           (C)o->weight_decay, (C)o->momentum,
                           (C)o->grad_scale,   o->centered};
  });
}
