/* cuda_attention.c: attention on CUDA, by cuDNN where it takes it, else by
 * kernels/attention.cu.
 *
 * Invariant: cuDNN's attention is proved before it is used: the first call of a kind on a GPU
 * runs a small case forward and backward both ways and compares; where they differ, or cuDNN
 * fails, that kind runs on our kernel from then on, and `why` says so. One shape on one GPU
 * always takes the same way.
 * To add an input: what cuDNN asks of it in is_taken, its part of the key in key_of.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/half.h"
#include "cuda_dnn.h"

/* Before, cuDNN's backward was wrong for some lengths. */
enum { OLDEST = 91600 };

/* ---- the proof's case: q, k, v, g (N, H, T, D) in one block, as results and gradients ---- */

enum { CASE_H = 2, CASE_T = 72, CASE_D = 64, CASE = CASE_H * CASE_T * CASE_D };
enum { CASE_Q, CASE_K, CASE_V, CASE_G, CASE_O, CASE_GQ, CASE_GK, CASE_GV, N_CASE };
static const double tolerance = 0.05; /* of numbers up to 2, in bf16 */

typedef struct proof_case {
  orr_view view[N_CASE], lse;
  orr_k_attention_args args;
} proof_case;

static void lay_out(proof_case *c, orr_dtype dtype, bool causal, char *data) {
  for (int k = 0; k < N_CASE; k++)
    c->view[k] = (orr_view){.data = data + 2 * CASE * (size_t)k,
                            .dtype = dtype,
                            .ndim = 4,
                            .shape = {1, CASE_H, CASE_T, CASE_D},
                            .stride = {CASE, CASE_D, CASE_H * CASE_D, 1}};
  c->lse = (orr_view){.data = data + 2 * CASE * (size_t)N_CASE,
                      .dtype = ORR_F32,
                      .ndim = 3,
                      .shape = {1, CASE_H, CASE_T},
                      .stride = {CASE_H * CASE_T, CASE_T, 1}};
  c->args = (orr_k_attention_args){.q = &c->view[CASE_Q],
                                   .k = &c->view[CASE_K],
                                   .v = &c->view[CASE_V],
                                   .o = &c->view[CASE_O],
                                   .g = &c->view[CASE_G],
                                   .gq = &c->view[CASE_GQ],
                                   .gk = &c->view[CASE_GK],
                                   .gv = &c->view[CASE_GV],
                                   .lse = &c->lse,
                                   .causal = causal,
                                   .scale = 0.25};
}

static const size_t case_bytes = 2 * CASE * (size_t)N_CASE + CASE_H * CASE_T * sizeof(float);

/* ---- what cuDNN takes ---- */

/* Rows that cuDNN reads in vectors of 16 bytes. */
static bool is_rows(const orr_view *v, orr_dtype dtype) {
  if (v->ndim != 4 || v->dtype != dtype || (uintptr_t)v->data % 16 != 0) return false;
  if (v->stride[3] != 1 || v->shape[3] % 8 != 0) return false;
  for (int d = 0; d < 4; d++)
    if (v->shape[d] == 0 ||
        (d < 3 && v->shape[d] > 1 && (v->stride[d] < v->shape[3] || v->stride[d] % 8 != 0)))
      return false;
  return true;
}

static bool is_taken(const orr_k_attention_args *a, bool backward) {
  const orr_view *view[] = {a->q, a->k, a->v, a->o, a->g, a->gq, a->gk, a->gv};
  orr_dtype dtype = a->q->dtype;
  if ((dtype != ORR_F16 && dtype != ORR_BF16) || cudnnGetVersion() < OLDEST) return false;
  for (int k = 0; k < (backward ? 8 : 4); k++)
    if (!is_rows(view[k], dtype)) return false;
  if (a->q->shape[2] == 1 && a->k->shape[2] == 1) return false;
  return orr_cuda_is_packed(a->lse) && (uintptr_t)a->lse->data % 16 == 0;
}

static void strides_of(const orr_view *v, int64_t *stride) {
  int64_t whole = v->shape[1] * v->shape[2] * v->shape[3];
  for (int d = 0; d < 3; d++) stride[d] = v->shape[d] > 1 ? v->stride[d] : whole;
}

static orr_cuda_sdpa key_of(const orr_k_attention_args *a, bool backward) {
  orr_cuda_sdpa key;
  memset(&key, 0, sizeof key);
  key.n = a->q->shape[0], key.h = a->q->shape[1];
  key.queries = a->q->shape[2], key.keys = a->k->shape[2];
  key.d = a->q->shape[3], key.e = a->v->shape[3];
  const orr_view *view[] = {a->q, a->k, a->v, a->o, a->g, a->gq, a->gk, a->gv};
  int64_t *stride[] = {key.q, key.k, key.v, key.o, key.g, key.gq, key.gk, key.gv};
  for (int k = 0; k < (backward ? 8 : 4); k++) strides_of(view[k], stride[k]);
  key.dtype = (int32_t)a->q->dtype;
  key.backward = backward;
  key.causal = a->causal;
  key.deterministic = backward && atomic_load(&orr_cuda_machine.deterministic);
  return key;
}

static orr_status by_library(orr_cuda_queue *s, const orr_k_attention_args *a, bool backward,
                             bool *done) {
  struct orr_cuda_sdpa_plan *plan;
  orr_cuda_sdpa key = key_of(a, backward);
  *done = false;
  ORR_TRY(orr_cuda_sdpa_find(s->device, &key, &plan));
  if (!plan) return ORR_OK;
  void *room = orr_cuda_room(orr_cuda_sdpa_room(plan));
  if (!room) return orr_cuda_recorded(s);
  ORR_TRY(orr_cuda_sdpa_run(s, plan, a, room));
  *done = true;
  return ORR_OK;
}

/* ---- the proof ---- */

static void fill(uint16_t *numbers, orr_dtype dtype) {
  uint32_t state = 1;
  for (int k = 0; k < (CASE_G + 1) * CASE; k++) {
    state = state * 1664525u + 1013904223u;
    float x = (float)(state >> 8) / (1 << 23) - 1;
    numbers[k] = dtype == ORR_F16 ? orr_f16_of_f32(x) : orr_bf16_of_f32(x);
  }
}

static double worst(const uint16_t *a, const uint16_t *b, orr_dtype dtype) {
  double most = 0;
  for (int k = CASE_O * CASE; k < N_CASE * CASE; k++) {
    double x = dtype == ORR_F16 ? orr_f32_of_f16(a[k]) : orr_f32_of_bf16(a[k]);
    double y = dtype == ORR_F16 ? orr_f32_of_f16(b[k]) : orr_f32_of_bf16(b[k]);
    double off = fabs(x - y);
    if (!(off <= most)) most = off == off ? off : INFINITY;
  }
  return most;
}

/* On s: both directions of the case, by cuDNN or by our kernel, and home. *done: cuDNN did. */
static orr_status run_case(orr_cuda_queue *s, proof_case *c, bool by_cudnn, char *home,
                           bool *done) {
  bool also = true;
  *done = true;
  orr_cuda_check(
      cudaMemcpyAsync(c->view[0].data, home, case_bytes, cudaMemcpyHostToDevice, s->issue),
      "copying the proof of attention");
  if (by_cudnn) {
    ORR_TRY(by_library(s, &c->args, false, done));
    if (*done) ORR_TRY(by_library(s, &c->args, true, &also));
    *done = *done && also;
  } else {
    ORR_TRY(orr_cuda_tiled_attention(&c->args));
    ORR_TRY(orr_cuda_tiled_attention_back(&c->args));
  }
  orr_cuda_check(
      cudaMemcpyAsync(home, c->view[0].data, case_bytes, cudaMemcpyDeviceToHost, s->issue),
      "copying the proof of attention");
  return ORR_OK;
}

static orr_status run_borrowed(orr_cuda_device *d, proof_case *c, bool by_cudnn, char *home,
                               bool *done) {
  orr_cuda_queue *before;
  ORR_TRY(orr_cuda_borrow(d, &before));
  orr_status status = run_case(d->copy, c, by_cudnn, home, done);
  orr_status after = orr_cuda_release(d, before);
  return status ? status : after;
}

static orr_status compare(orr_cuda_device *d, proof_case *c, char *ours, char *theirs,
                          orr_cuda_proof *proof) {
  orr_dtype dtype = c->args.q->dtype;
  bool done;
  fill((uint16_t *)(void *)ours, dtype);
  fill((uint16_t *)(void *)theirs, dtype);
  ORR_TRY(run_borrowed(d, c, false, ours, &done));
  ORR_TRY(run_borrowed(d, c, true, theirs, &done));
  double off = worst((uint16_t *)(void *)ours, (uint16_t *)(void *)theirs, dtype);
  if (!done) snprintf(proof->why, sizeof proof->why, "cuDNN has no engine for it");
  else if (off > tolerance)
    snprintf(proof->why, sizeof proof->why, "cuDNN's differs from ours by %.3g", off);
  proof->state = done && off <= tolerance ? ORR_CUDA_PROVED : ORR_CUDA_REFUTED;
  return ORR_OK;
}

/* No failure but the loss of the GPU: what went wrong is a reason for our kernel. */
static orr_status prove(orr_cuda_device *d, orr_dtype dtype, bool causal,
                        orr_cuda_proof *proof) {
  char *home = calloc(2, case_bytes);
  void *data = NULL;
  proof_case c;
  orr_status status = ORR_EMEM;
  if (home && !cudaMalloc(&data, case_bytes)) {
    lay_out(&c, dtype, causal, data);
    status = compare(d, &c, home, home + case_bytes, proof);
  }
  cudaGetLastError();
  if (data) cudaFree(data);
  free(home);
  if (status && orr_cuda_is_lost(d->gpu)) return status;
  if (status) {
    proof->state = ORR_CUDA_REFUTED;
    snprintf(proof->why, sizeof proof->why, "%s",
             status == ORR_EMEM ? "no memory to try it" : orr_cuda_host->last_error());
  }
  return ORR_OK;
}

static orr_status is_proved(orr_cuda_queue *s, const orr_k_attention_args *a, bool *proved) {
  bool exact = atomic_load(&orr_cuda_machine.deterministic);
  orr_cuda_proof *proof = &s->device->attention[a->q->dtype == ORR_F16][a->causal][exact];
  if (proof->state == ORR_CUDA_UNTRIED)
    ORR_TRY(prove(s->device, a->q->dtype, a->causal, proof));
  *proved = proof->state == ORR_CUDA_PROVED;
  return ORR_OK;
}

/* ---- rows of the table ---- */

static orr_status try_library(const orr_k_attention_args *a, bool backward, bool *done) {
  orr_cuda_queue *s = orr_cuda_current();
  *done = false;
  if (!s) return orr_fail(ORR_EDEVICE, "attention was launched outside of a queue");
  if (!is_taken(a, backward)) return ORR_OK;
  ORR_TRY(is_proved(s, a, done));
  return *done ? by_library(s, a, backward, done) : ORR_OK;
}

orr_status orr_cuda_attention(const orr_k_attention_args *a) {
  bool done;
  ORR_TRY(try_library(a, false, &done));
  return done ? ORR_OK : orr_cuda_tiled_attention(a);
}

orr_status orr_cuda_attention_back(const orr_k_attention_args *a) {
  bool done;
  ORR_TRY(try_library(a, true, &done));
  return done ? ORR_OK : orr_cuda_tiled_attention_back(a);
}

/* ---- words ---- */

void orr_cuda_attention_words(int k, char *text, size_t room) {
  static const char *const dtypes[] = {"bf16", "f16"}, *const masks[] = {"", " causal"},
                           *const orders[] = {" in any order", ""};
  size_t at = 0;
  text[0] = 0;
  for (int kind = 0; kind < 8 && at < room; kind++) {
    int dtype = kind / 4, causal = kind / 2 % 2, exact = kind % 2;
    const orr_cuda_proof *proof = &orr_cuda_machine.device[k].attention[dtype][causal][exact];
    if (proof->state == ORR_CUDA_UNTRIED) continue;
    bool proved = proof->state == ORR_CUDA_PROVED;
    int n =
        snprintf(text + at, room - at, "%s%s%s%s by %s%s", at ? "; " : "", dtypes[dtype],
                 masks[causal], orders[exact], proved ? "cuDNN" : "our kernel: ", proof->why);
    at += n > 0 ? (size_t)n : 0;
  }
}
