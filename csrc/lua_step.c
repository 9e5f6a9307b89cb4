/* lua_step.c: what lua/orrery/parallel/step.lua asks of the engine: backward in pieces, the
 * stage being run, random positions, statistics of a step.
 *
 * Invariant: a backward that was started is ended by its userdata's collection at the latest.
 * To add a function: its row at the end.
 */
#include "lua_core.h"
#include "op.h"
#include "op_batch_norm.h"
#include "random_state.h"

#define RUN "orrery.Backward"

/* backward_start(loss, seed): a run; seed scales the gradient of the loss. */
static int backward_start(lua_State *L) {
  orr_tensor *loss = orr_lua_check(L, 1), *seed;
  orr_args value = {.f = {luaL_checknumber(L, 2)}};
  orr_backward_run **r = lua_newuserdata(L, sizeof(*r));
  *r = NULL;
  luaL_setmetatable(L, RUN);
  const orr_mesh *mesh = loss->layout->mesh;
  orr_layout *layout =
      mesh->n_axes ? orr_layout_replicate(mesh) : orr_layout_single(mesh->device[0]);
  if (orr_tensor_numel(loss) != 1)
    return orr_lua_error(
        L, "the criterion must give one number, a mean or a sum over the samples");
  orr_lua_try(L, orr_create(&orr_op_full, &loss->meta, layout, &value, &seed));
  orr_status status = orr_backward_start(loss, seed, r);
  orr_tensor_free(seed);
  orr_lua_try(L, status);
  return 1;
}

static int backward_end(lua_State *L) {
  orr_backward_run **r = lua_touserdata(L, 1);
  if (*r) orr_backward_end(*r);
  *r = NULL;
  return 0;
}

/* backward_until(run, mesh or nil): whether anything is left. */
static int backward_until(lua_State *L) {
  orr_backward_run **r = luaL_checkudata(L, 1, RUN);
  bool more = false;
  orr_lua_enter(L);
  if (*r) orr_lua_try(L, orr_backward_until(*r, lua_touserdata(L, 2), &more));
  lua_pushboolean(L, more);
  return 1;
}

static int flush_gradients(lua_State *L) {
  orr_lua_enter(L);
  orr_lua_try(L, orr_reducers_flush());
  return 0;
}

static int drop_gradients(lua_State *L) {
  orr_lua_enter(L);
  orr_reducers_drop();
  return 0;
}

static int collect_hint(lua_State *L) {
  orr_lua_enter(L);
  orr_collect_hint();
  return 0;
}

static int set_stage(lua_State *L) {
  orr_stages_set(lua_touserdata(L, 1));
  return 0;
}

/* to_stage(tensor, mesh): the tensor on that stage; itself where it is there, on the host, or
 * of no pipeline with it. */
static int to_stage(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *moved;
  const orr_mesh *mesh = lua_touserdata(L, 2), *from = t->layout->mesh;
  orr_layout *layout;
  lua_settop(L, 1);
  orr_lua_enter(L);
  if (from == mesh || from == orr_mesh_single(0) || !orr_stages_later(from, mesh)) return 1;
  orr_lua_try(L, orr_stages_layout(t, mesh, &layout));
  bool recorded = orr_grad_mode() && t->requires_grad;
  orr_status status =
      recorded ? orr_redistribute_op(t, layout, &moved) : orr_redistribute(t, layout, &moved);
  orr_layout_free(layout);
  orr_lua_try(L, status);
  orr_lua_push(L, moved);
  return 1;
}

/* random_position(): calls of the dropout and the user stream; random_position(d, u) sets
 * them. */
static int random_position(lua_State *L) {
  orr_random_state s = orr_random_get();
  lua_pushnumber(L, (lua_Number)s.stream[ORR_STREAM_DROPOUT].call);
  lua_pushnumber(L, (lua_Number)s.stream[ORR_STREAM_USER].call);
  if (lua_type(L, 1) == LUA_TNUMBER) {
    s.stream[ORR_STREAM_DROPOUT].call = (uint64_t)lua_tonumber(L, 1);
    s.stream[ORR_STREAM_USER].call = (uint64_t)luaL_checknumber(L, 2);
    orr_random_set(&s);
  }
  return 2;
}

/* random_micro(rows, first from 1, n), or random_micro() for none. */
static int random_micro(lua_State *L) {
  orr_random_micro m = {0};
  if (lua_type(L, 1) == LUA_TNUMBER)
    m = (orr_random_micro){(int64_t)lua_tonumber(L, 1), (int64_t)luaL_checknumber(L, 2) - 1,
                           (int64_t)luaL_checknumber(L, 3)};
  orr_random_set_micro(&m);
  return 0;
}

/* random_micro_now(): what random_micro was given last; nothing where there is none. */
static int random_micro_now(lua_State *L) {
  orr_random_micro m = orr_random_get_micro();
  if (m.rows == 0) return 0;
  lua_pushnumber(L, (lua_Number)m.rows);
  lua_pushnumber(L, (lua_Number)m.first + 1);
  lua_pushnumber(L, (lua_Number)m.n);
  return 3;
}

static int defer_statistics(lua_State *L) {
  orr_lua_enter(L);
  if (lua_toboolean(L, 1)) orr_bn_defer_begin();
  else orr_lua_try(L, orr_bn_defer_end(lua_toboolean(L, 2)));
  return 0;
}

static int hold_statistics(lua_State *L) {
  orr_bn_hold(lua_toboolean(L, 1));
  return 0;
}

int orr_lua_open_step(lua_State *L) {
  static const luaL_Reg functions[] = {{"backward_start", backward_start},
                                       {"backward_until", backward_until},
                                       {"backward_end", backward_end},
                                       {"flush_gradients", flush_gradients},
                                       {"drop_gradients", drop_gradients},
                                       {"collect_hint", collect_hint},
                                       {"set_stage", set_stage},
                                       {"to_stage", to_stage},
                                       {"set_resumer", orr_lua_set_resumer},
                                       {"random_position", random_position},
                                       {"random_micro", random_micro},
                                       {"random_micro_now", random_micro_now},
                                       {"defer_statistics", defer_statistics},
                                       {"hold_statistics", hold_statistics},
                                       {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  luaL_newmetatable(L, RUN);
  lua_pushcfunction(L, backward_end);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
  return 0;
}
