/* lua_capture.c: what lua/orrery/capture.lua asks of the engine: recordings and their replays.
 *
 * Invariant: a set of pools lives as long as its userdata, which every recording made with it
 * keeps alive (the caller's part). A recording that is collected while it records stops.
 * To add a function: its row in `functions`; names begin with capture_.
 */
#include <string.h>

#include "lua_core.h"
#include "op.h"
#include "op_capture.h"
#include "op_record.h"
#include "plugin.h"
#include "tape.h"

#define POOLS "orrery.CapturePools"
#define RECORD "orrery.CaptureRecord"

static int pools_new(lua_State *L) {
  orr_pools **p = lua_newuserdata(L, sizeof *p);
  *p = NULL;
  luaL_setmetatable(L, POOLS);
  orr_lua_try(L, orr_pools_new(p));
  return 1;
}

static int pools_free(lua_State *L) {
  orr_pools **p = lua_touserdata(L, 1);
  orr_pools_free(*p);
  *p = NULL;
  return 0;
}

static orr_capture *record_at(lua_State *L, int index) {
  orr_capture **c = luaL_checkudata(L, index, RECORD);
  if (!*c) orr_lua_error(L, "capture: the record is gone");
  return *c;
}

/* capture_start(pools or nil): a record, being made. */
static int start(lua_State *L) {
  orr_pools **p = lua_isnil(L, 1) ? NULL : luaL_checkudata(L, 1, POOLS);
  orr_capture **c = lua_newuserdata(L, sizeof *c);
  *c = NULL;
  luaL_setmetatable(L, RECORD);
  orr_lua_enter(L);
  orr_lua_try(L, orr_capture_start(p ? *p : NULL, c));
  return 1;
}

static int text_or_nil(lua_State *L, bool there, const char *text) {
  if (there) lua_pushstring(L, text);
  else lua_pushnil(L);
  return 1;
}

/* capture_stop(record): why it cannot be repeated, nil where it can. */
static int stop(lua_State *L) {
  orr_capture *c = record_at(L, 1);
  orr_lua_enter(L);
  orr_lua_try(L, orr_capture_stop(c));
  return text_or_nil(L, *orr_capture_why(c), orr_capture_why(c));
}

static int record_free(lua_State *L) {
  orr_capture **c = lua_touserdata(L, 1);
  orr_capture_free(*c);
  *c = NULL;
  return 0;
}

/* capture_differs(record, before): what differs, or nil. */
static int differs(lua_State *L) {
  char text[600];
  bool is = orr_capture_differs(record_at(L, 2), record_at(L, 1), text, sizeof text);
  return text_or_nil(L, is, text);
}

/* capture_escaped(record, {tensors}): who keeps a tensor of the step apart from these. */
static int escaped(lua_State *L) {
  char text[600];
  int n;
  orr_tensor **keep = orr_lua_list(L, 2, &n);
  bool is = orr_capture_escaped(record_at(L, 1), keep, n, text, sizeof text);
  return text_or_nil(L, is, text);
}

/* capture_made(record, tensor). */
static int made(lua_State *L) {
  lua_pushboolean(L, orr_capture_made(record_at(L, 1), orr_lua_check(L, 2)));
  return 1;
}

/* capture_wrote(record, tensor). */
static int wrote(lua_State *L) {
  lua_pushboolean(L, orr_capture_wrote(record_at(L, 1), orr_lua_check(L, 2)));
  return 1;
}

/* capture_forget(record): leaves that the step made and nobody keeps. */
static int forget(lua_State *L) {
  orr_capture_forget(record_at(L, 1));
  return 0;
}

/* capture_held(slot): whether somebody else holds a tensor in its memory. */
static int held(lua_State *L) {
  lua_pushboolean(L, orr_lua_check(L, 1)->storage->rc > 1);
  return 1;
}

/* capture_host(record, "feed" or "aside"): a host part begins. */
static int host(lua_State *L) {
  bool feed = strcmp(luaL_checkstring(L, 2), "feed") == 0;
  orr_lua_try(L, orr_capture_host(record_at(L, 1), feed ? ORR_HOST_FEED : ORR_HOST_ASIDE));
  return 0;
}

static int host_end(lua_State *L) {
  orr_capture_host_end(record_at(L, 1));
  return 0;
}

static int prepare(lua_State *L) {
  orr_lua_try(L, orr_capture_prepare(record_at(L, 1)));
  return 0;
}

/* capture_fits(record): why it does not, or nil. */
static int fits(lua_State *L) {
  char text[600];
  return text_or_nil(L, !orr_capture_fits(record_at(L, 1), text, sizeof text), text);
}

static int begin(lua_State *L) {
  orr_lua_enter(L);
  orr_lua_try(L, orr_capture_begin(record_at(L, 1)));
  return 0;
}

static int end(lua_State *L) {
  orr_capture_end(record_at(L, 1));
  return 0;
}

/* capture_replay(record, k): up to host part k, from 1; without k: to the end. */
static int replay(lua_State *L) {
  orr_capture *c = record_at(L, 1);
  orr_lua_enter(L);
  orr_lua_try(L, orr_capture_replay(c, (int)luaL_optinteger(L, 2, (lua_Integer)1 << 30) - 1));
  return 0;
}

static int enter(lua_State *L) {
  orr_capture_enter(record_at(L, 1), (int)luaL_checkinteger(L, 2) - 1);
  return 0;
}

static int leave(lua_State *L) {
  (void)L;
  orr_capture_leave();
  return 0;
}

/* capture_same_form(a, b): shape, dtype, layout and part in the batch. */
static int same_form(lua_State *L) {
  const orr_tensor *a = orr_lua_check(L, 1), *b = orr_lua_check(L, 2);
  size_t dims = (size_t)a->meta.ndim * sizeof a->meta.shape[0];
  bool same = a->meta.dtype == b->meta.dtype && a->meta.ndim == b->meta.ndim &&
              memcmp(a->meta.shape, b->meta.shape, dims) == 0 &&
              orr_layout_equal(a->layout, b->layout) && a->is_batch == b->is_batch;
  lua_pushboolean(L, same);
  return 1;
}

static orr_status copy_call(orr_tensor *y, orr_tensor *t) {
  orr_tensor *in[2] = {y, t}, *out;
  bool was = orr_set_grad_mode(false);
  orr_status status = orr_dispatch(&orr_op_copy_, in, 2, NULL, true, &out);
  orr_set_grad_mode(was);
  if (!status) orr_tensor_free(out);
  return status;
}

static orr_status copy_shard(orr_tensor *y, orr_tensor *t, int rank) {
  orr_tensor *to, *from;
  ORR_TRY(orr_tensor_shard(y, rank, &to));
  orr_status status = orr_tensor_shard(t, rank, &from);
  if (!status) {
    status = copy_call(to, from);
    orr_tensor_free(from);
  }
  orr_tensor_free(to);
  return status;
}

/* Parts of a sum stay what they are, so that what is made of them is the same to the bit. */
static orr_status copy_into(orr_tensor *y, orr_tensor *t) {
  orr_status status = ORR_OK;
  if (!orr_layout_is_partial(t->layout)) return copy_call(y, t);
  for (int r = 0; r < t->n && !status; r++) status = copy_shard(y, t, r);
  return status;
}

/* capture_slot(t): a tensor of t's form, in memory of its own, with its values. */
static int slot(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *y;
  orr_lua_enter(L);
  orr_lua_try(L, orr_tensor_new(&t->meta, t->layout, t, &y));
  orr_status status = copy_into(y, t);
  if (status) orr_tensor_free(y);
  orr_lua_try(L, status);
  y->is_batch = t->is_batch;
  orr_lua_push(L, y);
  return 1;
}

/* capture_alias(slot): the same under another name. */
static int alias(lua_State *L) {
  orr_tensor *t = orr_lua_check(L, 1), *y;
  orr_lua_try(L, orr_tensor_alias(t, &y));
  y->is_batch = t->is_batch;
  y->is_view = false;
  orr_lua_push(L, y);
  return 1;
}

/* capture_fill(slot, t): the slot gets t's values. */
static int fill(lua_State *L) {
  orr_tensor *y = orr_lua_check(L, 1), *t = orr_lua_check(L, 2);
  orr_lua_enter(L);
  if (y->storage != t->storage) orr_lua_try(L, copy_into(y, t));
  return 0;
}

/* capture_modes(): a number that stays while the modes of ops stay; nil and the reason where
 * somebody wants to see each call. */
static int modes(lua_State *L) {
  const char *seen = orr_tracing()            ? "parallel.trace is on"
                     : orr_anomaly_watching() ? "orrery.anomaly is on"
                     : orr_recording()        ? "its calls are recorded for a plan"
                     : orr_holding()          ? "it runs within orrery.accumulate"
                     : orr_capturing() || orr_capture_in_part()
                         ? "it runs within another captured step"
                         : NULL;
  if (seen) {
    lua_pushnil(L);
    lua_pushstring(L, seen);
    return 2;
  }
  int n = 2 * (orr_autocast() + 1) + orr_grad_mode();
  n = 4 * n + 2 * orr_plugin_choice(ORR_DETERMINISTIC) + orr_plugin_choice(ORR_ALLOW_TF32);
  lua_pushinteger(L, n);
  return 1;
}

/* capture_graph_waits(t): whether t's gradient can still be asked for. */
static int graph_waits(lua_State *L) {
  const orr_tensor *t = orr_lua_check(L, 1);
  lua_pushboolean(L, t->node && !t->node->spent);
  return 1;
}

static void make_type(lua_State *L, const char *name, lua_CFunction collect) {
  luaL_newmetatable(L, name);
  lua_pushcfunction(L, collect);
  lua_setfield(L, -2, "__gc");
  lua_pop(L, 1);
}

int orr_lua_open_capture(lua_State *L) {
  static const luaL_Reg functions[] = {{"capture_pools", pools_new},
                                       {"capture_start", start},
                                       {"capture_stop", stop},
                                       {"capture_free", record_free},
                                       {"capture_differs", differs},
                                       {"capture_escaped", escaped},
                                       {"capture_made", made},
                                       {"capture_wrote", wrote},
                                       {"capture_forget", forget},
                                       {"capture_held", held},
                                       {"capture_host", host},
                                       {"capture_host_end", host_end},
                                       {"capture_prepare", prepare},
                                       {"capture_fits", fits},
                                       {"capture_begin", begin},
                                       {"capture_end", end},
                                       {"capture_replay", replay},
                                       {"capture_enter", enter},
                                       {"capture_leave", leave},
                                       {"capture_same_form", same_form},
                                       {"capture_slot", slot},
                                       {"capture_alias", alias},
                                       {"capture_fill", fill},
                                       {"capture_modes", modes},
                                       {"capture_graph_waits", graph_waits},
                                       {NULL, NULL}};
  make_type(L, POOLS, pools_free);
  make_type(L, RECORD, record_free);
  luaL_setfuncs(L, functions, 0);
  return 0;
}
