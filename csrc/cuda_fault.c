/* cuda_fault.c: what a kernel finds wrong in the data (a label out of range), as an error in
 * the words that the CPU's ops use.
 *
 * Invariant: slots lie in pinned memory that every GPU and the host see. A slot belongs to one
 * launch from when it is taken until the stream has passed a mark behind it; only then it is
 * read, and its error told before the item that it belongs to counts as complete.
 * To add a kind of fault: its words in `words`.
 */
#include <stdio.h>
#include <string.h>

#include "cuda.h"

static bool counts_labels(const char *op) {
  return strncmp(op, "cross_entropy", 13) == 0 || strncmp(op, "nll", 3) == 0;
}

/* In the words of orr_index_fault (op_index.c). */
static void words(const orr_cuda_fault_slot *slot, const orr_cuda_fault_note *note, char *buf,
                  size_t size) {
  const char *where = note->part ? " of this device's part" : "";
  long long value = slot->value, position = slot->position, limit = slot->limit;
  if (counts_labels(note->op))
    snprintf(buf, size,
             "label %lld of row %lld%s is out of range: there are %lld classes "
             "(labels count from 1)",
             value, position, where, limit);
  else
    snprintf(buf, size,
             "index %lld at position %lld%s is out of range: the dimension has %lld "
             "(indices count from 1)",
             value, position, where, limit);
}

static void tell(const orr_cuda_queue *s, const orr_cuda_fault_slot *slot,
                 const orr_cuda_fault_note *note) {
  char what[300], message[700];
  words(slot, note, what, sizeof what);
  int n = snprintf(message, sizeof message, "%s on %s: %s", note->op, s->device->name, what);
  if (note->source[0] && n > 0 && (size_t)n < sizeof message)
    snprintf(message + n, sizeof message - (size_t)n, " (queued at %s:%d)", note->source,
             note->line);
  orr_cuda_host->work_error(ORR_EARG, message);
}

/* Of slots that wait for no more than `marks` marks. */
static void look(orr_cuda_queue *s, uint64_t marks) {
  while (s->n_seen < s->n_faults) {
    unsigned at = (unsigned)(s->n_seen % ORR_CUDA_FAULTS);
    if (s->note[at].mark > marks) return;
    if (s->fault[at].position != 0) tell(s, &s->fault[at], &s->note[at]);
    s->n_seen++;
  }
}

void orr_cuda_faults_look(orr_cuda_queue *s) { look(s, s->n_complete); }

/* Those of a graph are launched with it each time, and told after each. */
void orr_cuda_faults_of(orr_cuda_queue *s, orr_cuda_graph *g) {
  for (int k = 0; k < g->n_faults; k++) {
    if (g->fault[k].position == 0) continue;
    tell(s, &g->fault[k], &g->note[k]);
    g->fault[k].position = 0;
  }
}

orr_cuda_fault_slot *orr_cuda_fault_slots(void) {
  void *memory;
  bool made =
      orr_cuda_check(cudaHostAlloc(&memory, ORR_CUDA_FAULTS * sizeof(orr_cuda_fault_slot),
                                   cudaHostAllocPortable | cudaHostAllocMapped),
                     "allocating pinned memory");
  return made ? memory : NULL;
}

/* All slots are taken: what was launched comes to its end, and they are read. */
static bool empty_slots(orr_cuda_queue *s) {
  if (!orr_cuda_check(cudaStreamSynchronize(s->stream), "waiting for a stream")) return false;
  look(s, UINT64_MAX);
  return true;
}

static void take_note(const orr_cuda_queue *s, orr_cuda_fault_note *note) {
  const orr_work *w = s->work;
  *note = (orr_cuda_fault_note){.mark = s->n_marked + 1, .op = "an op"};
  if (!w) return;
  note->op = w->op->name;
  note->part = w->n_shards > 1;
  note->line = w->line;
  if (w->source) snprintf(note->source, sizeof note->source, "%.159s", w->source);
}

static orr_cuda_fault_slot *graph_slot(orr_cuda_queue *s, int64_t limit) {
  orr_cuda_fault_note *note;
  orr_cuda_fault_slot *slot = orr_cuda_graph_fault(s, &note);
  if (!slot) return NULL;
  *slot = (orr_cuda_fault_slot){.limit = limit, .poison = s->poison};
  take_note(s, note);
  return slot;
}

orr_cuda_fault_slot *orr_cuda_fault(int64_t limit) {
  orr_cuda_queue *s = orr_cuda_current();
  if (!s) {
    orr_cuda_record(ORR_EDEVICE, "a kernel asked for a fault slot outside of a queue");
    return NULL;
  }
  if (s->graph) return graph_slot(s, limit);
  if (!s->fault && !(s->fault = orr_cuda_fault_slots())) return NULL;
  if (s->n_faults - s->n_seen == ORR_CUDA_FAULTS && !empty_slots(s)) return NULL;
  unsigned at = (unsigned)(s->n_faults % ORR_CUDA_FAULTS);
  orr_cuda_fault_slot *slot = &s->fault[at];
  *slot = (orr_cuda_fault_slot){.limit = limit, .poison = s->poison};
  take_note(s, &s->note[at]);
  s->n_faults++;
  return slot;
}

void orr_cuda_faults_close(orr_cuda_queue *s) {
  if (s->fault) cudaFreeHost(s->fault);
  s->fault = NULL;
}
