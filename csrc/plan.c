/* plan.c: names and options of the plan language, its canonical text, and the form of its
 * errors.
 *
 * Invariant: whatever this file writes, plan_parse.c reads back to the same tree; runs of three
 * or more consecutive devices are written as a range.
 * To add an option: its row here, its name in orr_plan_option.
 */
#include "plan.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA (1u << ORR_PLAN_DATA)
#define MODEL (1u << ORR_PLAN_MODEL)
#define TENSOR (1u << ORR_PLAN_TENSOR)

static const orr_plan_option_row option_rows[ORR_PLAN_N_OPTIONS] = {
    [ORR_PLAN_ZERO] = {"zero", DATA, ORR_PLAN_INT, 1, 3, {0}, "1, 2 or 3"},
    [ORR_PLAN_BUCKET] = {"bucket",
                         DATA,
                         ORR_PLAN_BYTES,
                         1,
                         INT64_C(1) << 50,
                         {0},
                         "a number of bytes, such as 25MiB (KiB, MiB, GiB)"},
    [ORR_PLAN_SYNC_BN] = {"sync_bn", DATA, ORR_PLAN_BOOL, 0, 1, {0}, "true or false"},
    [ORR_PLAN_MICRO] = {"micro",
                        DATA | MODEL,
                        ORR_PLAN_INT,
                        1,
                        1 << 20,
                        {0},
                        "a number of micro-batches from 1"},
    [ORR_PLAN_SCHEDULE] = {"schedule",
                           MODEL,
                           ORR_PLAN_WORD,
                           0,
                           0,
                           {"gpipe", "1f1b", "interleaved"},
                           "gpipe, 1f1b or interleaved"},
    [ORR_PLAN_CHUNKS] =
        {"chunks", MODEL, ORR_PLAN_INT, 1, 1 << 20, {0}, "a number of chunks from 1"},
    [ORR_PLAN_RECOMPUTE] = {"recompute",
                            MODEL,
                            ORR_PLAN_PATTERN,
                            0,
                            0,
                            {0},
                            "true, false, stage or a pattern of module names"},
    [ORR_PLAN_BALANCE] =
        {"balance", MODEL, ORR_PLAN_WORD, 0, 0, {"flops", "time"}, "flops or time"},
    [ORR_PLAN_SEQUENCE] = {"sequence", TENSOR, ORR_PLAN_BOOL, 0, 1, {0}, "true or false"},
};

const char *orr_plan_kind_name(orr_plan_kind kind) {
  static const char *const names[] = {"device", "data", "model", "tensor"};
  return names[kind];
}

const orr_plan_option_row *orr_plan_option_of(orr_plan_option option) {
  return &option_rows[option];
}

/* -- memory ------------------------------------------------------------------------------- */

struct orr_plan_block {
  struct orr_plan_block *next;
  max_align_t memory[];
};

void *orr_plan_take(orr_plan *plan, size_t bytes) {
  struct orr_plan_block *block = calloc(1, sizeof *block + bytes);
  if (!block) {
    orr_fail(ORR_EMEM, "plan: out of memory");
    return NULL;
  }
  block->next = plan->blocks;
  plan->blocks = block;
  return block->memory;
}

char *orr_plan_take_text(orr_plan *plan, const char *text, size_t length) {
  char *copy = orr_plan_take(plan, length + 1);
  if (copy) memcpy(copy, text, length);
  return copy;
}

void orr_plan_free(orr_plan *plan) {
  if (!plan) return;
  while (plan->blocks) {
    struct orr_plan_block *block = plan->blocks;
    plan->blocks = block->next;
    free(block);
  }
  free(plan);
}

/* -- errors ------------------------------------------------------------------------------- */

static bool continues(char c) { return ((unsigned char)c & 0xC0) == 0x80; } /* UTF-8 */

/* Characters of text[from..to). */
static int width(const char *text, int from, int to) {
  int n = 0;
  for (int i = from; i < to; i++) n += !continues(text[i]);
  return n;
}

/* Shows at most 60 bytes on each side of the caret. */
orr_status orr_plan_fail(const char *source, int at, const char *format, ...) {
  enum { SIDE = 60 };
  char words[1200], where[48], shown[2 * SIDE + 1], caret[2 * SIDE + 2];
  va_list ap;
  va_start(ap, format);
  vsnprintf(words, sizeof words, format, ap);
  va_end(ap);

  int start = 0, line = 1, end = at;
  for (int i = 0; i < at; i++) {
    if (source[i] == '\n') start = i + 1, line++;
  }
  while (source[end] && source[end] != '\n') end++;
  int column = width(source, start, at) + 1, from = start, to = end;
  if (line > 1 || strchr(source, '\n')) {
    snprintf(where, sizeof where, "line %d, column %d", line, column);
  } else {
    snprintf(where, sizeof where, "column %d", column);
  }
  if (at - from > SIDE) from = at - SIDE;
  while (from < at && continues(source[from])) from++;
  if (to - at > SIDE) to = at + SIDE;
  while (to > at && continues(source[to])) to--;

  int n = 0, pad = 0;
  for (int i = from; i < to; i++) {
    unsigned char c = (unsigned char)source[i];
    shown[n++] = c < 0x20 && c != '\t' ? '?' : (char)c;
  }
  for (int i = from; i < at; i++) {
    if (!continues(source[i])) caret[pad++] = source[i] == '\t' ? '\t' : ' ';
  }
  shown[n] = caret[pad] = '\0';
  return orr_fail(ORR_EARG, "plan: %s at %s\n  %s%s%s\n  %s%s^", words, where,
                  from > start ? "..." : "", shown, to < end ? "..." : "",
                  from > start ? "   " : "", caret);
}

/* -- canonical text ----------------------------------------------------------------------- */

typedef struct writer {
  char *text;
  size_t length, size;
  bool failed;
} writer;

static void put(writer *w, const char *text) {
  size_t n = strlen(text);
  if (w->failed) return;
  if (w->length + n + 1 > w->size) {
    size_t size = 2 * (w->length + n + 32);
    char *grown = realloc(w->text, size);
    if (!grown) {
      w->failed = true;
      return;
    }
    w->text = grown;
    w->size = size;
  }
  memcpy(w->text + w->length, text, n + 1);
  w->length += n;
}

int orr_plan_device_text(const orr_plan_node *device, char *buffer, size_t size) {
  switch (device->naming) {
    case ORR_PLAN_BARE: return snprintf(buffer, size, "%d", device->index);
    case ORR_PLAN_CPU: return snprintf(buffer, size, "cpu:%d", device->index);
    case ORR_PLAN_CUDA: return snprintf(buffer, size, "cuda:%d", device->index);
    case ORR_PLAN_BUS: break;
  }
  return snprintf(buffer, size, "\"%s\"", device->id);
}

/* A word as the parser reads it bare, or in quotes; digits alone would be read as a count. */
static void put_word(writer *w, const char *word, bool digits_are_count) {
  bool bare = true, digits = true;
  for (const char *c = word; *c; c++) {
    bool digit = *c >= '0' && *c <= '9';
    bool letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z');
    digits = digits && digit;
    bare = bare && (digit || letter || strchr("_.*?-", *c));
  }
  bare = bare && !(digits_are_count && digits);
  put(w, bare ? "" : "\"");
  put(w, word);
  put(w, bare ? "" : "\"");
}

static void put_bytes(writer *w, int64_t bytes) {
  static const char *const units[] = {"", "KiB", "MiB", "GiB"};
  char number[40];
  int unit = 0;
  while (unit < 3 && bytes % 1024 == 0) bytes /= 1024, unit++;
  snprintf(number, sizeof number, "%" PRId64 "%s", bytes, units[unit]);
  put(w, number);
}

static void put_value(writer *w, const orr_plan_option_row *row, const orr_plan_value *value) {
  char number[24];
  switch (row->type) {
    case ORR_PLAN_INT:
      snprintf(number, sizeof number, "%" PRId64, value->number);
      put(w, number);
      break;
    case ORR_PLAN_BYTES: put_bytes(w, value->number); break;
    case ORR_PLAN_BOOL: put(w, value->number ? "true" : "false"); break;
    case ORR_PLAN_WORD:
    case ORR_PLAN_PATTERN: put_word(w, value->text, false); break;
  }
}

static void put_options(writer *w, const orr_plan_value *options) {
  const char *before = "; ";
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    if (!options[i].set) continue;
    put(w, before);
    put(w, option_rows[i].name);
    put(w, "=");
    put_value(w, &option_rows[i], &options[i]);
    before = ", ";
  }
}

static bool is_plain(const orr_plan_node *node) {
  return node->kind == ORR_PLAN_DEVICE && !node->count && !node->pattern;
}

/* The last device of the run of consecutive plain devices that begins at node. */
static const orr_plan_node *run_end(const orr_plan_node *node) {
  if (!is_plain(node) || node->naming == ORR_PLAN_BUS) return node;
  while (node->next && is_plain(node->next) && node->next->naming == node->naming &&
         node->next->index == node->index + 1) {
    node = node->next;
  }
  return node;
}

static void put_node(writer *w, const orr_plan_node *node);

static void put_children(writer *w, const orr_plan_node *node) {
  for (const orr_plan_node *child = node->first; child; child = child->next) {
    const orr_plan_node *end = run_end(child);
    put_node(w, child);
    if (end != child && end->index - child->index >= 2) {
      char last[16];
      snprintf(last, sizeof last, "..%d", end->index);
      put(w, last);
      child = end;
    }
    if (child->count) {
      char count[24];
      snprintf(count, sizeof count, ": %" PRId64, child->count);
      put(w, count);
    } else if (child->pattern) {
      put(w, ": ");
      put_word(w, child->pattern, true);
    }
    if (child->next) put(w, is_plain(child) && is_plain(child->next) ? "," : ", ");
  }
}

static void put_node(writer *w, const orr_plan_node *node) {
  if (node->kind == ORR_PLAN_DEVICE) {
    char name[96];
    orr_plan_device_text(node, name, sizeof name);
    put(w, name);
    return;
  }
  put(w, orr_plan_kind_name(node->kind));
  put(w, "<");
  put_children(w, node);
  put_options(w, node->options);
  put(w, ">");
}

char *orr_plan_node_text(const orr_plan_node *node) {
  writer w = {0};
  put_node(&w, node);
  if (!w.failed) return w.text;
  free(w.text);
  orr_fail(ORR_EMEM, "plan: out of memory");
  return NULL;
}
