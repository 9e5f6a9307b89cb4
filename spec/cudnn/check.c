/* check.c: does the true cuDNN take the graphs of csrc/cuda_dnn_*.c, for GPUs that are not
 * here?
 * For every GPU of `gpus` each convolution and attention of the tables is made, asked of the
 * heuristics and planned, as on a device. One that is refused against the table is a failure.
 * To add a GPU: its row in `gpus`, of its cudaDeviceProp. A case: a row of its table.
 */
#include <stdio.h>
#include <string.h>

#include "cuda_dnn.h"

/* What the linked files ask of the plug-in when something fails. */
static orr_status fail(orr_status status, const char *format, ...) {
  fprintf(stderr, "%s\n", format);
  return status;
}
static const orr_host host = {.fail = fail};
const orr_host *orr_cuda_host = &host;
orr_status orr_cuda_library(orr_cuda_gpu *gpu, const char *library, const char *words) {
  (void)gpu;
  fprintf(stderr, "%s: %s\n", library, words);
  return ORR_EDEVICE;
}

static const struct gpu {
  const char *name;
  int capability, processors, shared, l2;
} gpus[] = {{"A100", 800, 108, 166912, 41943040},
            {"H200", 900, 132, 232448, 62914560},
            {"B200", 1000, 148, 232448, 132644864}};

static int n_asked, n_wrong;

static bool describe(const struct gpu *gpu, orr_dnn_part *out) {
  char text[1200];
  int n = snprintf(
      text, sizeof text,
      "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
      "\"regsPerBlock\":65536,\"multiProcessorCount\":%d,\"warpSize\":32,"
      "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,"
      "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,"
      "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,"
      "\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":85899345920,"
      "\"smClockRateKHz\":1410000,\"memClockRateKHz\":1593000,\"l2CacheSize\":%d,"
      "\"cudaDeviceId\":0,\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":13000}",
      gpu->processors, gpu->shared, gpu->l2, gpu->name, gpu->capability);
  return !cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, out) &&
         !cudnnBackendSetAttribute(*out, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                   CUDNN_TYPE_CHAR, n, text) &&
         !cudnnBackendFinalize(*out);
}

/* must: it must be taken; least: the room it must then ask for. */
static void ask(const orr_dnn_target *target, const orr_dnn_demand *demand,
                orr_dnn_plan *take_plan, bool must, int64_t least, const char *what) {
  cudnnStatus_t made = take_plan->status;
  cudnnStatus_t status = orr_dnn_choose(take_plan, target, demand);
  bool taken = take_plan->engine != NULL;
  bool right = !made && !status && (taken ? take_plan->room >= least : !must);
  n_asked++;
  n_wrong += !right;
  printf("%s %s: ", right ? "ok  " : "FAIL", what);
  if (made || status) printf("%s\n", cudnnGetErrorString(made ? made : status));
  else if (taken) printf("room %lld\n", (long long)take_plan->room);
  else printf("refused\n");
  orr_dnn_clear(take_plan);
}

/* ---- convolutions ---- */

static const struct conv {
  int64_t n, in, out, size, kernel, stride, padding, dilation, groups;
} convs[] = {{8, 64, 128, 28, 3, 1, 1, 1, 1}, {8, 3, 64, 224, 7, 2, 3, 1, 1},
             {32, 1, 6, 28, 5, 1, 0, 1, 1},   {4, 256, 512, 14, 1, 2, 0, 1, 1},
             {4, 64, 64, 28, 3, 1, 2, 2, 1},  {4, 32, 32, 28, 3, 1, 1, 1, 32}};

static void ask_conv(const orr_dnn_target *target, const char *gpu, const struct conv *s,
                     orr_cuda_conv c) {
  static const char *const kinds[] = {"forward", "data", "weights"};
  orr_dnn_plan plan = {.status = CUDNN_STATUS_SUCCESS};
  int64_t made = (s->size + 2 * s->padding - (s->kernel - 1) * s->dilation - 1) / s->stride + 1;
  char what[200];
  const int64_t x[4] = {s->n, s->in, s->size, s->size}, y[4] = {s->n, s->out, made, made};
  const int64_t w[4] = {s->out, s->in / s->groups, s->kernel, s->kernel};
  memcpy(c.x, x, sizeof x), memcpy(c.w, w, sizeof w), memcpy(c.y, y, sizeof y);
  for (int k = 0; k < 2; k++)
    c.stride[k] = s->stride, c.padding[k] = s->padding, c.dilation[k] = s->dilation;
  snprintf(what, sizeof what,
           "%s convolution %s, %lld to %lld channels, kernel %lld, groups %lld, dtype %d%s%s",
           gpu, kinds[c.kind], (long long)s->in, (long long)s->out, (long long)s->kernel,
           (long long)s->groups, (int)c.dtype, c.channels_last ? ", channels last" : "",
           c.deterministic ? ", deterministic" : "");
  orr_dnn_conv_graph(&plan, &c);
  const orr_dnn_demand demand = orr_dnn_conv_demand(&c);
  ask(target, &demand, &plan, s->groups == 1, 0, what);
}

static void ask_convs(const orr_dnn_target *target, const char *gpu) {
  static const int32_t dtypes[] = {ORR_F32, ORR_F16, ORR_BF16};
  for (size_t k = 0; k < sizeof convs / sizeof *convs; k++)
    for (int kind = 0; kind < 3; kind++)
      for (int way = 0; way < 12; way++) {
        orr_cuda_conv c;
        memset(&c, 0, sizeof c);
        c.kind = kind;
        c.dtype = dtypes[way / 4];
        c.channels_last = way / 2 % 2;
        c.deterministic = way % 2;
        ask_conv(target, gpu, &convs[k], c);
      }
}

/* ---- attention ---- */

static const struct attention {
  int64_t n, h, queries, keys, d;
  int widest; /* capability / 100 that must take it backward too; 0: every one */
} attentions[] = {{4, 12, 1024, 1024, 64, 0}, {2, 3, 200, 200, 128, 0},
                  {1, 2, 72, 72, 64, 0},      {1, 2, 72, 100, 40, 0},
                  {2, 2, 1, 77, 64, 0},       {2, 2, 256, 256, 256, 9},
                  {2, 2, 64, 64, 8, 0}};

/* Views of a (N, T, 3, H, D) buffer, or of (N, T, H, D). */
static void lay(int64_t *stride, const struct attention *s, int64_t rows, int parts) {
  stride[0] = rows * parts * s->h * s->d;
  stride[1] = s->d;
  stride[2] = parts * s->h * s->d;
}

static void ask_attention(const orr_dnn_target *target, const struct gpu *gpu,
                          const struct attention *s, orr_cuda_sdpa a) {
  orr_dnn_plan plan = {.status = CUDNN_STATUS_SUCCESS};
  int parts = s->queries == s->keys ? 3 : 1;
  char what[200];
  a.n = s->n, a.h = s->h, a.queries = s->queries, a.keys = s->keys, a.d = a.e = s->d;
  lay(a.q, s, s->queries, parts), lay(a.k, s, s->keys, parts), lay(a.v, s, s->keys, parts);
  lay(a.o, s, s->queries, 1);
  if (a.backward) {
    lay(a.g, s, s->queries, 1), lay(a.gq, s, s->queries, parts);
    lay(a.gk, s, s->keys, parts), lay(a.gv, s, s->keys, parts);
  }
  snprintf(what, sizeof what, "%s attention %s, %lld queries, %lld keys, heads of %lld, %s%s%s",
           gpu->name, a.backward ? "backward" : "forward", (long long)s->queries,
           (long long)s->keys, (long long)s->d, a.dtype == ORR_F16 ? "f16" : "bf16",
           a.causal ? ", causal" : "", a.deterministic ? ", deterministic" : "");
  orr_dnn_sdpa_graph(&plan, &a);
  const orr_dnn_demand demand = orr_dnn_sdpa_demand(&a);
  /* No engine notes that its sums have no order. Exact is the one that keeps its matrix. */
  int64_t least = a.deterministic ? 2 * a.n * a.h * a.queries * a.keys : 0;
  ask(target, &demand, &plan, !s->widest || s->widest == gpu->capability / 100, least, what);
}

static void ask_attentions(const orr_dnn_target *target, const struct gpu *gpu) {
  for (size_t k = 0; k < sizeof attentions / sizeof *attentions; k++)
    for (int way = 0; way < 16; way++) {
      orr_cuda_sdpa a;
      memset(&a, 0, sizeof a);
      a.backward = way / 8, a.causal = way / 4 % 2;
      a.dtype = way / 2 % 2 ? ORR_F16 : ORR_BF16;
      a.deterministic = way % 2;
      if (a.backward || !a.deterministic) ask_attention(target, gpu, &attentions[k], a);
    }
}

int main(void) {
  printf("cuDNN %zu\n", cudnnGetVersion());
  for (size_t k = 0; k < sizeof gpus / sizeof *gpus; k++) {
    orr_dnn_target target = {.handle = NULL};
    if (!describe(&gpus[k], &target.properties)) {
      printf("FAIL %s: cuDNN does not take its properties\n", gpus[k].name);
      return 1;
    }
    ask_convs(&target, gpus[k].name);
    ask_attentions(&target, &gpus[k]);
    cudnnBackendDestroyDescriptor(target.properties);
  }
  printf("%d asked, %d wrong\n", n_asked, n_wrong);
  return n_wrong != 0;
}
