/* lua_optim.c: the optimiser steps, grad_norm, scale_ and all_finite, over Lua lists of tensors.
 *
 * Invariant: lists are read into userdata before anything runs, so a wrong element changes nothing.
 * To add an optimiser: read its lists by `lists`, then its numbers in the order of the Lua call.
 */
#include "lua_core.h"
#include "op_optim.h"

/* Lists from argument 1 on: parameters, gradients, then states (nil: absent). */
static orr_optim_lists lists(lua_State *L, int n_states) {
  orr_optim_lists l = {.n = 0};
  int n, n_grads;
  l.param = orr_lua_list(L, 1, &n);
  l.grad = orr_lua_list(L, 2, &n_grads);
  if (n_grads != n) orr_lua_error(L, "%d parameters and %d gradients", n, n_grads);
  for (int k = 0; k < n_states; k++) {
    int count;
    if (lua_isnoneornil(L, 3 + k)) continue;
    l.state[l.n_states++] = orr_lua_list(L, 3 + k, &count);
    if (count != n) orr_lua_error(L, "%d parameters and %d states", n, count);
  }
  l.n = n;
  return l;
}

/* sgd_(params, grads, momenta or nil, lr, momentum, dampening, nesterov, weight_decay) */
static int sgd_(lua_State *L) {
  lua_settop(L, 8);
  orr_optim_lists l = lists(L, 1);
  orr_sgd o = {.lr = luaL_checknumber(L, 4),
               .momentum = luaL_checknumber(L, 5),
               .dampening = luaL_checknumber(L, 6),
               .nesterov = lua_toboolean(L, 7),
               .weight_decay = luaL_checknumber(L, 8),
               .grad_scale = 1};
  orr_lua_try(L, orr_sgd_step(&l, &o));
  return 0;
}

/* adam_(params, grads, first, second, t, lr, beta1, beta2, eps, weight_decay, decoupled) */
static int adam_(lua_State *L) {
  lua_settop(L, 11);
  orr_optim_lists l = lists(L, 2);
  if (l.n_states != 2) return orr_lua_error(L, "adam_: needs both lists of moments");
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

/* rmsprop_(params, grads, average, momentum or nil, lr, alpha, eps, weight_decay, momentum) */
static int rmsprop_(lua_State *L) {
  lua_settop(L, 9);
  orr_optim_lists l = lists(L, 2);
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
  bool finite;
  orr_tensor **list = orr_lua_list(L, 1, &n);
  orr_lua_try(L, orr_list_finite(list, n, &finite));
  lua_pushboolean(L, finite);
  return 1;
}

int orr_lua_open_optim(lua_State *L) {
  static const luaL_Reg functions[] = {
      {"sgd_", sgd_},     {"adam_", adam_},           {"rmsprop_", rmsprop_}, {"grad_norm", grad_norm},
      {"scale_", scale_}, {"all_finite", all_finite}, {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  return 0;
}
