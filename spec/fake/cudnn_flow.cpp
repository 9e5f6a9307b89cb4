/* cudnn_flow.cpp: graphs of the fake cuDNN that are products, elementwise steps, reductions and
 * views: each operation is computed from its descriptors, in the order of the graph.
 *
 * Invariant: a virtual tensor is made before it is read, and rounded to its type; other tensors
 * are where the variant pack says, a number by value is read when the work is given. As cuDNN's
 * engines do, it refuses rows of more than 128 numbers in a product. ORRERY_FAKE_SPOIL=1 makes
 * all results of such graphs wrong.
 * To add an operation: its case in `read`, and in `Flow::run`.
 */
#include "cudnn_flow.h"

#include <cmath>

using namespace orr_fake_dnn_parts;

namespace {

enum { MOST_COLUMNS = 128 };

/* A tensor of a step; what a descriptor says. */
struct Place {
  Tensor t;
  int64_t uid;
  bool is_virtual, is_by_value, is_there;
  double value;
  int64_t numel() const { return t.dims[0] * t.dims[1] * t.dims[2] * t.dims[3]; }
  /* Of the i-th element, row-major: its coordinates. */
  void at(int64_t i, int64_t (&c)[4]) const {
    for (int d = 3; d >= 0; d--) c[d] = i % t.dims[(size_t)d], i /= t.dims[(size_t)d];
  }
  int64_t offset(const int64_t (&c)[4]) const {
    int64_t sum = 0;
    for (size_t d = 0; d < 4; d++) sum += c[d] * t.strides[d];
    return sum;
  }
};

struct Step {
  cudnnBackendDescriptorType_t type;
  int mode;
  int64_t axis;
  Place x, b, t, y;
};

typedef std::vector<double> Numbers; /* row-major */

/* As a number of that type holds it. */
double rounded(orr_fake_type type, double x) {
  double room[1];
  orr_fake_put(room, type, 0, x);
  return orr_fake_get(room, type, 0);
}

struct Flow {
  std::vector<Step> steps;
  double spoil;

  std::shared_ptr<std::map<int64_t, Numbers>> made = std::make_shared<std::map<int64_t, Numbers>>();

  Numbers load(const Place &p) const {
    if (p.is_by_value) return Numbers((size_t)p.numel(), p.value);
    if (p.is_virtual) return (*made)[p.uid];
    Numbers x((size_t)p.numel());
    for (int64_t i = 0; i < p.numel(); i++) {
      int64_t c[4];
      p.at(i, c);
      x[(size_t)i] = p.t.get(c[0], c[1], c[2], c[3]);
    }
    return x;
  }
  void store(const Place &p, Numbers x) const {
    for (double &v : x) v = rounded(p.t.type, p.is_virtual ? v : v + spoil);
    if (p.is_virtual) {
      (*made)[p.uid] = x;
      return;
    }
    for (int64_t i = 0; i < p.numel(); i++) {
      int64_t c[4];
      p.at(i, c);
      p.t.put(c[0], c[1], c[2], c[3], x[(size_t)i]);
    }
  }
  /* The number of p that meets the i-th of `shape`: p's dims of one are repeated. */
  static double meet(const Place &p, const Numbers &x, const Place &shape, int64_t i) {
    int64_t c[4], at = 0;
    shape.at(i, c);
    for (size_t d = 0; d < 4; d++) at = at * p.t.dims[d] + (p.t.dims[d] == 1 ? 0 : c[d]);
    return x[(size_t)at];
  }

  void product(const Step &s) const {
    Numbers a = load(s.x), b = load(s.b), c((size_t)s.y.numel());
    int64_t m = s.x.t.dims[2], k = s.x.t.dims[3], n = s.b.t.dims[3];
    for (int64_t h = 0; h < s.y.t.dims[0] * s.y.t.dims[1]; h++)
      for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++)
          for (int64_t j = 0; j < n; j++)
            c[(size_t)((h * m + i) * n + j)] +=
                a[(size_t)((h * m + i) * k + l)] * b[(size_t)((h * k + l) * n + j)];
    store(s.y, c);
  }
  static double pointwise(int mode, double x, double b, double t) {
    switch (mode) {
      case CUDNN_POINTWISE_ADD: return x + b;
      case CUDNN_POINTWISE_SUB: return x - b;
      case CUDNN_POINTWISE_MUL: return x * b;
      case CUDNN_POINTWISE_DIV: return x / b;
      case CUDNN_POINTWISE_EXP: return std::exp(x);
      case CUDNN_POINTWISE_LOG: return std::log(x);
      case CUDNN_POINTWISE_CMP_GE: return x >= b;
      case CUDNN_POINTWISE_BINARY_SELECT: return t != 0 ? x : b;
      default: return x;
    }
  }
  void pointwise(const Step &s) const {
    Numbers x = load(s.x), b, t, y((size_t)s.y.numel());
    if (s.b.is_there) b = load(s.b);
    if (s.t.is_there) t = load(s.t);
    for (int64_t i = 0; i < s.y.numel(); i++) {
      int64_t c[4];
      s.y.at(i, c);
      y[(size_t)i] = s.mode == CUDNN_POINTWISE_GEN_INDEX
                         ? (double)c[s.axis]
                         : pointwise(s.mode, meet(s.x, x, s.y, i),
                                     s.b.is_there ? meet(s.b, b, s.y, i) : 0,
                                     s.t.is_there ? meet(s.t, t, s.y, i) : 0);
    }
    store(s.y, y);
  }
  void reduce(const Step &s) const {
    bool is_max = s.mode == CUDNN_REDUCE_TENSOR_MAX;
    Numbers x = load(s.x), y((size_t)s.y.numel(), is_max ? -INFINITY : 0);
    for (int64_t i = 0; i < s.x.numel(); i++) {
      int64_t c[4], at = 0;
      s.x.at(i, c);
      for (size_t d = 0; d < 4; d++) at = at * s.y.t.dims[d] + (s.y.t.dims[d] == 1 ? 0 : c[d]);
      double &to = y[(size_t)at];
      to = is_max ? std::fmax(to, x[(size_t)i]) : to + x[(size_t)i];
    }
    store(s.y, y);
  }
  /* y's elements are x's of the same offset. */
  void view(const Step &s) const {
    Numbers x = load(s.x), y((size_t)s.y.numel());
    std::map<int64_t, double> by_offset;
    int64_t c[4];
    for (int64_t i = 0; i < s.x.numel(); i++) s.x.at(i, c), by_offset[s.x.offset(c)] = x[(size_t)i];
    for (int64_t i = 0; i < s.y.numel(); i++) s.y.at(i, c), y[(size_t)i] = by_offset[s.y.offset(c)];
    store(s.y, y);
  }
  void run() const {
    for (const Step &s : steps) {
      if (s.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) product(s);
      if (s.type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) pointwise(s);
      if (s.type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) reduce(s);
      if (s.type == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) view(s);
    }
  }
};

/* ---- from descriptors ---- */

Place place_of(const Part *op, int name, const Part *pack) {
  Place p = {};
  Part *part = inner(op, name);
  if (!part) return p;
  p.t = tensor_of(part, pack);
  p.uid = part->one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  p.is_virtual = part->one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
  p.is_by_value = part->one<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
  p.is_there = p.t.dims.size() == 4 && p.t.strides.size() == 4;
  if (p.is_there && p.is_by_value && p.t.data) p.value = orr_fake_get(p.t.data, p.t.type, 0);
  return p;
}

/* How the step's numbers are computed must be asked for: in f32, comparisons in booleans. */
bool computes(const Part *how, int name, cudnnDataType_t type) {
  return how && how->one<cudnnDataType_t>(name) == type;
}

bool read(const Part *op, const Part *pack, Step *s) {
  *s = {};
  s->type = op->type;
  switch (op->type) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      s->x = place_of(op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, pack);
      s->b = place_of(op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, pack);
      s->y = place_of(op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, pack);
      return computes(inner(op, CUDNN_ATTR_OPERATION_MATMUL_DESC), CUDNN_ATTR_MATMUL_COMP_TYPE,
                      CUDNN_DATA_FLOAT);
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: {
      Part *how = inner(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
      s->mode = how ? (int)how->one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) : 0;
      s->axis = how ? how->one<int64_t>(CUDNN_ATTR_POINTWISE_AXIS) : 0;
      s->x = place_of(op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, pack);
      if (op->attributes.count(CUDNN_ATTR_OPERATION_POINTWISE_BDESC))
        s->b = place_of(op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, pack);
      if (op->attributes.count(CUDNN_ATTR_OPERATION_POINTWISE_TDESC))
        s->t = place_of(op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, pack);
      s->y = place_of(op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, pack);
      return computes(how, CUDNN_ATTR_POINTWISE_MATH_PREC,
                      s->mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT);
    }
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: {
      Part *how = inner(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC);
      s->mode = how ? (int)how->one<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR) : 0;
      s->x = place_of(op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, pack);
      s->y = place_of(op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, pack);
      return computes(how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    }
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      s->x = place_of(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, pack);
      s->y = place_of(op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, pack);
      return true;
    default: return false;
  }
}

bool meets(const Place &p, const Place &y) {
  for (size_t d = 0; d < 4; d++)
    if (p.t.dims[d] != 1 && p.t.dims[d] != y.t.dims[d]) return false;
  return true;
}

/* Shapes that belong together. */
bool fits(const Step &s) {
  if (!s.x.is_there || !s.y.is_there) return false;
  const std::vector<int64_t> &x = s.x.t.dims, &b = s.b.t.dims, &y = s.y.t.dims;
  switch (s.type) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return s.b.is_there && x[0] == y[0] && x[1] == y[1] && b[0] == y[0] && b[1] == y[1] &&
             x[2] == y[2] && x[3] == b[2] && b[3] == y[3];
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      if (s.mode == CUDNN_POINTWISE_BINARY_SELECT && !s.t.is_there) return false;
      return meets(s.x, s.y) && (!s.b.is_there || meets(s.b, s.y)) &&
             (!s.t.is_there || meets(s.t, s.y));
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: return meets(s.y, s.x);
    default: return s.x.numel() == s.y.numel();
  }
}

/* An engine's limits: rows of a product, side by side. */
bool is_narrow(const Place &p) {
  if (p.is_virtual) return true;
  for (size_t d = 2; d < 4; d++)
    if (p.t.strides[d] == 1 && p.t.dims[d] != 1)
      return p.t.dims[d] <= MOST_COLUMNS && p.t.dims[d] % 8 == 0;
  return p.t.type == FAKE_F32;
}

/* Where memory is needed, it is there; what is read inside was made. */
bool is_ready(const Place &p, bool is_read, std::map<int64_t, bool> *made, int device) {
  if (!p.is_there) return true;
  if (p.is_by_value) return p.t.data != nullptr && is_read;
  if (!p.is_virtual) return is_there(device, p.t, "a tensor of cuDNN");
  if (!is_read) (*made)[p.uid] = true;
  if (made->count(p.uid)) return true;
  orr_fake_complain("cuDNN: virtual tensor %ld is read before it is made", (long)p.uid);
  return false;
}

} // namespace

bool orr_fake_dnn_flow_fits(const std::vector<Part *> &ops) {
  const Part nothing = {};
  for (const Part *op : ops) {
    Step s;
    if (!part_at((void *)op) || !read(op, &nothing, &s) || !fits(s)) return false;
    if (s.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR &&
        !(is_narrow(s.x) && is_narrow(s.b) && is_narrow(s.y)))
      return false;
  }
  return !ops.empty();
}

std::function<void()> orr_fake_dnn_flow(const std::vector<Part *> &ops, const Part *pack,
                                        int device, double spoil) {
  Flow flow;
  flow.spoil = spoil + (double)orr_fake_number("ORRERY_FAKE_SPOIL", 0);
  std::map<int64_t, bool> made;
  for (const Part *op : ops) {
    Step s;
    if (!part_at((void *)op) || !read(op, pack, &s) || !fits(s)) {
      orr_fake_complain("cuDNN: an operation of kind %d does not fit its tensors", op->type);
      return nullptr;
    }
    if (!is_ready(s.x, true, &made, device) || !is_ready(s.b, true, &made, device) ||
        !is_ready(s.t, true, &made, device) || !is_ready(s.y, false, &made, device))
      return nullptr;
    flow.steps.push_back(s);
  }
  return [=]() { flow.run(); };
}
