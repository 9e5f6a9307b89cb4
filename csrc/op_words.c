/* op_words.c: reads orr_op.args into words.
 *
 * Invariant: as op_words.h says; nothing is allocated.
 * To add a form of a word: parse_word.
 */
#include "op_words.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static orr_word parse_word(const char *text, size_t n) {
  orr_word w = {.kind = text[0]};
  size_t at = 1;
  if (w.kind == 't' && n > 1 && text[1] == 's') {
    w.kind = 's';
    at = 2;
  }
  if (at < n && text[at] == '?') w.optional = true;
  if (at < n && text[at] == '=') {
    char value[32];
    snprintf(value, sizeof value, "%.*s", (int)(n - at - 1), text + at + 1);
    w.has_default = true;
    if (strcmp(value, "nil") == 0) w.otherwise = NAN;
    else if (strcmp(value, "true") == 0) w.otherwise = 1;
    else if (strcmp(value, "false") == 0) w.otherwise = 0;
    else w.otherwise = strtod(value, NULL);
  }
  return w;
}

int orr_words_read(const char *args, orr_word *words) {
  int n = 0;
  while (*args && n < ORR_MAX_WORDS) {
    size_t length = strcspn(args, " ");
    words[n++] = parse_word(args, length);
    args += length;
    args += strspn(args, " ");
  }
  return n;
}
