/* lua_place.c: meshes and layouts for lua/orrery/parallel: placing, shards, redistribution, the
 * trace of collectives, reducers.
 *
 * Invariant: a mesh is a light userdata: it lives for ever. A reducer is a userdata.
 * To add a function: its row at the end.
 */
#include <string.h>

#include "lua_core.h"
#include "op.h"

#define REDUCER "orrery.Reducer"

/* mesh({names}, {sizes}, {device names}) */
/* mesh(names, sizes, devices[, sequence]): sequence[k]: axis k splits it between layers. */
static int mesh(lua_State *L) {
  unsigned sequence = 0;
  const char *name[ORR_MAX_AXES];
  int size[ORR_MAX_AXES], device[ORR_MAX_DEVICES] = {0};
  int n_axes = (int)lua_rawlen(L, 1), n = (int)lua_rawlen(L, 3);
  if (n_axes > ORR_MAX_AXES || n > ORR_MAX_DEVICES)
    return orr_lua_error(L, "a mesh has at most %d axes and %d devices", ORR_MAX_AXES,
                         ORR_MAX_DEVICES);
  for (int k = 0; k < n_axes; k++) {
    lua_rawgeti(L, 1, k + 1);
    lua_rawgeti(L, 2, k + 1);
    name[k] = luaL_checkstring(L, -2); /* kept alive by the table */
    size[k] = (int)luaL_checkinteger(L, -1);
    lua_pop(L, 2);
    if (!lua_istable(L, 4)) continue;
    lua_rawgeti(L, 4, k + 1);
    sequence |= (unsigned)lua_toboolean(L, -1) << k;
    lua_pop(L, 1);
  }
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, 3, k + 1);
    orr_device *d = orr_lua_device(L, -1);
    if (!d) return orr_lua_error(L, "device %d of the mesh is missing", k + 1);
    device[k] = d->index;
    const orr_device *first = orr_device_at(device[0]);
    if (d->kind != first->kind)
      return orr_lua_error(L, "a mesh holds devices of one kind: %s, %s", first->name, d->name);
    lua_pop(L, 1);
  }
  const orr_mesh *m;
  if (n_axes == 0) m = orr_mesh_single(device[0]);
  else orr_lua_try(L, orr_mesh_get(n_axes, size, name, sequence, device, &m));
  lua_pushlightuserdata(L, (void *)m);
  return 1;
}

static const orr_mesh *mesh_at(lua_State *L, int index);

/* stages({meshes}): of one pipeline, in order. */
static int stages(lua_State *L) {
  const orr_mesh *stage[ORR_MAX_DEVICES];
  int n = lua_istable(L, 1) ? (int)lua_rawlen(L, 1) : 0;
  if (n < 1 || n > ORR_MAX_DEVICES)
    return orr_lua_error(L, "a pipeline has 1 to %d stages", ORR_MAX_DEVICES);
  for (int k = 0; k < n; k++) {
    lua_rawgeti(L, 1, k + 1);
    stage[k] = mesh_at(L, -1);
    lua_pop(L, 1);
  }
  orr_lua_try(L, orr_stages_add(stage, n));
  return 0;
}

static const orr_mesh *mesh_at(lua_State *L, int index) {
  luaL_checktype(L, index, LUA_TLIGHTUSERDATA);
  return lua_touserdata(L, index);
}

static int mesh_of(lua_State *L) {
  const orr_mesh *m = orr_lua_check(L, 1)->layout->mesh;
  if (m->n_axes) lua_pushlightuserdata(L, (void *)m);
  else lua_pushnil(L);
  return 1;
}

/* Words from index `first` on, one an axis (one word serves all); owned layout. */
static orr_layout *read_layout(lua_State *L, int first, const orr_mesh *m,
                               const orr_tensor *t) {
  orr_place place[ORR_MAX_AXES];
  int given = lua_gettop(L) - first + 1;
  if (given < 1 || (given > 1 && given != m->n_axes))
    orr_lua_error(L, "the mesh has %d axes: give one placement for all or one each", m->n_axes);
  for (int k = 0; k < m->n_axes; k++) {
    int at = given == 1 ? first : first + k;
    if (lua_type(L, at) != LUA_TSTRING)
      orr_lua_error(L, "a placement is \"replicate\", \"shard(d)\" or \"partial(sum)\"");
    orr_lua_try(L, orr_place_parse(lua_tostring(L, at), t->meta.ndim, &place[k]));
  }
  orr_layout *layout;
  orr_lua_try(L, orr_layout_new(m, place, t->meta.ndim, t->meta.shape, &layout));
  return layout;
}

static int push_moved(lua_State *L, orr_tensor *t, orr_layout *take_layout) {
  orr_tensor *y;
  orr_status status = orr_redistribute_op(t, take_layout, &y);
  orr_layout_free(take_layout);
  orr_lua_try(L, status);
  y->is_batch = t->is_batch;
  orr_lua_push(L, y);
  return 1;
}

/* x:redistribute(word, ...) on its own mesh. */
static int redistribute(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  if (orr_tensor_is_single(t))
    return orr_lua_error(L,
                         "redistribute: the tensor is on one device, %s; place it by a plan "
                         "first",
                         orr_tensor_device(t, 0)->name);
  return push_moved(L, t, read_layout(L, 2, t->layout->mesh, t));
}

/* distribute(x, mesh, word, ...) from any device. */
static int distribute(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  const orr_mesh *m = mesh_at(L, 2);
  if (m->n_axes == 0) return push_moved(L, t, orr_layout_ref(orr_layout_single(m->device[0])));
  return push_moved(L, t, read_layout(L, 3, m, t));
}

/* all_reduce_(x): sums the shards of a partial tensor in place, over every partial axis; the
 * replicated tensor on the same memory. x itself keeps its label and is not to be used
 * again. */
static int all_reduce_(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *y;
  orr_place place[ORR_MAX_AXES];
  const orr_mesh *mesh = t->layout->mesh;
  for (int a = 0; a < mesh->n_axes; a++) {
    place[a] = t->layout->axis[a];
    if (place[a].kind != ORR_PARTIAL) continue;
    orr_lua_try(L, orr_comm_all_reduce(&t, 1, a, place[a].op, false));
    place[a] = (orr_place){.kind = ORR_REPLICATE};
  }
  orr_layout *layout;
  orr_lua_try(L, orr_layout_new(mesh, place, t->meta.ndim, t->meta.shape, &layout));
  orr_status status = orr_tensor_alias_as(t, &t->meta, layout, &y);
  orr_layout_free(layout);
  orr_lua_try(L, status);
  orr_lua_push(L, y);
  return 1;
}

static int shards(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  lua_createtable(L, t->n, 0);
  for (int r = 0; r < t->n; r++) {
    orr_tensor *s = NULL;
    orr_lua_try(L, orr_tensor_shard(t, r, &s));
    lua_newtable(L);
    lua_pushstring(L, orr_tensor_device(t, r)->name);
    lua_setfield(L, -2, "device");
    orr_lua_push(L, s);
    lua_setfield(L, -2, "tensor");
    lua_rawseti(L, -2, r + 1);
  }
  return 1;
}

/* placements(x): a word an axis. */
static int placements(lua_State *L) {
  static const char *const partial[] = {"partial(sum)", "partial(max)", "partial(min)"};
  const orr_layout *layout = orr_lua_check(L, 1)->layout;
  lua_newtable(L);
  for (int k = 0; k < layout->mesh->n_axes; k++) {
    const orr_place *p = &layout->axis[k];
    if (p->kind == ORR_SHARD) lua_pushfstring(L, "shard(%d)", p->dim + 1);
    else lua_pushstring(L, p->kind == ORR_PARTIAL ? partial[p->op] : "replicate");
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* from_shards(mesh, {sizes}, {tensors on the mesh's devices}, word, ...): joins single-device
 * tensors into one, which takes their memory; the words say how. */
static int from_shards(lua_State *L) {
  const orr_mesh *m = mesh_at(L, 1);
  int n, top = lua_gettop(L);
  orr_tensor **part = orr_lua_list(L, 3, &n);
  lua_insert(L, 1);
  if (n != m->n) return orr_lua_error(L, "from_shards: %d tensors for %d devices", n, m->n);
  orr_tensor whole = {.meta = part[0]->meta}, *y = NULL;
  whole.meta.ndim = (int)lua_rawlen(L, 3);
  for (int k = 0; k < whole.meta.ndim; k++) {
    lua_rawgeti(L, 3, k + 1);
    whole.meta.shape[k] = (int64_t)lua_tonumber(L, -1);
    lua_pop(L, 1);
  }
  lua_settop(L, top + 1);
  orr_layout *layout = read_layout(L, 5, m, &whole);
  orr_status status = orr_tensor_join(&whole.meta, layout, part, &y);
  orr_layout_free(layout);
  orr_lua_try(L, status);
  orr_lua_push(L, y);
  return 1;
}

/* ---- batch marks ---- */

static int set_batch(lua_State *L) {
  orr_lua_check(L, 1)->is_batch = lua_toboolean(L, 2);
  lua_settop(L, 1);
  return 1;
}

static int is_batch(lua_State *L) {
  lua_pushboolean(L, orr_lua_check(L, 1)->is_batch);
  return 1;
}

/* ---- trace ---- */

static int trace_start(lua_State *L) {
  (void)L;
  orr_trace_start();
  return 0;
}

static int trace_stop(lua_State *L) {
  const orr_trace_row *row;
  int n = orr_trace_stop(&row);
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    lua_newtable(L);
    lua_pushstring(L, orr_collective_name(row[k].kind));
    lua_setfield(L, -2, "op");
    lua_pushstring(L, row[k].axis ? row[k].axis : "");
    lua_setfield(L, -2, "axis");
    lua_pushnumber(L, (lua_Number)row[k].bytes);
    lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, (lua_Integer)row[k].count);
    lua_setfield(L, -2, "count");
    lua_pushnumber(L, row[k].moved);
    lua_setfield(L, -2, "moved");
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* ---- reducers ---- */

static int reducer(lua_State *L) {
  orr_reducer **r = lua_newuserdata(L, sizeof *r);
  *r = NULL;
  luaL_setmetatable(L, REDUCER);
  orr_lua_try(L, orr_reducer_new((int64_t)luaL_checknumber(L, 1), r));
  return 1;
}

static int reducer_collect(lua_State *L) {
  orr_reducer **r = lua_touserdata(L, 1);
  if (*r) orr_reducer_free(*r);
  *r = NULL;
  return 0;
}

/* set_reducer(parameter, reducer or nil) */
static int set_reducer(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  orr_reducer **r = lua_isnoneornil(L, 2) ? NULL : luaL_checkudata(L, 2, REDUCER);
  if (t->reducer) orr_reducer_free(t->reducer);
  t->reducer = r ? orr_reducer_ref(*r) : NULL;
  return 0;
}

/* ---- sharded state ---- */

/* Words in the table at `index`, an owned layout on t's mesh; NULL where it is nil. */
static orr_layout *layout_at(lua_State *L, int index, const orr_tensor *t) {
  if (lua_isnoneornil(L, index)) return NULL;
  luaL_checktype(L, index, LUA_TTABLE);
  lua_settop(L, 3);
  int n = (int)lua_rawlen(L, index);
  for (int k = 0; k < n; k++) lua_rawgeti(L, index, k + 1);
  orr_layout *layout = read_layout(L, 4, t->layout->mesh, t);
  lua_settop(L, 3);
  return layout;
}

/* set_sharding(parameter, {words where ops see it} or nil, {words of its gradient and state} or
 * nil) */
static int set_sharding(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1);
  orr_layout_free(t->use_layout);
  orr_layout_free(t->state_layout);
  t->use_layout = t->state_layout = NULL;
  t->use_layout = layout_at(L, 2, t);
  t->state_layout = layout_at(L, 3, t);
  return 0;
}

/* state_like(parameter): zeros where its optimizer state stands; f32 where it is in half
 * precision. */
static int state_like(lua_State *L) {
  orr_tensor *p = orr_lua_check(L, 1), *y;
  orr_args args = {.f = {0}};
  orr_meta meta = p->meta;
  if (meta.dtype == ORR_F16 || meta.dtype == ORR_BF16) meta.dtype = ORR_F32;
  orr_lua_try(L, orr_create(&orr_op_full, &meta, orr_state_layout(p), &args, &y));
  orr_lua_push(L, y);
  return 1;
}

int orr_lua_open_place(lua_State *L) {
  static const luaL_Reg functions[] = {{"mesh", mesh},
                                       {"mesh_of", mesh_of},
                                       {"stages", stages},
                                       {"distribute", distribute},
                                       {"placements", placements},
                                       {"all_reduce_", all_reduce_},
                                       {"from_shards", from_shards},
                                       {"set_batch", set_batch},
                                       {"is_batch", is_batch},
                                       {"trace_start", trace_start},
                                       {"trace_stop", trace_stop},
                                       {"reducer", reducer},
                                       {"set_reducer", set_reducer},
                                       {"set_sharding", set_sharding},
                                       {"state_like", state_like},
                                       {NULL, NULL}};
  static const luaL_Reg methods[] = {
      {"redistribute", redistribute}, {"shards", shards}, {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  luaL_newmetatable(L, REDUCER);
  lua_pushcfunction(L, reducer_collect);
  lua_setfield(L, -2, "__gc");
  luaL_getmetatable(L, ORR_LUA_TENSOR);
  lua_getfield(L, -1, "__methods");
  luaL_setfuncs(L, methods, 0);
  lua_pop(L, 3);
  return 0;
}
