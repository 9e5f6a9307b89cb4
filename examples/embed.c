/* embed.c: a C host that embeds Lua and Orrery, trains in a Lua chunk, and goes on in C.
 *
 *   LUA_PATH='/usr/local/share/lua/5.1/?.lua;/usr/local/share/lua/5.1/?/init.lua' \
 *     build/luajit/examples/embed [plan]      (made by `make examples`; plan: "data<0,1>")
 *
 * The host hands its arrays to Lua as tensors, the chunk trains under the plan and returns the
 * loss, the weight and the bias, and the host reads those and classifies by plain C.
 */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>

#include "orrery.h"

enum { N = 201, FEATURES = 3, CLASSES = 4 };

static const char *const chunk =
    "local x, y, text = ...\n"
    "local orrery = require 'orrery'\n"
    "local nn, optim = orrery.nn, orrery.optim\n"
    "orrery.manual_seed(1)\n"
    "local plan = orrery.parallel(text)\n"
    "local net = plan(nn.Linear(x:size(2), 4))\n"
    "local opt = optim.Adam(net:parameters(), { lr = 0.05 })\n"
    "local loss\n"
    "for _ = 1, 200 do\n"
    "  opt:zero_grad()\n"
    "  loss = nn.cross_entropy(net(x), y)\n"
    "  loss:backward()\n"
    "  opt:step()\n"
    "end\n"
    "return loss:item(), net.weight, net.bias\n";

/* The first failure ends the program, in words. */
static void fail(const char *words) {
  fprintf(stderr, "embed: %s\n", words);
  exit(1);
}

static void must(orr_status status) {
  if (status) fail(orrery_last_error());
}

/* Points, and the index from 1 of the largest of four fixed linear functions of each. */
static void measure(float (*x)[FEATURES], int64_t *label) {
  static const float slope[CLASSES][FEATURES] = {{1, 2, 0}, {-2, 1, 1}, {0, -2, 1}, {1, 0, -2}};
  uint64_t state = 1;
  for (int n = 0; n < N; n++) {
    float best = -1e9f;
    for (int f = 0; f < FEATURES; f++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x[n][f] = (float)(state >> 33) / (float)(1u << 30) - 1;
    }
    for (int c = 0; c < CLASSES; c++) {
      float sum = 0;
      for (int f = 0; f < FEATURES; f++) sum += slope[c][f] * x[n][f];
      if (sum > best) {
        best = sum;
        label[n] = c + 1;
      }
    }
  }
}

/* A host array becomes the Lua value on top of the stack. */
static void push(lua_State *L, const char *dtype, int ndim, const int64_t *shape,
                 const void *data) {
  orr_tensor *t;
  must(orrery_tensor(dtype, ndim, shape, data, &t));
  orrery_lua_push(L, t); /* Lua owns it from here */
}

/* The chunk's result at `index`, from the devices into a C array. */
static void pull(lua_State *L, int index, float *data, size_t bytes) {
  orr_tensor *t = orrery_lua_tensor(L, index);
  if (!t) fail("the chunk did not return a tensor");
  must(orrery_read(t, data, bytes));
}

static int correct(float (*x)[FEATURES], const int64_t *label, float (*weight)[FEATURES],
                   const float *bias) {
  int right = 0;
  for (int n = 0; n < N; n++) {
    int best = 0;
    float most = -1e9f;
    for (int c = 0; c < CLASSES; c++) {
      float sum = bias[c];
      for (int f = 0; f < FEATURES; f++) sum += weight[c][f] * x[n][f];
      if (sum > most) {
        most = sum;
        best = c + 1;
      }
    }
    right += best == label[n];
  }
  return right;
}

int main(int argc, char **argv) {
  static float x[N][FEATURES], weight[CLASSES][FEATURES], bias[CLASSES];
  static int64_t label[N];
  int64_t shape[2] = {N, FEATURES};
  const char *plan = argc > 1 ? argv[1] : "data<0,1>";
  measure(x, label);

  lua_State *L = luaL_newstate();
  if (!L) fail("no memory for Lua");
  luaL_openlibs(L);
  lua_getglobal(L, "package");
  lua_getfield(L, -1, "preload");
  lua_pushcfunction(L, luaopen_orrery_core);
  lua_setfield(L, -2, "orrery.core");
  lua_settop(L, 0);

  /* The module first: it knows tensors before they are pushed. */
  lua_getglobal(L, "require");
  lua_pushstring(L, "orrery.core");
  if (lua_pcall(L, 1, 0, 0)) fail(lua_tostring(L, -1));

  if (luaL_loadstring(L, chunk)) fail(lua_tostring(L, -1));
  push(L, "f32", 2, shape, x);
  push(L, "i64", 1, shape, label);
  lua_pushstring(L, plan);
  if (lua_pcall(L, 3, 3, 0)) fail(lua_tostring(L, -1));
  pull(L, 2, weight[0], sizeof weight);
  pull(L, 3, bias, sizeof bias);
  printf("trained under %s: loss %.6f, %d of %d right in C\n", plan, lua_tonumber(L, 1),
         correct(x, label, weight, bias), N);
  lua_close(L);
  return 0;
}
