/* index.cpp: index.cu against the CPU's: what moves is equal to the bit, sums too, since both
 * add in the order of the indices; the lowest bad index is reported.
 *
 * Invariant: shapes come that make each way of adding: rows of few indices, of a tile, of more;
 * one place for many; places of other shards.
 * To add a check: check.h.
 */
#include "check.h"

extern "C" {
#include "../../../kernels/index.h"

void orr_cuda_index_select(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                           orr_fault *fault);
void orr_cuda_index_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                        orr_fault *fault);
void orr_cuda_gather(const orr_view *x, int dim, const orr_view *idx, const orr_view *y,
                     orr_fault *fault);
void orr_cuda_scatter_add(const orr_view *gx, int dim, const orr_view *idx, const orr_view *g,
                          orr_fault *fault);
void orr_cuda_embedding(const orr_view *w, const orr_view *idx, int64_t row0, const orr_view *y,
                        orr_fault *fault, int64_t vocabulary);
void orr_cuda_embedding_back(const orr_view *gw, const orr_view *idx, int64_t row0,
                             const orr_view *g, int64_t vocabulary);
void orr_cuda_one_hot(const orr_view *idx, int64_t class0, int64_t classes, const orr_view *y,
                      orr_fault *fault);
void orr_cuda_flip(const orr_view *x, unsigned mask, const orr_view *y);
void orr_cuda_roll(const orr_view *x, int dim, int64_t shift, const orr_view *y);
}

static orr_dtype any_dtype(Random &r) { return (orr_dtype)r.below(ORR_N_DTYPES); }
static orr_dtype index_dtype(Random &r) { return r.once_in(2) ? ORR_I64 : ORR_I32; }
static Lie any_lie(Random &r) { return r.once_in(2) ? ROW_MAJOR : ANY_LIE; }

/* Indices in [1, size], one in 50 of them bad where `bad`; now and then few different ones. */
static Array indices(Random &r, const Shape &shape, int64_t size, bool bad) {
  Array idx = make(r, index_dtype(r), shape, any_lie(r));
  int64_t most = r.once_in(3) ? 3 : size;
  for (int64_t i = 0, n = count(idx); i < n; i++) {
    int64_t k = size > 0 ? 1 + r.below(most < size ? most : size) : 0;
    if (bad && r.once_in(50)) k = r.once_in(2) ? size + 1 + r.below(3) : -r.below(3);
    put(idx, i, (double)k);
  }
  return idx;
}

static void same_fault(const orr_fault &fault) {
  if (fault.index == check_slot.position && (!fault.index || fault.value == check_slot.value))
    return;
  check_fail("fault at " + std::to_string(fault.index) + " of " + std::to_string(fault.value) +
             ", CUDA: at " + std::to_string(check_slot.position) + " of " +
             std::to_string(check_slot.value));
}

static Shape with(Shape s, int dim, int64_t n) {
  s[(size_t)dim] = n;
  return s;
}

/* Some wide rows that lie well, so that 16 bytes move at once. */
static Shape moved_shape(Random &r) {
  if (r.once_in(3)) return {r.from(1, 30), 16 * r.from(1, 8)};
  return random_shape(r, (int)r.from(1, 4), 3000);
}

/* Row-major, but a few elements between the rows. */
static Array with_gaps(Random &r, orr_dtype dtype, Shape shape, int64_t gap) {
  int64_t width = shape.back();
  shape.back() = width + gap;
  Array a = make(r, dtype, shape, ROW_MAJOR);
  a.view.shape[shape.size() - 1] = width;
  return a;
}

static void index_select(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = moved_shape(r);
  int dim = (int)r.below((int64_t)shape.size());
  Array x = make(r, dtype, shape, any_lie(r), r.once_in(5));
  if (r.once_in(3)) x = with_gaps(r, dtype, shape, r.from(0, 16));
  int64_t n = r.once_in(20) ? 0 : r.from(1, 40);
  Array idx = indices(r, {n}, shape[(size_t)dim], r.once_in(2));
  Array y = make(r, dtype, with(shape, dim, n), any_lie(r));
  if (r.once_in(3)) y = with_gaps(r, dtype, with(shape, dim, n), r.from(0, 16));
  Array z = copy_of(y);
  orr_fault fault = {};
  fill(r, x, -100, 100, 30);
  check_now += " " + text_of(x) + " to " + text_of(y);
  check_slot = {};
  orr_k_index_select(x, dim, idx, y, &fault);
  orr_cuda_index_select(x, dim, idx, z, NULL);
  same(y, z, 0);
  if (count(y) > 0) same_fault(fault);
}

static void index_add(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = random_shape(r, (int)r.from(1, 4), 2000);
  int dim = (int)r.below((int64_t)shape.size());
  int64_t n = r.once_in(20) ? 0 : r.once_in(12) ? r.from(2000, 6000) : r.from(1, 60);
  if (n > 100) shape = with(Shape(shape.size(), 1), dim, 1 + r.below(9));
  Array gx = make(r, dtype, shape, any_lie(r));
  Array idx = indices(r, {n}, shape[(size_t)dim], r.once_in(3));
  Array g = make(r, dtype, with(shape, dim, n), any_lie(r), r.once_in(4));
  orr_fault fault = {};
  fill(r, gx, -100, 100), fill(r, g, -100, 100);
  Array gz = copy_of(gx);
  check_now += " " + text_of(gx) + " dim " + std::to_string(dim) + " " + text_of(g);
  check_slot = {};
  orr_k_index_add(gx, dim, idx, g, &fault);
  orr_cuda_index_add(gz, dim, idx, g, NULL);
  same(gx, gz, 0);
  if (count(g) > 0) same_fault(fault);
}

/* No larger than `shape` but along dim, where it has n. */
static Shape within(Random &r, Shape shape, int dim, int64_t n) {
  for (size_t d = 0; d < shape.size(); d++)
    if (r.once_in(4) && shape[d] > 1) shape[d] = r.from(1, shape[d]);
  return with(shape, dim, n);
}

static void gather(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = random_shape(r, (int)r.from(1, 4), 3000);
  int dim = (int)r.below((int64_t)shape.size());
  Shape picked = within(r, shape, dim, r.from(0, 50));
  Array x = make(r, dtype, shape, any_lie(r), r.once_in(5));
  Array idx = indices(r, picked, shape[(size_t)dim], r.once_in(2));
  Array y = make(r, dtype, picked, any_lie(r)), z = copy_of(y);
  orr_fault fault = {};
  fill(r, x, -100, 100, 30);
  check_now += " " + text_of(x) + " dim " + std::to_string(dim) + " " + text_of(idx);
  check_slot = {};
  orr_k_gather(x, dim, idx, y, &fault);
  orr_cuda_gather(x, dim, idx, z, NULL);
  same(y, z, 0);
  same_fault(fault);
}

static void scatter_add(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = random_shape(r, (int)r.from(1, 4), 1500);
  int dim = (int)r.below((int64_t)shape.size());
  static const int64_t most[] = {8, 60, 700, 2048, 5000};
  int64_t n = r.from(0, most[r.below(5)]);
  if (n > 100) shape = with(Shape(shape.size(), 2), dim, 1 + r.below(300));
  Shape added = within(r, shape, dim, n);
  Array gx = make(r, dtype, shape, any_lie(r));
  Array idx = indices(r, added, shape[(size_t)dim], r.once_in(3));
  Array g = make(r, dtype, added, any_lie(r), r.once_in(4));
  orr_fault fault = {};
  fill(r, gx, -100, 100), fill(r, g, -100, 100);
  Array gz = copy_of(gx);
  check_now += " " + text_of(gx) + " dim " + std::to_string(dim) + " " + text_of(g);
  check_slot = {};
  orr_k_scatter_add(gx, dim, idx, g, &fault);
  orr_cuda_scatter_add(gz, dim, idx, g, NULL);
  same(gx, gz, 0);
  same_fault(fault);
}

static void embedding(Random &r) {
  orr_dtype dtype = any_dtype(r);
  int64_t rows = r.from(1, 40), width = r.once_in(3) ? 16 * r.from(1, 5) : r.from(1, 40);
  int64_t row0 = r.once_in(2) ? r.below(20) : 0, vocabulary = row0 + rows + r.below(2) * 9;
  Shape shape = random_shape(r, (int)r.below(4), 300), out = shape;
  if (r.once_in(15)) shape = out = {r.from(2040, 5000)}, width = 2;
  out.push_back(width);
  Array w = make(r, dtype, {rows, width}, any_lie(r));
  Array idx = indices(r, shape, vocabulary, r.once_in(3));
  Array y = make(r, dtype, out, any_lie(r)), z = copy_of(y);
  orr_fault fault = {};
  fill(r, w, -100, 100, 30);
  check_now += " " + text_of(w) + " " + text_of(idx) + " to " + text_of(y);
  check_slot = {};
  orr_k_embedding(w, idx, row0, y, &fault, vocabulary);
  orr_cuda_embedding(w, idx, row0, z, NULL, vocabulary);
  same(y, z, 0);
  if (count(y) > 0) same_fault(fault);
  Array gw = make(r, dtype, {rows, width}, any_lie(r));
  fill(r, gw, 0, 0), fill(r, y, -100, 100);
  Array gz = copy_of(gw);
  check_slot = {};
  orr_k_embedding_back(gw, idx, row0, y, vocabulary);
  orr_cuda_embedding_back(gz, idx, row0, y, vocabulary);
  same(gw, gz, 0);
  if (check_slot.position) check_fail("the way back reported an index");
}

static void one_hot(Random &r) {
  int64_t classes = r.from(1, 40), class0 = r.once_in(2) ? 0 : r.below(classes);
  Shape shape = random_shape(r, (int)r.below(4), 200), out = shape;
  out.push_back(r.from(1, classes - class0));
  Array idx = indices(r, shape, classes, r.once_in(2));
  Array y = make(r, any_dtype(r), out, any_lie(r)), z = copy_of(y);
  orr_fault fault = {};
  check_slot = {};
  orr_k_one_hot(idx, class0, classes, y, &fault);
  orr_cuda_one_hot(idx, class0, classes, z, NULL);
  same(y, z, 0);
  same_fault(fault);
}

static void flip_and_roll(Random &r) {
  orr_dtype dtype = any_dtype(r);
  Shape shape = random_shape(r, (int)r.from(1, 4), 3000);
  Array x = make(r, dtype, shape, any_lie(r), r.once_in(4));
  Array y = make(r, dtype, shape, any_lie(r)), z = copy_of(y);
  unsigned mask = (unsigned)r.below(1 << shape.size());
  int dim = (int)r.below((int64_t)shape.size());
  int64_t shift = r.from(-70, 70);
  fill(r, x, -100, 100, 30);
  orr_k_flip(x, mask, y);
  orr_cuda_flip(x, mask, z);
  same(y, z, 0);
  orr_k_roll(x, dim, shift, y);
  orr_cuda_roll(x, dim, shift, z);
  same(y, z, 0);
}

/* All indices bad, and many of them: still one report, of the first. */
static void all_bad(Random &r) {
  int64_t n = r.from(300, 3000);
  Array w = make(r, ORR_F32, {5, 32}), idx = make(r, ORR_I64, {n}),
        y = make(r, ORR_F32, {n, 32});
  Array z = copy_of(y);
  orr_fault fault = {};
  fill(r, w, -1, 1);
  for (int64_t i = 0; i < n; i++) put(idx, i, (double)(100 + i));
  orr_k_embedding(w, idx, 0, y, &fault, 5);
  orr_cuda_embedding(w, idx, 0, z, NULL, 5);
  same(y, z, 0);
  same_fault(fault);
}

const std::vector<Check> checks = {{"index_select", 150, index_select},
                                   {"index_add", 150, index_add},
                                   {"gather", 150, gather},
                                   {"scatter_add", 150, scatter_add},
                                   {"embedding", 150, embedding},
                                   {"one_hot", 100, one_hot},
                                   {"flip_and_roll", 100, flip_and_roll},
                                   {"all_bad", 3, all_bad}};
