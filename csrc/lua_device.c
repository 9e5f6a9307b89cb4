/* lua_device.c: devices, their memory, waiting, threads; profile, timeline and anomaly mode.
 *
 * Invariant: what is reported is read from the engine when asked, never kept.
 * To add a function: its row in `functions`.
 */
#include <stdio.h>
#include <string.h>

#include "lua_core.h"
#include "plugin.h"
#include "timeline.h"

static void set_number(lua_State *L, const char *key, double value) {
  lua_pushnumber(L, value);
  lua_setfield(L, -2, key);
}

static void set_string(lua_State *L, const char *key, const char *value) {
  lua_pushstring(L, value);
  lua_setfield(L, -2, key);
}

/* Bytes that it has, and that are left. */
static void memory_of(const orr_device *d, double *total, double *left) {
  *total = d->limit ? (double)d->limit : (double)orr_host_memory(false);
  *left = d->limit ? (double)d->limit - (double)d->live : (double)orr_host_memory(true);
  if (d->kind != ORR_DEVICE_CUDA) return;
  *total = d->limit ? (double)d->limit : (double)orr_cuda_info(d->id)->total;
  *left = d->limit ? (double)d->limit - (double)d->live : (double)orr_cuda_free(d);
}

static void push_device(lua_State *L, const orr_device *d) {
  double total, left;
  memory_of(d, &total, &left);
  lua_newtable(L);
  set_number(L, "id", d->id);
  set_string(L, "name", d->name);
  set_string(L, "kind", d->kind == ORR_DEVICE_CUDA ? "cuda" : "cpu");
  set_string(L, "model", d->model);
  if (d->limit) set_number(L, "limit", (double)d->limit);
  set_number(L, "total", total);
  set_number(L, "free", left);
  if (d->kind == ORR_DEVICE_CUDA) {
    const orr_device_info *info = orr_cuda_info(d->id);
    set_string(L, "bus_id", info->bus_id);
    set_string(L, "uuid", info->uuid);
    if (info->smi_index >= 0) set_number(L, "smi_index", info->smi_index);
    set_number(L, "gpu", info->gpu);
    set_number(L, "capability", info->capability / 10.0);
  } else {
    set_number(L, "threads", d->threads);
  }
}

/* CUDA devices first, then CPUs: row k + 1 is what the bare number k names. */
static int devices(lua_State *L) {
  char name[32];
  int n = orr_device_cudas(), cpus = orr_device_cpus();
  lua_newtable(L);
  for (int k = 0; k < n + cpus; k++) {
    orr_device *d;
    snprintf(name, sizeof name, k < n ? "cuda:%d" : "cpu:%d", k < n ? k : k - n);
    orr_lua_try(L, orr_device_find(name, &d));
    push_device(L, d);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* -> {cpu = 2, cuda = 0, cuda_why = "no NVIDIA driver is installed"}; why there are no more */
static int visible(lua_State *L) {
  int n = orr_device_cudas();
  lua_newtable(L);
  set_number(L, "cpu", orr_device_cpus());
  set_number(L, "cuda", n);
  if (*orr_cuda_why()) set_string(L, "cuda_why", orr_cuda_why());
  return 1;
}

/* link(a, b, measure): how cuda:a reaches cuda:b's memory. */
static int link_between(lua_State *L) {
  static const char *const kind[] = {"same", "nvlink", "pcie", "host"};
  int a = (int)luaL_checkinteger(L, 1), b = (int)luaL_checkinteger(L, 2),
      n = orr_device_cudas();
  orr_link link;
  if (a < 0 || b < 0 || a >= n || b >= n)
    return orr_lua_error(L, "link(%d, %d): %d CUDA devices are visible", a, b, n);
  orr_lua_try(L, orr_plugin_now()->link(a, b, lua_toboolean(L, 3), &link));
  lua_newtable(L);
  set_string(L, "kind", kind[link.kind]);
  set_number(L, "links", link.links);
  if (link.bytes_a_second > 0) set_number(L, "bytes_a_second", link.bytes_a_second);
  return 1;
}

/* attention_way(k): how attention of the halves runs on cuda:k; "": none has run. */
static int attention_way(lua_State *L) {
  int k = (int)luaL_checkinteger(L, 1);
  char text[1600] = "";
  if (k < 0 || k >= orr_device_cudas())
    return orr_lua_error(L, "attention_way(%d): %d CUDA devices are visible", k,
                         orr_device_cudas());
  orr_plugin_now()->attention(k, text, sizeof text);
  lua_pushstring(L, text);
  return 1;
}

static int synchronize(lua_State *L) {
  orr_lua_enter(L);
  orr_lua_try(L, orr_synchronize(orr_lua_device(L, 1)));
  return 0;
}

static int memory(lua_State *L) {
  const orr_device *one = orr_lua_device(L, 1);
  double live = 0, peak = 0, cached = 0;
  for (int k = 0; k < orr_device_count(); k++) {
    const orr_device *d = orr_device_at(k);
    if ((one && d != one) || (!one && d->kind == ORR_DEVICE_META)) continue;
    live += (double)d->live;
    peak += (double)d->peak;
    cached += (double)d->cached;
  }
  lua_newtable(L);
  set_number(L, "live", live);
  set_number(L, "peak", peak);
  set_number(L, "cached", cached);
  return 1;
}

static int reset_peak(lua_State *L) {
  orr_device *one = orr_lua_device(L, 1);
  for (int k = 0; k < orr_device_count(); k++)
    if (!one || orr_device_at(k) == one) orr_reset_peak(orr_device_at(k));
  return 0;
}

static int empty_cache(lua_State *L) {
  orr_lua_enter(L);
  lua_gc(L, LUA_GCCOLLECT, 0);
  lua_pushnumber(L, (lua_Number)orr_empty_cache(orr_lua_device(L, 1)));
  return 1;
}

/* set_memory_limit(device, bytes): nil bytes: none. */
static int set_memory_limit(lua_State *L) {
  orr_device *d = orr_lua_device(L, 1);
  double bytes = luaL_optnumber(L, 2, 0);
  if (!d || bytes < 0) return orr_lua_error(L, "set_memory_limit(device, bytes)");
  orr_set_memory_limit(d, (size_t)bytes);
  return 0;
}

static int set_threads(lua_State *L) {
  orr_lua_try(L, orr_set_threads((int)luaL_checkinteger(L, 1)));
  return 0;
}

/* deterministic(on or nil), allow_tf32(on or nil) give what was. */
static int choose(lua_State *L, orr_choice c) {
  bool was = orr_plugin_choice(c);
  if (!lua_isnoneornil(L, 1)) {
    luaL_checktype(L, 1, LUA_TBOOLEAN);
    orr_plugin_choose(c, lua_toboolean(L, 1));
  }
  lua_pushboolean(L, was);
  return 1;
}
static int deterministic(lua_State *L) { return choose(L, ORR_DETERMINISTIC); }
static int allow_tf32(lua_State *L) { return choose(L, ORR_ALLOW_TF32); }

static int fail_allocation(lua_State *L) {
  orr_alloc_fail_after((int64_t)luaL_checknumber(L, 1));
  return 0;
}

static int anomaly(lua_State *L) {
  orr_anomaly(lua_toboolean(L, 1));
  return 0;
}

static int profile_start(lua_State *L) {
  (void)L;
  orr_profile_start();
  return 0;
}

static int profile_stop(lua_State *L) {
  orr_lua_enter(L);
  const orr_profile_row *rows;
  orr_status status = orr_synchronize(NULL);
  int n = orr_profile_stop(&rows);
  orr_lua_try(L, status);
  lua_createtable(L, n, 0);
  for (int k = 0; k < n; k++) {
    lua_newtable(L);
    set_string(L, "op", rows[k].name);
    set_number(L, "calls", (double)rows[k].calls);
    set_number(L, "time", rows[k].seconds);
    set_number(L, "bytes", (double)rows[k].bytes);
    lua_rawseti(L, -2, k + 1);
  }
  return 1;
}

/* ---- the timeline ---- */

static const orr_timeline_event *events;
static int64_t n_events;

static int timeline_start(lua_State *L) {
  (void)L;
  n_events = 0;
  orr_timeline_start();
  return 0;
}

/* timeline_stop(): events kept, and those for which there was no memory. */
static int timeline_stop(lua_State *L) {
  int64_t lost;
  orr_status status = orr_synchronize(NULL);
  n_events = orr_timeline_stop(&events, &lost);
  orr_lua_try(L, status);
  lua_pushnumber(L, (lua_Number)n_events);
  lua_pushnumber(L, (lua_Number)lost);
  return 2;
}

/* timeline_event(k): name, device, its place in the device table, whether on its communication
 * queue, start and end in seconds, stage, micro-batch (0: not said), whether in backward. */
static int timeline_event(lua_State *L) {
  int64_t k = (int64_t)luaL_checknumber(L, 1);
  if (k < 1 || k > n_events) return 0;
  const orr_timeline_event *e = &events[k - 1];
  lua_pushstring(L, e->name);
  lua_pushstring(L, e->device->name);
  lua_pushinteger(L, e->device->index);
  lua_pushboolean(L, e->use_comm);
  lua_pushnumber(L, e->start);
  lua_pushnumber(L, e->end);
  lua_pushinteger(L, e->mark.stage);
  lua_pushinteger(L, e->mark.micro);
  lua_pushboolean(L, e->mark.backward);
  return 9;
}

/* mark(stage, micro, backward): where in a step what is issued from now on belongs; mark():
 * nowhere. */
static int mark(lua_State *L) {
  orr_mark m = {(int)luaL_optinteger(L, 1, 0), (int)luaL_optinteger(L, 2, 0),
                lua_toboolean(L, 3)};
  orr_timeline_mark(&m);
  return 0;
}

/* ---- scopes: the names of the modules being called ---- */

enum { MAX_DEPTH = 64, MAX_NAME = 48 };
static char scope_name[MAX_DEPTH][MAX_NAME];
static int depth = 0;
static char joined[MAX_DEPTH * 8];

static const char *scope(void) {
  size_t used = 0;
  joined[0] = 0;
  for (int k = 0; k < depth && k < MAX_DEPTH && used + MAX_NAME + 2 < sizeof joined; k++) {
    if (!scope_name[k][0]) continue;
    if (used) joined[used++] = '.';
    size_t n = strlen(scope_name[k]);
    memcpy(joined + used, scope_name[k], n + 1);
    used += n;
  }
  return joined;
}

static int push_scope(lua_State *L) {
  if (depth < MAX_DEPTH) {
    const char *name = luaL_optstring(L, 1, "");
    strncpy(scope_name[depth], name, MAX_NAME - 1);
    scope_name[depth][MAX_NAME - 1] = 0;
  }
  depth++;
  return 0;
}

static int pop_scope(lua_State *L) {
  (void)L;
  if (depth > 0) depth--;
  return 0;
}

static int reset_scope(lua_State *L) {
  (void)L;
  depth = 0;
  return 0;
}

static int scopes_on(lua_State *L) {
  lua_pushboolean(L, orr_anomaly_watching());
  return 1;
}

int orr_lua_open_device(lua_State *L) {
  static const luaL_Reg functions[] = {{"devices", devices},
                                       {"visible", visible},
                                       {"link", link_between},
                                       {"attention_way", attention_way},
                                       {"synchronize", synchronize},
                                       {"memory", memory},
                                       {"reset_peak", reset_peak},
                                       {"empty_cache", empty_cache},
                                       {"set_memory_limit", set_memory_limit},
                                       {"set_threads", set_threads},
                                       {"deterministic", deterministic},
                                       {"allow_tf32", allow_tf32},
                                       {"fail_allocation", fail_allocation},
                                       {"anomaly", anomaly},
                                       {"profile_start", profile_start},
                                       {"profile_stop", profile_stop},
                                       {"timeline_start", timeline_start},
                                       {"timeline_stop", timeline_stop},
                                       {"timeline_event", timeline_event},
                                       {"mark", mark},
                                       {"push_scope", push_scope},
                                       {"pop_scope", pop_scope},
                                       {"reset_scope", reset_scope},
                                       {"scopes_on", scopes_on},
                                       {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  orr_scope_hook = scope;
  return 0;
}
