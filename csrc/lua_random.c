/* lua_random.c: rand, randn, randint, bernoulli, randperm, permutation; the seed, the streams
 * and the state.
 *
 * Invariant: a creator counts one draw of the stream in use; permutation counts none. The state
 * is one plain table, which a checkpoint holds as it is.
 * To add a creator: its numbers into args, then `create`.
 */
#include <math.h>
#include <string.h>

#include "lua_core.h"
#include "op_random.h"
#include "random_state.h"

/* Seeds and counters are whole numbers that every Lua holds exactly. */
static uint64_t check_count(lua_State *L, int index, const char *what) {
  double v = lua_tonumber(L, index);
  if (lua_type(L, index) != LUA_TNUMBER || v != floor(v) || v < 0 || v > 9007199254740992.0)
    orr_lua_error(L, "%s must be a whole number from 0 to 2^53", what);
  return (uint64_t)v;
}

static int create(lua_State *L, const orr_op *op, int first, orr_dtype dtype, orr_args *args) {
  orr_lua_options o;
  orr_tensor *t;
  orr_lua_create_options(L, first, dtype, &o);
  if (op != &orr_op_randint && op != &orr_op_bernoulli && !orr_dtype_is_float(o.meta.dtype))
    return orr_lua_error(L, "%s: needs a floating-point dtype, not %s", op->name,
                         orr_dtype_name(o.meta.dtype));
  orr_random_next(orr_random_used(), args);
  orr_lua_try(L, orr_create(op, &o.meta, o.layout, args, &t));
  orr_lua_push_new(L, t, &o);
  return 1;
}

/* rand(sizes..., options): uniform in [0, 1). */
static int random_uniform(lua_State *L) {
  orr_args args = {.f = {0, 1}};
  return create(L, &orr_op_uniform, 1, ORR_F32, &args);
}

/* randn(sizes..., options): normal, mean 0, deviation 1. */
static int random_normal(lua_State *L) {
  orr_args args = {.f = {0, 1}};
  return create(L, &orr_op_normal, 1, ORR_F32, &args);
}

static int64_t check_whole(lua_State *L, int index) {
  double v = luaL_checknumber(L, index);
  if (v != floor(v) || fabs(v) > 9007199254740992.0)
    orr_lua_error(L, "randint: an end must be a whole number");
  return (int64_t)v;
}

/* randint(lo, hi, sizes..., options): both ends are drawn, as by math.random. */
static int random_integer(lua_State *L) {
  orr_args args = {.i = {0}};
  args.i[4] = check_whole(L, 1);
  args.i[5] = check_whole(L, 2);
  if (args.i[4] > args.i[5]) return orr_lua_error(L, "randint: the range is empty");
  return create(L, &orr_op_randint, 3, ORR_I64, &args);
}

/* bernoulli(p, sizes..., options): 1 with probability p, else 0. */
static int random_bernoulli(lua_State *L) {
  orr_args args = {.f = {luaL_checknumber(L, 1)}};
  if (!(args.f[0] >= 0 && args.f[0] <= 1))
    return orr_lua_error(L, "bernoulli: the probability must be within 0 and 1");
  return create(L, &orr_op_bernoulli, 2, ORR_F32, &args);
}

static int push_permutation(lua_State *L, const orr_random_key *key, uint64_t n) {
  orr_tensor *t = NULL;
  orr_lua_enter(L);
  orr_lua_try(L, orr_random_permutation(key, (int64_t)n, &t));
  orr_lua_push(L, t);
  return 1;
}

/* randperm(n): 1..n in random order, i64. */
static int randperm(lua_State *L) {
  orr_lua_enter(L);
  orr_args args = {.i = {0}};
  uint64_t n = check_count(L, 1, "the count");
  orr_random_next(orr_random_used(), &args);
  orr_random_key key = orr_random_key_of(&args);
  return push_permutation(L, &key, n);
}

/* permutation(n, seed, epoch): a function of its arguments alone. */
static int permutation(lua_State *L) {
  orr_lua_enter(L);
  uint64_t n = check_count(L, 1, "the count");
  orr_random_key key = {.seed = check_count(L, 2, "the seed"),
                        .stream = ORR_STREAM_LOADER,
                        .step = check_count(L, 3, "the epoch"),
                        .call = UINT64_MAX}; /* no draw of the loader counts that far */
  return push_permutation(L, &key, n);
}

static int manual_seed(lua_State *L) {
  orr_random_seed(check_count(L, 1, "the seed"));
  return 0;
}

static int seed(lua_State *L) {
  lua_pushnumber(L, (lua_Number)orr_random_get().seed);
  return 1;
}

static orr_random_stream check_stream(lua_State *L, int index) {
  const char *name = luaL_checkstring(L, index);
  for (int k = 0; k < ORR_N_STREAMS; k++)
    if (strcmp(name, orr_random_stream_names[k]) == 0) return (orr_random_stream)k;
  orr_lua_error(L, "no random stream '%s'; there are user, init, dropout and loader", name);
  return ORR_STREAM_USER;
}

/* random_stream(name, fn, ...): fn(...) with rand and its like drawing from that stream. */
static int random_stream(lua_State *L) {
  orr_random_stream stream = check_stream(L, 1);
  luaL_checktype(L, 2, LUA_TFUNCTION);
  orr_random_stream was = orr_random_use(stream);
  int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
  orr_random_use(was);
  return status ? lua_error(L) : lua_gettop(L) - 1;
}

static void set_count(lua_State *L, const char *name, uint64_t value) {
  lua_pushnumber(L, (lua_Number)value);
  lua_setfield(L, -2, name);
}

/* random_state(): {seed=, user={step=, call=}, init=..., dropout=..., loader=...} */
static int random_state(lua_State *L) {
  orr_random_state s = orr_random_get();
  lua_newtable(L);
  set_count(L, "seed", s.seed);
  for (int k = 0; k < ORR_N_STREAMS; k++) {
    lua_newtable(L);
    set_count(L, "step", s.stream[k].step);
    set_count(L, "call", s.stream[k].call);
    lua_setfield(L, -2, orr_random_stream_names[k]);
  }
  return 1;
}

static uint64_t get_count(lua_State *L, const char *name) {
  lua_getfield(L, -1, name);
  uint64_t value = check_count(L, -1, name);
  lua_pop(L, 1);
  return value;
}

/* set_random_state(state): all is read before anything is set. */
static int set_random_state(lua_State *L) {
  orr_random_state s;
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  s.seed = get_count(L, "seed");
  for (int k = 0; k < ORR_N_STREAMS; k++) {
    lua_getfield(L, 1, orr_random_stream_names[k]);
    if (!lua_istable(L, -1))
      return orr_lua_error(L, "the random state lacks the stream %s",
                           orr_random_stream_names[k]);
    s.stream[k].step = get_count(L, "step");
    s.stream[k].call = get_count(L, "call");
    lua_pop(L, 1);
  }
  orr_random_set(&s);
  return 0;
}

int orr_lua_open_random(lua_State *L) {
  static const luaL_Reg functions[] = {{"rand", random_uniform},
                                       {"randn", random_normal},
                                       {"randint", random_integer},
                                       {"bernoulli", random_bernoulli},
                                       {"randperm", randperm},
                                       {"permutation", permutation},
                                       {"manual_seed", manual_seed},
                                       {"seed", seed},
                                       {"random_stream", random_stream},
                                       {"random_state", random_state},
                                       {"set_random_state", set_random_state},
                                       {NULL, NULL}};
  luaL_setfuncs(L, functions, 0);
  return 0;
}
