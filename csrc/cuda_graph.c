/* cuda_graph.c: what a queue issues again and again, as a CUDA graph: recorded from a stream of
 * its own, so that other threads may go on with the queue's, and launched on the queue's.
 *
 * Invariant: a graph belongs to its queue's worker, except `dead`, which the controller sets.
 * It names memory: the queue's room and its own fault slots; where the room has moved it is
 * made anew. What needs host memory in passing (cuda_memory.c) cannot be recorded. A graph that
 * cannot be made leaves nothing behind, and its work is issued as ever.
 * To add what a recorded call may ask for: here, for `s->graph`.
 */
#include <stdlib.h>

#include "cuda.h"

enum { MOST_FAILURES = 2 };

/* ---- recording ---- */

static bool begin(orr_cuda_queue *s, orr_cuda_graph *g) {
  orr_cuda_gpu *gpu = s->device->gpu;
  if (!g->fault && !(g->fault = orr_cuda_fault_slots())) return false;
  if (!s->recorder &&
      orr_cuda_try(gpu, cudaStreamCreateWithFlags(&s->recorder, cudaStreamNonBlocking),
                   "a new stream"))
    return false;
  return !orr_cuda_try(gpu,
                       cudaStreamBeginCapture(s->recorder, cudaStreamCaptureModeThreadLocal),
                       "recording a graph");
}

/* The capture is ended whatever has failed in it. */
static bool record(orr_cuda_queue *s, orr_cuda_graph *g, orr_status (*issue)(void *arg),
                   void *arg, cudaGraph_t *out) {
  orr_cuda_gpu *gpu = s->device->gpu;
  if (!begin(s, g)) return false;
  s->issue = s->recorder;
  s->graph = g;
  g->n_faults = 0;
  orr_status status = issue(arg);
  s->graph = NULL;
  s->issue = s->stream;
  cudaError_t error = cudaStreamEndCapture(s->recorder, out);
  if (!status) status = orr_cuda_try(gpu, error, "recording a graph");
  cudaGetLastError();
  s->failure.status = ORR_OK;
  if (!status) return true;
  if (!error) orr_cuda_ignore(cudaGraphDestroy(*out));
  return false;
}

static void drop_exec(orr_cuda_graph *g) {
  if (g->exec) orr_cuda_ignore(cudaGraphExecDestroy(g->exec));
  g->exec = NULL;
}

static bool make(orr_cuda_queue *s, orr_cuda_graph *g, orr_status (*issue)(void *arg),
                 void *arg) {
  cudaGraph_t graph;
  drop_exec(g);
  if (!record(s, g, issue, arg, &graph)) return false;
  orr_status status =
      orr_cuda_try(s->device->gpu, cudaGraphInstantiate(&g->exec, graph, 0), "making a graph");
  orr_cuda_ignore(cudaGraphDestroy(graph));
  if (status) g->exec = NULL;
  g->room = s->room;
  return !status;
}

/* ---- running ---- */

static orr_cuda_graph *graph_new(orr_cuda_queue *s) {
  orr_cuda_graph *g = calloc(1, sizeof *g);
  if (!g) return NULL;
  g->queue = s;
  g->next = s->graphs;
  return s->graphs = g;
}

bool orr_cuda_graph_run(orr_queue *q, void **graph, orr_status (*issue)(void *arg), void *arg) {
  orr_cuda_queue *s = q->stream;
  orr_cuda_gpu *gpu = s->device->gpu;
  orr_cuda_graph *g = *graph;
  if (orr_cuda_is_lost(gpu) || s->failure.status) return false;
  if (!g) { /* the first run finds plans, and makes room */
    *graph = graph_new(s);
    return false;
  }
  if (g->failures >= MOST_FAILURES) return false;
  bool good = g->exec && g->room == s->room;
  if (!good) good = make(s, g, issue, arg);
  if (good) good = !orr_cuda_try(gpu, cudaGraphLaunch(g->exec, s->stream), "launching a graph");
  if (!good) {
    g->failures++;
    return false;
  }
  g->mark = s->n_marked + 1;
  return true;
}

orr_cuda_fault_slot *orr_cuda_graph_fault(orr_cuda_queue *s, orr_cuda_fault_note **note) {
  orr_cuda_graph *g = s->graph;
  if (g->n_faults == ORR_CUDA_FAULTS) {
    orr_cuda_record(ORR_EDEVICE, "a graph has no fault slots left");
    return NULL;
  }
  *note = &g->note[g->n_faults];
  return &g->fault[g->n_faults++];
}

/* ---- the end ---- */

static void graph_close(orr_cuda_graph *g) {
  drop_exec(g);
  if (g->fault) orr_cuda_ignore(cudaFreeHost(g->fault));
  g->fault = NULL;
  g->queue = NULL;
}

void orr_cuda_graph_free(void *graph) {
  orr_cuda_graph *g = graph;
  if (g->queue) atomic_store(&g->dead, true);
  else free(g);
}

void orr_cuda_graphs_look(orr_cuda_queue *s) {
  for (orr_cuda_graph **at = &s->graphs; *at;) {
    orr_cuda_graph *g = *at;
    if (g->mark && g->mark <= s->n_complete) {
      orr_cuda_faults_of(s, g);
      g->mark = 0;
    }
    if (!atomic_load(&g->dead)) {
      at = &g->next;
      continue;
    }
    *at = g->next;
    graph_close(g);
    free(g);
  }
}

void orr_cuda_graphs_close(orr_cuda_queue *s) {
  while (s->graphs) {
    orr_cuda_graph *g = s->graphs;
    s->graphs = g->next;
    graph_close(g);
    if (atomic_load(&g->dead)) free(g);
  }
  if (s->recorder) cudaStreamDestroy(s->recorder);
  s->recorder = NULL;
}
