/* lua_optim.c: the optimiser steps, grad_norm, scale_ and all_finite, over Lua lists of
 * tensors.
 *
 * Invariant: lists are read before anything runs, so a wrong element changes nothing; a steady
 * step makes no garbage. The tables keep their tensors alive.
 * To add an optimiser: read its lists by `lists`, then its numbers in the order of the Lua
 * call.
 */
#include <stdlib.h>

#include "lua_core.h"
#include "op_optim.h"

enum { MAX_LISTS = 5 };

/* Room for n tensors in each list of one call; the next call takes it again. */
static orr_tensor **lists_room(lua_State *L, int n) {
  static orr_tensor **room = NULL;
  static int size = 0;
  if (n <= size) return room;
  orr_tensor **more = realloc(room, (size_t)n * MAX_LISTS * sizeof *more);
  if (!more) {
    orr_lua_raise(L, orr_fail(ORR_EMEM, "out of host memory for a list of %d tensors", n));
    return NULL;
  }
  room = more;
  size = n;
  return room;
}

static void read_list(lua_State *L, int index, int n, orr_tensor **to) {
  luaL_checktype(L, index, LUA_TTABLE);
  if ((int)lua_rawlen(L, index) != n)
    orr_lua_error(L, "%d parameters, and a list of %d", n, (int)lua_rawlen(L, index));
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, index, k + 1);
    to[k] = orr_lua_test(L, -1);
    if (!to[k])
      orr_lua_error(L, "element %d of the list must be a tensor and is a %s", k + 1,
                    luaL_typename(L, -1));
    lua_pop(L, 1);
  }
}

/* Lists from argument 1 on: parameters, gradients, then states (nil: absent). */
static orr_optim_lists lists(lua_State *L, int n_states) {
  luaL_checktype(L, 1, LUA_TTABLE);
  int n = (int)lua_rawlen(L, 1);
  orr_tensor **room = lists_room(L, n);
  orr_optim_lists l = {.n = n, .param = room, .grad = room + n};
  read_list(L, 1, n, room);
  read_list(L, 2, n, room + n);
  for (int k = 0; k < n_states; k++) {
    if (lua_isnoneornil(L, 3 + k)) continue;
    orr_tensor **to = room + (2 + l.n_states) * n;
    read_list(L, 3 + k, n, to);
    l.state[l.n_states++] = to;
  }
  return l;
}

/* The last argument: the list of masters, or nil. */
static void add_masters(lua_State *L, int index, orr_optim_lists *l) {
  if (lua_isnil(L, index)) return;
  orr_tensor **to = lists_room(L, l->n) + (2 + l->n_states) * l->n;
  read_list(L, index, l->n, to);
  l->state[l->n_states++] = to;
  l->has_master = true;
}

/* sgd_(params, grads, momenta or nil, lr, momentum, dampening, nesterov, weight_decay,
 * masters or nil) */
static int sgd_(lua_State *L) {
  lua_settop(L, 9);
  orr_optim_lists l = lists(L, 1);
  add_masters(L, 9, &l);
  orr_sgd o = {.lr = luaL_checknumber(L, 4),
               .momentum = luaL_checknumber(L, 5),
               .dampening = luaL_checknumber(L, 6),
               .nesterov = lua_toboolean(L, 7),
               .weight_decay = luaL_checknumber(L, 8),
               .grad_scale = 1};
  orr_lua_try(L, orr_sgd_step(&l, &o));
  return 0;
}

/* adam_(params, grads, first, second, t, lr, beta1, beta2, eps, weight_decay, decoupled,
 * masters or nil) */
static int adam_(lua_State *L) {
  lua_settop(L, 12);
  orr_optim_lists l = lists(L, 2);
  if (l.n_states != 2) return orr_lua_error(L, "adam_: needs both lists of moments");
  add_masters(L, 12, &l);
  orr_adam o = {.t = luaL_checknumber(L, 5),
                .lr = luaL_checknumber(L, 6),
                .beta1 = luaL_checknumber(L, 7),
                .beta2 = luaL_checknumber(L, 8),
                .eps = luaL_checknumber(L, 9),
                .weight_decay = luaL_checknumber(L, 10),
                .decoupled = lua_toboolean(L, 11),
                .grad_scale = 1};
  orr_lua_try(L, orr_adam_step(&l, &o));
  return 0;
}

/* rmsprop_(params, grads, average, momentum or nil, lr, alpha, eps, weight_decay, momentum,
 * masters or nil) */
static int rmsprop_(lua_State *L) {
  lua_settop(L, 10);
  orr_optim_lists l = lists(L, 2);
  add_masters(L, 10, &l);
  if (lua_isnil(L, 3)) return orr_lua_error(L, "rmsprop_: needs the list of averages");
  orr_rmsprop o = {.lr = luaL_checknumber(L, 5),
                   .alpha = luaL_checknumber(L, 6),
                   .eps = luaL_checknumber(L, 7),
                   .weight_decay = luaL_checknumber(L, 8),
                   .momentum = luaL_checknumber(L, 9),
                   .grad_scale = 1};
  orr_lua_try(L, orr_rmsprop_step(&l, &o));
  return 0;
}

/* grad_norm(list[, p]): the norm of all tensors as one vector, as an f64 tensor on cpu. */
static int grad_norm(lua_State *L) {
  int n;
  double norm, p = luaL_optnumber(L, 2, 2);
  orr_meta meta = {.dtype = ORR_F64};
  orr_tensor **list = orr_lua_list(L, 1, &n), *t;
  orr_lua_try(L, orr_list_norm(list, n, p, &norm));
  orr_lua_try(L, orr_tensor_from_host(&meta, &norm, &t));
  orr_lua_push(L, t);
  return 1;
}

/* scale_(list, factor): a number, or a tensor with one element. */
static int scale_(lua_State *L) {
  int n;
  orr_tensor *by = orr_lua_test(L, 2);
  double factor = by ? 1 : luaL_checknumber(L, 2);
  orr_tensor **list = orr_lua_list(L, 1, &n);
  orr_lua_try(L, orr_list_scale(list, n, by, factor));
  return 0;
}

/* all_finite(list): whether no element is infinite or NaN on any device. */
static int all_finite(lua_State *L) {
  int n;
  bool finite = false;
  orr_tensor **list = orr_lua_list(L, 1, &n);
  orr_lua_try(L, orr_list_finite(list, n, &finite));
  lua_pushboolean(L, finite);
  return 1;
}

int orr_lua_open_optim(lua_State *L) {
  static const luaL_Reg functions[] = {{"sgd_", sgd_},
                                       {"adam_", adam_},
                                       {"rmsprop_", rmsprop_},
                                       {"grad_norm", grad_norm},
                                       {"scale_", scale_},
                                       {"all_finite", all_finite},
                                       {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  return 0;
}
