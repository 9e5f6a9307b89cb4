/* lua_op.c: every op of the table as a function and a method, from its `args` alone.
 *
 * Invariant: args are read once, at loading, into words; a call walks them. A method with a
 * trailing _ is the in-place form and returns its target itself.
 * To add a kind of word: its letter in read_word, and in orrery_int.h beside orr_op.args.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lua_core.h"
#include "op.h"
#include "op_capture.h"
#include "op_words.h"

typedef struct binding {
  const orr_op *op;
  bool in_place;
  int n;
  orr_word w[ORR_MAX_WORDS];
} binding;

typedef struct reading {
  lua_State *L;
  const binding *b;
  orr_tensor **in;
  int n_in, n_i, n_f;
  orr_args args;
  orr_tensor *owned[4]; /* numbers made tensors */
  int n_owned;
  const orr_op *op; /* changes to the scalar form */
} reading;

static int fail(reading *r, int arg, const char *want) {
  for (int k = 0; k < r->n_owned; k++) orr_tensor_free(r->owned[k]);
  r->n_owned = 0;
  const char *got = lua_isnoneornil(r->L, arg) ? "missing" : luaL_typename(r->L, arg);
  return orr_lua_error(r->L, "%s: argument %d must be %s and is %s", r->b->op->name, arg, want,
                       got);
}

/* ---- words ---- */

static int64_t to_dim(reading *r, int arg, double value, int extra) {
  int ndim = r->n_in && r->in[0] ? r->in[0]->meta.ndim + extra : 0;
  int64_t d = (int64_t)value;
  if (value != floor(value) || d == 0 || d > ndim || d < -ndim) {
    for (int k = 0; k < r->n_owned; k++) orr_tensor_free(r->owned[k]);
    char text[300];
    orr_lua_error(r->L, "%s: dimension %g (argument %d) of a tensor with %d; got %s",
                  r->b->op->name, value, arg, ndim,
                  r->n_in && r->in[0] ? orr_tensor_text(r->in[0], text, sizeof text) : "none");
  }
  return d > 0 ? d - 1 : d + ndim;
}

static void put_integer(reading *r, int64_t value) { r->args.i[r->n_i++] = value; }

static int64_t checked_integer(reading *r, int arg) {
  double v = lua_tonumber(r->L, arg);
  if (lua_type(r->L, arg) != LUA_TNUMBER || v != floor(v)) fail(r, arg, "a whole number");
  return (int64_t)v;
}

/* Whole numbers from `arg` on, or one table of them; returns the next argument. */
static int read_list(reading *r, int arg, bool dims) {
  lua_State *L = r->L;
  int count_at = r->n_i++, n = 0;
  bool table = lua_istable(L, arg);
  int last = table ? (int)lua_rawlen(L, arg) : lua_gettop(L) - arg + 1;
  if (last > ORR_MAX_DIM) fail(r, arg, "at most 8 numbers");
  for (int k = 1; k <= last; k++) {
    if (table) lua_rawgeti(L, arg, k);
    else lua_pushvalue(L, arg + k - 1);
    double v = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || v != floor(v))
      fail(r, arg, "a list of whole numbers");
    lua_pop(L, 1);
    put_integer(r, dims ? to_dim(r, arg, v, 0) : (int64_t)v);
    n++;
  }
  r->args.i[count_at] = n;
  return table ? arg + 1 : arg + last;
}

/* A number in a tensor's place: a 0-dim host tensor of the other tensor's dtype. */
static void number_tensor(reading *r, int arg) {
  double v = lua_isboolean(r->L, arg) ? lua_toboolean(r->L, arg) : lua_tonumber(r->L, arg);
  orr_meta meta = {.dtype = v == floor(v) ? ORR_I64 : ORR_F32};
  for (int k = 1; k <= 4; k++) {
    orr_tensor *t = orr_lua_test(r->L, k);
    if (t && t->meta.dtype != ORR_BOOL &&
        (orr_dtype_is_float(t->meta.dtype) || meta.dtype == ORR_I64)) {
      meta.dtype = t->meta.dtype;
      break;
    }
  }
  orr_args args = {.f = {v}};
  orr_tensor *t;
  orr_status status = orr_create(&orr_op_full, &meta, orr_layout_single(0), &args, &t);
  if (status) orr_lua_raise(r->L, status);
  r->owned[r->n_owned++] = r->in[r->n_in++] = t;
}

static void read_scalar(reading *r, int arg) {
  orr_tensor *t = orr_lua_test(r->L, arg);
  if (t) {
    r->in[r->n_in++] = t;
    return;
  }
  int type = lua_type(r->L, arg);
  if (type != LUA_TNUMBER && type != LUA_TBOOLEAN) fail(r, arg, "a tensor or a number");
  if (!r->b->op->scalar) {
    number_tensor(r, arg);
    return;
  }
  bool first = arg == 1;
  if (first && !orr_lua_test(r->L, 2)) fail(r, 2, "a tensor");
  r->op = r->b->op->scalar;
  r->args.f[0] = type == LUA_TBOOLEAN ? lua_toboolean(r->L, arg) : lua_tonumber(r->L, arg);
  r->args.i[0] = first;
}

static void read_default(reading *r, const orr_word *w) {
  bool nil = isnan(w->otherwise);
  switch (w->kind) {
    case 'f': r->args.f[r->n_f++] = w->otherwise; break;
    case 'd':
    case 'e':
      if (r->n_in && r->in[0] && r->in[0]->meta.ndim == 0 && !nil) put_integer(r, 0);
      else put_integer(r, nil ? ORR_NIL : to_dim(r, 0, w->otherwise, w->kind == 'e'));
      break;
    default: put_integer(r, nil ? ORR_NIL : (int64_t)w->otherwise);
  }
}

static void read_tensor(reading *r, const orr_word *w, int arg) {
  orr_tensor *t = orr_lua_test(r->L, arg);
  if (!t && !(w->optional && lua_isnoneornil(r->L, arg))) fail(r, arg, "a tensor");
  r->in[r->n_in++] = t;
}

/* The reduction of a loss, by its word. */
static int64_t to_reduction(reading *r, int arg) {
  static const char *const names[] = {"none", "mean", "sum"};
  const char *word = lua_type(r->L, arg) == LUA_TSTRING ? lua_tostring(r->L, arg) : "";
  for (int k = 0; k < 3; k++)
    if (strcmp(word, names[k]) == 0) return k;
  return fail(r, arg, "\"none\", \"mean\" or \"sum\"");
}

/* Reads one word from argument `arg`; returns the next argument. */
static int read_word(reading *r, const orr_word *w, int arg) {
  lua_State *L = r->L;
  if (w->has_default && lua_isnoneornil(L, arg)) {
    read_default(r, w);
    return arg + 1;
  }
  switch (w->kind) {
    case 't': read_tensor(r, w, arg); break;
    case 's': read_scalar(r, arg); break;
    case 'i': put_integer(r, checked_integer(r, arg)); break;
    case 'b':
      if (!lua_isboolean(L, arg)) fail(r, arg, "true or false");
      put_integer(r, lua_toboolean(L, arg));
      break;
    case 'd':
    case 'e':
      if (lua_type(L, arg) != LUA_TNUMBER) fail(r, arg, "a dimension");
      put_integer(r, to_dim(r, arg, lua_tonumber(L, arg), w->kind == 'e'));
      break;
    case 'f':
      if (lua_type(L, arg) != LUA_TNUMBER) fail(r, arg, "a number");
      r->args.f[r->n_f++] = lua_tonumber(L, arg);
      break;
    case 'r': put_integer(r, to_reduction(r, arg)); break;
    case 'L': return read_list(r, arg, false);
    case 'D': return read_list(r, arg, true);
  }
  return arg + 1;
}

/* ---- calling ---- */

static int push_results(lua_State *L, const binding *b, orr_tensor **out) {
  if (b->in_place) {
    if (out[0]) orr_tensor_free(out[0]);
    lua_pushvalue(L, 1);
    return 1;
  }
  int n = 0;
  for (int k = 0; k < b->op->n_out; k++) {
    if (!out[k]) continue;
    orr_lua_push(L, out[k]);
    n++;
  }
  return n;
}

static int run(reading *r) {
  orr_tensor *out[ORR_MAX_OUT] = {NULL};
  bool has_args = r->n_i || r->n_f || r->op != r->b->op;
  orr_status status =
      orr_dispatch(r->op, r->in, r->n_in, has_args ? &r->args : NULL, r->b->in_place, out);
  for (int k = 0; k < r->n_owned; k++) orr_tensor_free(r->owned[k]);
  if (status) return orr_lua_raise(r->L, status);
  return push_results(r->L, r->b, out);
}

static int call(lua_State *L) {
  const binding *b = lua_touserdata(L, lua_upvalueindex(1));
  orr_tensor *in[ORR_MAX_WORDS];
  reading r;
  r.L = L;
  r.b = b;
  r.in = in;
  r.n_in = r.n_i = r.n_f = r.n_owned = 0;
  r.op = b->op;
  if (orr_capturing()) memset(&r.args, 0, sizeof r.args); /* recordings are compared */
  int arg = 1;
  for (int k = 0; k < b->n; k++) {
    if (b->w[k].kind == 'T') {
      r.in = orr_lua_list(L, arg, &r.n_in);
      lua_insert(L, 1); /* keeps the list; arguments move up */
      arg += 2;
    } else {
      arg = read_word(&r, &b->w[k], arg);
    }
  }
  return run(&r);
}

/* ---- loading ---- */

static void push_binding(lua_State *L, const orr_op *op, bool in_place) {
  binding *b = lua_newuserdata(L, sizeof *b);
  memset(b, 0, sizeof *b);
  b->op = op;
  b->in_place = in_place || op->flags & ORR_OP_ALWAYS_IN_PLACE;
  b->n = orr_words_read(op->args, b->w);
  lua_pushcclosure(L, call, 1);
}

/* The binding on the stack's top becomes methods[name] and module[name]. */
static void set_both(lua_State *L, int methods, int module, const char *name) {
  lua_pushvalue(L, -1);
  lua_setfield(L, methods, name);
  lua_setfield(L, module, name);
}

/* op_table(): {name, args, in_place} of every op that has a Lua form, in the order of the
 * table. */
static int op_table(lua_State *L) {
  lua_newtable(L);
  for (int k = 0, n = 0; k < orr_op_count(); k++) {
    const orr_op *op = orr_op_at(k);
    if (!op->args) continue;
    lua_newtable(L);
    lua_pushstring(L, op->name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, op->args);
    lua_setfield(L, -2, "args");
    lua_pushboolean(L, (op->flags & ORR_OP_IN_PLACE) != 0);
    lua_setfield(L, -2, "in_place");
    lua_rawseti(L, -2, ++n);
  }
  return 1;
}

int orr_lua_open_op(lua_State *L) {
  static const char *const operators[][2] = {
      {"__add", "add"}, {"__sub", "sub"}, {"__mul", "mul"},       {"__div", "div"},
      {"__pow", "pow"}, {"__unm", "neg"}, {"__mod", "remainder"},
  };
  int module = lua_gettop(L);
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  int meta = lua_gettop(L);
  lua_getfield(L, meta, "__methods");
  int methods = lua_gettop(L);
  for (int k = 0; k < orr_op_count(); k++) {
    const orr_op *op = orr_op_at(k);
    if (!op->args) continue;
    push_binding(L, op, false);
    set_both(L, methods, module, op->name);
    if (!(op->flags & ORR_OP_IN_PLACE)) continue;
    char name[64];
    snprintf(name, sizeof name, "%s_", op->name);
    push_binding(L, op, true);
    set_both(L, methods, module, name);
  }
  for (size_t k = 0; k < sizeof operators / sizeof *operators; k++) {
    lua_getfield(L, methods, operators[k][1]);
    lua_setfield(L, meta, operators[k][0]);
  }
  lua_settop(L, module);
  lua_pushcfunction(L, op_table);
  lua_setfield(L, module, "op_table");
  return 0;
}
