/* lua_plan.c: the table orrery.core.plan: plans as userdata.
 *
 * The constructors write the plan's text and parse it, so that text and constructors are one
 * language with one set of errors. Errors are raised without a position: the Lua side adds the
 * user's line.
 * Invariant: a userdata exists before the plan it will own, so a Lua error leaks nothing.
 * To add a method: a function here, its row in `methods`, its annotation above it.
 */
#include "lua_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lua_compat.h"
#include "orrery_int.h"

#define PLAN "orrery.plan"
#define PLACES "orrery.plan.places"

typedef struct plan_box {
  orr_plan *plan;
} plan_box;

typedef struct places_box {
  orr_plan_places *places;
} places_box;

/* Raises the last C error as it is. */
static int raise(lua_State *L) {
  lua_pushstring(L, orr_last_error());
  return lua_error(L);
}

const orr_plan *orr_lua_toplan(lua_State *L, int index) {
  plan_box *box = luaL_testudata(L, index, PLAN);
  return box ? box->plan : NULL;
}

static const orr_plan *check_plan(lua_State *L) {
  const orr_plan *plan = orr_lua_toplan(L, 1);
  if (!plan) luaL_argerror(L, 1, "a plan expected");
  return plan;
}

static int plan_gc(lua_State *L) {
  plan_box *box = lua_touserdata(L, 1);
  orr_plan_free(box->plan);
  box->plan = NULL;
  return 0;
}

static int places_gc(lua_State *L) {
  places_box *box = lua_touserdata(L, 1);
  orr_plan_places_free(box->places);
  box->places = NULL;
  return 0;
}

void orr_lua_pushplan(lua_State *L, const char *prefix, const char *text, size_t length) {
  plan_box *box = lua_newuserdata(L, sizeof *box);
  box->plan = NULL;
  luaL_setmetatable(L, PLAN);
  if (orr_plan_parse(prefix, text, length, &box->plan)) raise(L);
}

/* ---@param text string  a whole plan, or with `kind` only its "<...>"
 * ---@param kind? "data"|"model"|"tensor"
 * ---@return orrery.Plan; raises with the text and a caret under the column at fault */
static int plan_parse(lua_State *L) {
  size_t length;
  if (lua_type(L, 1) != LUA_TSTRING) {
    lua_pushfstring(L, "plan: expected a plan's text, got %s", luaL_typename(L, 1));
    return lua_error(L);
  }
  const char *text = lua_tolstring(L, 1, &length);
  orr_lua_pushplan(L, luaL_optstring(L, 2, NULL), text, length);
  return 1;
}

/* -- the constructors --------------------------------------------------------------------- */

/* Pops a string and appends it to the string below. */
static void append(lua_State *L) { lua_concat(L, 2); }

static void append_text(lua_State *L, const char *text) {
  lua_pushstring(L, text);
  append(L);
}

/* A bus id or UUID prefix, which the language wants in quotes. */
static bool wants_quotes(const char *text) {
  if (!strncmp(text, "GPU-", 4) || !strncmp(text, "MIG-", 4)) return true;
  return text[0] && strspn(text, "0123456789abcdefABCDEF:.") == strlen(text) &&
         strchr(text, ':') && strchr(text, '.') && !strstr(text, "..");
}

/* Pushes the text of child i: a device number, a device or plan in text, or a plan. */
static int push_child(lua_State *L, const char *kind, int index, int i) {
  const orr_plan *plan = orr_lua_toplan(L, index);
  if (plan) {
    lua_pushstring(L, plan->text);
  } else if (lua_type(L, index) == LUA_TSTRING) {
    const char *text = lua_tostring(L, index);
    if (wants_quotes(text)) lua_pushfstring(L, "\"%s\"", text);
    else lua_pushvalue(L, index);
  } else if (lua_isinteger(L, index) && lua_tonumber(L, index) >= 0 &&
             lua_tonumber(L, index) <= 65535) {
    lua_pushfstring(L, "%d", (int)lua_tointeger(L, index));
  } else if (lua_type(L, index) == LUA_TNUMBER) {
    lua_pushfstring(L, "plan: child %d of %s is %f; device numbers are integers from 0", i,
                    kind, lua_tonumber(L, index));
    return lua_error(L);
  } else {
    lua_pushfstring(L,
                    "plan: child %d of %s is a %s; expected a device number, a device name or "
                    "a plan",
                    i, kind, luaL_typename(L, index));
    return lua_error(L);
  }
  return 1;
}

/* Appends ": 3" or ": conv*" from options.layers[i] when there is one. */
static void append_layers(lua_State *L, int layers, int i) {
  if (!layers) return;
  lua_rawgeti(L, layers, i);
  if (lua_isnil(L, -1)) {
    lua_pop(L, 1);
  } else if (lua_isinteger(L, -1)) {
    lua_pushfstring(L, ": %d", (int)lua_tointeger(L, -1));
    lua_remove(L, -2);
    append(L);
  } else if (lua_type(L, -1) == LUA_TSTRING) {
    lua_pushfstring(L, ": \"%s\"", lua_tostring(L, -1));
    lua_remove(L, -2);
    append(L);
  } else {
    lua_pushfstring(L, "plan: layers[%d] is neither a count of layers nor a pattern", i);
    lua_error(L);
  }
}

/* Pushes the text of an option's value, at the top of the stack, in its place. */
static void value_text(lua_State *L, const char *name) {
  if (lua_isboolean(L, -1)) {
    lua_pushstring(L, lua_toboolean(L, -1) ? "true" : "false");
  } else if (lua_type(L, -1) == LUA_TNUMBER) {
    char digits[40];
    snprintf(digits, sizeof digits, "%.14g", (double)lua_tonumber(L, -1));
    if (lua_isinteger(L, -1)) {
      snprintf(digits, sizeof digits, "%lld", (long long)lua_tonumber(L, -1));
    }
    lua_pushstring(L, digits);
  } else if (lua_type(L, -1) == LUA_TSTRING) {
    /* a size such as 25MiB stays bare; other words may hold anything */
    const char *text = lua_tostring(L, -1);
    lua_pushfstring(L, text[0] >= '0' && text[0] <= '9' ? "%s" : "\"%s\"", text);
  } else {
    lua_pushfstring(L, "plan: option %s is a %s; expected a number, a string or a boolean",
                    name, luaL_typename(L, -1));
    lua_error(L);
  }
  lua_remove(L, -2);
}

/* Appends the options in the order of their table, then the first unknown one by name, which
 * the parser refuses with the list of legal ones. */
static void append_options(lua_State *L, int options, bool is_model) {
  const char *before = "; ", *unknown = NULL;
  for (lua_pushnil(L); lua_next(L, options); lua_pop(L, 1)) {
    bool known =
        is_model && lua_type(L, -2) == LUA_TSTRING && !strcmp(lua_tostring(L, -2), "layers");
    if (lua_type(L, -2) != LUA_TSTRING) {
      lua_pushstring(L, "plan: options are named, as in {micro = 4}");
      lua_error(L);
    }
    const char *name = lua_tostring(L, -2); /* the table keeps it alive */
    for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
      known = known || !strcmp(name, orr_plan_option_of((orr_plan_option)i)->name);
    }
    if (!known && (!unknown || strcmp(name, unknown) < 0)) unknown = name;
  }
  for (int i = 0; i <= ORR_PLAN_N_OPTIONS; i++) {
    bool last = i == ORR_PLAN_N_OPTIONS;
    const char *name = last ? unknown : orr_plan_option_of((orr_plan_option)i)->name;
    if (!name) return;
    lua_pushstring(L, name);
    lua_rawget(L, options);
    if (lua_isnil(L, -1)) {
      lua_pop(L, 1);
      continue;
    }
    value_text(L, name);
    lua_pushfstring(L, "%s%s=%s", before, name, lua_tostring(L, -1));
    lua_remove(L, -2);
    append(L);
    before = ", ";
  }
}

/* ---@param kind "data"|"model"|"tensor"
 * ---@param children (integer|string|orrery.Plan)[]
 * ---@param options? table  by name; model also takes layers = {3, 5} or {"conv*", "fc*"}
 * ---@return orrery.Plan; raises with the plan's text and a caret under the column at fault */
static int plan_make(lua_State *L) {
  const char *kind = luaL_checkstring(L, 1);
  bool is_model = !strcmp(kind, orr_plan_kind_name(ORR_PLAN_MODEL));
  luaL_checktype(L, 2, LUA_TTABLE);
  bool has_options = !lua_isnoneornil(L, 3);
  if (has_options) luaL_checktype(L, 3, LUA_TTABLE);
  lua_settop(L, 3);
  int layers = 0, n = (int)lua_rawlen(L, 2);
  if (has_options && is_model) {
    lua_getfield(L, 3, "layers");
    if (lua_istable(L, -1)) {
      layers = lua_gettop(L);
    } else if (!lua_isnil(L, -1)) {
      lua_pushstring(L, "plan: layers is a list with a count or a pattern a child");
      return lua_error(L);
    }
  }
  if (layers && (int)lua_rawlen(L, layers) != n) {
    lua_pushfstring(L, "plan: layers has %d entries, the model has %d children",
                    (int)lua_rawlen(L, layers), n);
    return lua_error(L);
  }
  lua_pushfstring(L, "%s<", kind);
  for (int i = 1; i <= n; i++) {
    if (i > 1) append_text(L, ", ");
    lua_rawgeti(L, 2, i);
    push_child(L, kind, lua_gettop(L), i);
    lua_remove(L, -2);
    append(L);
    append_layers(L, layers, i);
  }
  if (has_options) append_options(L, 3, is_model);
  append_text(L, ">");
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  orr_lua_pushplan(L, NULL, text, length);
  return 1;
}

/* -- methods ------------------------------------------------------------------------------ */

/* ---@return string  the canonical text; parses to an equal plan */
static int plan_text(lua_State *L) {
  lua_pushstring(L, check_plan(L)->text);
  return 1;
}

/* ---@return "data"|"model"|"tensor"  the outermost node */
static int plan_kind(lua_State *L) {
  lua_pushstring(L, orr_plan_kind_name(check_plan(L)->root->kind));
  return 1;
}

static int plan_eq(lua_State *L) {
  const orr_plan *a = orr_lua_toplan(L, 1), *b = orr_lua_toplan(L, 2);
  lua_pushboolean(L, a && b && !strcmp(a->text, b->text));
  return 1;
}

static void push_leaf(lua_State *L, const orr_plan_node *leaf) {
  char name[96];
  orr_plan_device_text(leaf, name, sizeof name);
  if (leaf->naming == ORR_PLAN_BUS) lua_pushstring(L, leaf->id);
  else lua_pushstring(L, name);
}

static int add_devices(lua_State *L, const orr_plan_node *node, int n) {
  if (node->kind == ORR_PLAN_DEVICE) {
    push_leaf(L, node);
    lua_rawseti(L, -2, ++n);
  }
  for (const orr_plan_node *c = node->first; c; c = c->next) n = add_devices(L, c, n);
  return n;
}

/* ---@return string[]  the devices as written, in tree order: "0", "cpu:1" */
static int plan_devices(lua_State *L) {
  const orr_plan *plan = check_plan(L);
  lua_createtable(L, plan->n_devices, 0);
  add_devices(L, plan->root, 0);
  return 1;
}

static void push_value(lua_State *L, orr_plan_option option, const orr_plan_value *value) {
  switch (orr_plan_option_of(option)->type) {
    case ORR_PLAN_INT:
    case ORR_PLAN_BYTES:
#if LUA_VERSION_NUM >= 503
      lua_pushinteger(L, (lua_Integer)value->number);
#else
      lua_pushnumber(L, (lua_Number)value->number);
#endif
      return;
    case ORR_PLAN_BOOL: lua_pushboolean(L, value->number != 0); return;
    case ORR_PLAN_WORD: lua_pushstring(L, value->text); return;
    case ORR_PLAN_PATTERN: break;
  }
  if (!strcmp(value->text, "true")) lua_pushboolean(L, 1);
  else if (!strcmp(value->text, "false")) lua_pushboolean(L, 0);
  else lua_pushstring(L, value->text);
}

static void push_options(lua_State *L, const orr_plan_value *options) {
  lua_newtable(L);
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    if (!options[i].set) continue;
    push_value(L, (orr_plan_option)i, &options[i]);
    lua_setfield(L, -2, orr_plan_option_of((orr_plan_option)i)->name);
  }
}

/* ---@return table  {data = {...}, model = {...}, tensor = {...}, micro = m}: the options set,
 * by axis (of the first stage that has it); micro-batches hold for the whole plan */
static int plan_options(lua_State *L) {
  const orr_plan *plan = check_plan(L);
  lua_newtable(L);
  push_options(L, plan->options);
  lua_setfield(L, -2, orr_plan_kind_name(ORR_PLAN_MODEL));
  for (int s = plan->n_stages - 1; s >= 0; s--) {
    for (int i = 0; i < plan->stage[s].n_axes; i++) {
      const orr_plan_axis *axis = &plan->stage[s].axis[i];
      push_options(L, axis->options);
      lua_setfield(L, -2, orr_plan_kind_name(axis->kind));
    }
  }
  if (plan->options[ORR_PLAN_MICRO].set) {
    push_value(L, ORR_PLAN_MICRO, &plan->options[ORR_PLAN_MICRO]);
    lua_setfield(L, -2, orr_plan_option_of(ORR_PLAN_MICRO)->name);
  }
  return 1;
}

/* Pushes {axes = ..., devices = ..., count = ..., pattern = ...}; places name devices. */
static void push_stage(lua_State *L, const orr_plan_stage *stage, const orr_plan_place *place) {
  lua_newtable(L);
  lua_createtable(L, stage->n_axes, 0);
  for (int i = 0; i < stage->n_axes; i++) {
    lua_newtable(L);
    lua_pushstring(L, orr_plan_kind_name(stage->axis[i].kind));
    lua_setfield(L, -2, "name");
    lua_pushinteger(L, stage->axis[i].size);
    lua_setfield(L, -2, "size");
    push_options(L, stage->axis[i].options);
    lua_setfield(L, -2, "options");
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "axes");
  lua_createtable(L, stage->n_devices, 0);
  for (int i = 0; i < stage->n_devices; i++) {
    if (place) lua_pushfstring(L, "%s:%d", place[i].kind, place[i].id);
    else push_leaf(L, stage->leaf[i]);
    lua_rawseti(L, -2, i + 1);
  }
  lua_setfield(L, -2, "devices");
  if (stage->count) {
    lua_pushinteger(L, (lua_Integer)stage->count);
    lua_setfield(L, -2, "count");
  }
  if (stage->pattern) {
    lua_pushstring(L, stage->pattern);
    lua_setfield(L, -2, "pattern");
  }
}

/* ---@return table[]  a stage each: {axes = {{name = "data", size = 2, options = {}}, ...},
 * devices = {"0", "1"}, count = layers or nil, pattern = string or nil}; devices row-major */
static int plan_stages(lua_State *L) {
  const orr_plan *plan = check_plan(L);
  lua_createtable(L, plan->n_stages, 0);
  for (int s = 0; s < plan->n_stages; s++) {
    push_stage(L, &plan->stage[s], NULL);
    lua_rawseti(L, -2, s + 1);
  }
  return 1;
}

static int env_count(lua_State *L, const char *field) {
  lua_getfield(L, 2, field);
  int n = (int)lua_tointeger(L, -1);
  lua_pop(L, 1);
  return n;
}

/* ---@param env {cpu: integer, cuda: integer, cpu_why: string?, cuda_why: string?}
 * ---@return table[]  as stages(), with devices "cpu:0"; raises when a device is not visible */
static int plan_resolve(lua_State *L) {
  const orr_plan *plan = check_plan(L);
  luaL_checktype(L, 2, LUA_TTABLE);
  lua_settop(L, 2);
  orr_plan_env env = {
      .n_cpu = env_count(L, "cpu"), .n_cuda = env_count(L, "cuda"), .find = orr_cuda_find};
  lua_getfield(L, 2, "cpu_why");
  lua_getfield(L, 2, "cuda_why");
  env.cpu_why = lua_tostring(L, 3);
  env.cuda_why = lua_tostring(L, 4);
  places_box *box = lua_newuserdata(L, sizeof *box);
  box->places = NULL;
  luaL_setmetatable(L, PLACES);
  if (orr_plan_resolve(plan, &env, &box->places)) return raise(L);
  lua_createtable(L, plan->n_stages, 0);
  for (int s = 0; s < plan->n_stages; s++) {
    push_stage(L, &plan->stage[s], box->places->place + box->places->first[s]);
    lua_rawseti(L, -2, s + 1);
  }
  return 1;
}

int orr_lua_open_plan(lua_State *L) {
  static const luaL_Reg methods[] = {{"text", plan_text},       {"kind", plan_kind},
                                     {"devices", plan_devices}, {"stages", plan_stages},
                                     {"options", plan_options}, {"resolve", plan_resolve},
                                     {"__tostring", plan_text}, {"__eq", plan_eq},
                                     {"__gc", plan_gc},         {NULL, NULL}};
  static const luaL_Reg functions[] = {
      {"parse", plan_parse}, {"make", plan_make}, {NULL, NULL}};
  luaL_newmetatable(L, PLACES);
  lua_pushcfunction(L, places_gc);
  lua_setfield(L, -2, "__gc");
  luaL_newmetatable(L, PLAN);
  luaL_setfuncs(L, methods, 0);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 2);
  luaL_newlib(L, functions);
  lua_pushstring(L, PLAN);
  lua_setfield(L, -2, "metatable_name");
  return 1;
}
