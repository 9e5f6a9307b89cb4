/* op_words.h: the words of orr_op.args: what the Lua binding and the C API hand to an op.
 *
 * Invariant: a word says all about one argument; what each letter means stands beside
 * orr_op.args in orrery_int.h.
 * To add a kind of word: its letter there, and in read_word of lua_op.c and of api.c.
 */
#ifndef ORR_OP_WORDS_H
#define ORR_OP_WORDS_H

#include <stdbool.h>

#define ORR_MAX_WORDS 14

typedef struct orr_word {
  char kind;     /* t T s i f b d e L D r */
  bool optional; /* t? */
  bool has_default;
  double otherwise; /* NAN: nil */
} orr_word;

/* Reads `args` into words; returns how many. */
int orr_words_read(const char *args, orr_word *words);

#endif
