/* plan_parse.c: the text of a plan to its tree.
 *
 *     plan    = node
 *     node    = kind "<" child { "," child } [ ";" option { "," option } ] ">"
 *     kind    = "data" | "model" | "tensor"
 *     child   = ( node | devices ) [ ": " ( count | word ) ]     (under model only)
 *     devices = device [ ".." number ]
 *     device  = number | "cpu:" number | "cuda:" number | quoted bus id or UUID prefix
 *     option  = name "=" word
 *     word    = letters, digits, "_.*?-" | quoted
 *
 * Invariant: the text ends in a zero byte and every look ahead stops there; every failure names
 * the offset at which the text stopped making sense.
 * To add to the grammar: a rule above, the function that reads it below, its text in plan.c.
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

typedef struct parser {
  orr_plan *plan;
  const char *text; /* the whole source */
  int at;
  int depth;
  int n_devices;
} parser;

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
static bool is_name(char c) { return is_letter(c) || is_digit(c) || c == '_'; }
static bool is_word(char c) { return is_name(c) || (c && strchr(".*?-", c)); }

static char peek(const parser *p) { return p->text[p->at]; }

static void skip_blanks(parser *p) {
  while (is_blank(peek(p))) p->at++;
}

static int span(const parser *p, bool (*is)(char)) {
  int n = 0;
  while (is(p->text[p->at + n])) n++;
  return n;
}

/* A decimal number up to `most`; `what` names it in errors. */
static orr_status read_number(parser *p, int64_t most, const char *what, int64_t *out) {
  int start = p->at;
  if (!is_digit(peek(p))) return orr_plan_fail(p->text, start, "expected %s", what);
  int64_t n = 0;
  for (; is_digit(peek(p)); p->at++) {
    int digit = peek(p) - '0';
    if (n > (most - digit) / 10) {
      return orr_plan_fail(p->text, start, "%s is at most %lld", what, (long long)most);
    }
    n = 10 * n + digit;
  }
  *out = n;
  return ORR_OK;
}

/* The text between quotes, one kind or the other; it holds no quotes or control characters. */
static orr_status read_quoted(parser *p, const char **out) {
  int start = p->at;
  char quote = p->text[p->at++];
  while (peek(p) != quote) {
    unsigned char c = (unsigned char)peek(p);
    if (c < 0x20) return orr_plan_fail(p->text, start, "this quote is not closed");
    if (c == '"' || c == '\'') {
      return orr_plan_fail(p->text, p->at, "a quote cannot stand between quotes");
    }
    p->at++;
  }
  if (p->at == start + 1) return orr_plan_fail(p->text, start, "nothing between the quotes");
  *out = orr_plan_take_text(p->plan, p->text + start + 1, (size_t)(p->at - start - 1));
  p->at++;
  return *out ? ORR_OK : ORR_EMEM;
}

static orr_status read_word(parser *p, const char *what, const char **out) {
  if (peek(p) == '"' || peek(p) == '\'') return read_quoted(p, out);
  int n = span(p, is_word);
  if (n == 0) return orr_plan_fail(p->text, p->at, "expected %s", what);
  *out = orr_plan_take_text(p->plan, p->text + p->at, (size_t)n);
  p->at += n;
  return *out ? ORR_OK : ORR_EMEM;
}

/* -- options ------------------------------------------------------------------------------ */

static orr_status read_bytes(parser *p, const orr_plan_option_row *row, int64_t *out) {
  static const char *const units[] = {"KiB", "MiB", "GiB"};
  int start = p->at;
  orr_status status = read_number(p, row->most, row->name, out);
  if (status) return status;
  for (int i = 0, shift = 10; i < 3; i++, shift += 10) {
    if (strncmp(p->text + p->at, units[i], 3)) continue;
    p->at += 3;
    if (*out > row->most >> shift) {
      return orr_plan_fail(p->text, start, "%s is at most %lld bytes", row->name,
                           (long long)row->most);
    }
    *out <<= shift;
    break;
  }
  return ORR_OK;
}

/* WORD, BOOL and PATTERN: the word, and its place among the legal ones. */
static orr_status read_choice(parser *p, const orr_plan_option_row *row,
                              orr_plan_value *value) {
  static const char *const bools[] = {"false", "true", NULL};
  int start = p->at;
  orr_status status = read_word(p, row->takes, &value->text);
  if (status || row->type == ORR_PLAN_PATTERN) return status;
  const char *const *words = row->type == ORR_PLAN_BOOL ? bools : row->words;
  for (int i = 0; words[i]; i++) {
    if (strcmp(words[i], value->text)) continue;
    value->number = i;
    return ORR_OK;
  }
  return orr_plan_fail(p->text, start, "%s takes %s, not '%.60s'", row->name, row->takes,
                       value->text);
}

static orr_status read_value(parser *p, const orr_plan_option_row *row, orr_plan_value *value) {
  int start = p->at;
  if (row->type != ORR_PLAN_INT && row->type != ORR_PLAN_BYTES)
    return read_choice(p, row, value);
  if (!is_digit(peek(p))) {
    return orr_plan_fail(p->text, start, "%s takes %s", row->name, row->takes);
  }
  orr_status status = row->type == ORR_PLAN_BYTES
                          ? read_bytes(p, row, &value->number)
                          : read_number(p, row->most, row->name, &value->number);
  if (status) return status;
  if (value->number < row->least || value->number > row->most || is_word(peek(p))) {
    return orr_plan_fail(p->text, start, "%s takes %s", row->name, row->takes);
  }
  return ORR_OK;
}

static orr_status fail_option(parser *p, orr_plan_kind kind, int at, int length) {
  char legal[160] = "";
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    const orr_plan_option_row *row = orr_plan_option_of(i);
    if (!(row->kinds & 1u << kind)) continue;
    if (legal[0]) strncat(legal, ", ", sizeof legal - strlen(legal) - 1);
    strncat(legal, row->name, sizeof legal - strlen(legal) - 1);
  }
  if (length > 40) length = 40;
  return orr_plan_fail(p->text, at, "%s has no option '%.*s'; it has: %s",
                       orr_plan_kind_name(kind), length, p->text + at, legal);
}

static orr_status read_option(parser *p, orr_plan_node *node) {
  int start = p->at, length = span(p, is_name);
  if (length == 0) return orr_plan_fail(p->text, start, "expected an option, such as micro=4");
  for (int i = 0; i < ORR_PLAN_N_OPTIONS; i++) {
    const orr_plan_option_row *row = orr_plan_option_of(i);
    orr_plan_value *value = &node->options[i];
    if (!(row->kinds & 1u << node->kind)) continue;
    if ((int)strlen(row->name) != length || strncmp(row->name, p->text + start, (size_t)length))
      continue;
    if (value->set) return orr_plan_fail(p->text, start, "%s is given twice", row->name);
    p->at += length;
    skip_blanks(p);
    if (peek(p) != '=')
      return orr_plan_fail(p->text, p->at, "expected '=' after %s", row->name);
    p->at++;
    skip_blanks(p);
    value->set = true;
    value->at = start;
    return read_value(p, row, value);
  }
  return fail_option(p, node->kind, start, length);
}

static orr_status read_options(parser *p, orr_plan_node *node) {
  for (;;) {
    skip_blanks(p);
    orr_status status = read_option(p, node);
    if (status) return status;
    skip_blanks(p);
    if (peek(p) == '>') return ORR_OK;
    if (peek(p) != ',') return orr_plan_fail(p->text, p->at, "expected '>' or ','");
    p->at++;
  }
}

/* -- devices ------------------------------------------------------------------------------ */

static orr_plan_node *new_node(parser *p, orr_plan_kind kind) {
  orr_plan_node *node = orr_plan_take(p->plan, sizeof *node);
  if (!node) return NULL;
  node->kind = kind;
  node->at = p->at;
  if (kind == ORR_PLAN_DEVICE) return node;
  node->options = orr_plan_take(p->plan, ORR_PLAN_N_OPTIONS * sizeof *node->options);
  return node->options ? node : NULL;
}

static bool is_bus_id(const char *id) {
  size_t n = strspn(id, "0123456789abcdefABCDEF:.");
  if (!strncmp(id, "GPU-", 4) || !strncmp(id, "MIG-", 4)) {
    return id[4] && strspn(id + 4, "0123456789abcdefABCDEF-/") == strlen(id + 4);
  }
  return n == strlen(id) && strchr(id, ':') && is_digit(id[n - 1]) && strchr(id, '.');
}

static orr_status count_device(parser *p, int at) {
  if (++p->n_devices <= ORR_PLAN_MAX_DEVICES) return ORR_OK;
  return orr_plan_fail(p->text, at, "a plan holds at most %d devices", ORR_PLAN_MAX_DEVICES);
}

/* 0, cpu:0, cuda:0, or in quotes a bus id; quotes around cpu:0 are allowed and mean nothing. */
static orr_status read_device(parser *p, orr_plan_node *device) {
  int start = p->at;
  char quote = peek(p) == '"' || peek(p) == '\'' ? peek(p) : '\0';
  if (quote && !strncmp(p->text + p->at + 1, "cpu:", 4)) p->at++;
  else if (quote && !strncmp(p->text + p->at + 1, "cuda:", 5)) p->at++;
  else if (quote) {
    orr_status status = read_quoted(p, &device->id);
    if (status) return status;
    device->naming = ORR_PLAN_BUS;
    if (is_bus_id(device->id) && strlen(device->id) <= 64) return ORR_OK;
    return orr_plan_fail(p->text, start,
                         "a quoted device is a PCI bus id, such as "
                         "\"0000:3b:00.0\", or a UUID prefix, such as \"GPU-5a2c\"");
  }
  if (!strncmp(p->text + p->at, "cpu:", 4)) device->naming = ORR_PLAN_CPU, p->at += 4;
  else if (!strncmp(p->text + p->at, "cuda:", 5)) device->naming = ORR_PLAN_CUDA, p->at += 5;
  int64_t index;
  orr_status status = read_number(p, 65535, "a device number", &index);
  if (status) return status;
  device->index = (int)index;
  if (quote && peek(p) != quote) {
    return orr_plan_fail(p->text, p->at, "expected %c to close the device's name", quote);
  }
  if (quote) p->at++;
  return ORR_OK;
}

/* A device, or a range of them; *last is the last one read. */
static orr_status read_devices(parser *p, orr_plan_node **first, orr_plan_node **last) {
  orr_plan_node *device = *first = *last = new_node(p, ORR_PLAN_DEVICE);
  if (!device) return ORR_EMEM;
  orr_status status = read_device(p, device);
  if (!status) status = count_device(p, device->at);
  if (status || strncmp(p->text + p->at, "..", 2)) return status;

  int start = device->at;
  int64_t end;
  if (device->naming == ORR_PLAN_BUS) {
    return orr_plan_fail(p->text, p->at, "a range needs device numbers, such as 0..3");
  }
  p->at += 2;
  status = read_number(p, 65535, "a device number", &end);
  if (status) return status;
  if (end < device->index) {
    return orr_plan_fail(p->text, start, "the range %d..%d runs down; list the devices instead",
                         device->index, (int)end);
  }
  for (int index = device->index + 1; index <= (int)end; index++) {
    status = count_device(p, start);
    if (status) return status;
    orr_plan_node *next = new_node(p, ORR_PLAN_DEVICE);
    if (!next) return ORR_EMEM;
    next->at = start;
    next->naming = device->naming;
    next->index = index;
    *last = (*last)->next = next;
  }
  return ORR_OK;
}

/* -- nodes -------------------------------------------------------------------------------- */

/* ": 3" or ": conv*" behind the child of a model. */
static orr_status read_share(parser *p, const orr_plan_node *parent, bool range,
                             orr_plan_node *child) {
  int colon = p->at++;
  if (parent->kind != ORR_PLAN_MODEL) {
    return orr_plan_fail(p->text, colon,
                         "a count or a pattern belongs to model; %s shares evenly",
                         orr_plan_kind_name(parent->kind));
  }
  if (range) {
    return orr_plan_fail(p->text, colon, "a count follows one device, not a range: write each");
  }
  if (child->kind == ORR_PLAN_MODEL) {
    return orr_plan_fail(p->text, colon, "give the counts to the stages inside this model");
  }
  if (!is_blank(peek(p))) {
    return orr_plan_fail(p->text, p->at, "a blank stands between ':' and a count or a pattern");
  }
  skip_blanks(p);
  int start = p->at, digits = span(p, is_digit);
  if (digits > 0 && !is_word(p->text[p->at + digits])) {
    orr_status status = read_number(p, INT32_MAX, "a count of layers", &child->count);
    if (status || child->count > 0) return status;
    return orr_plan_fail(p->text, start, "a stage holds at least one layer");
  }
  return read_word(p, "a count of layers or a pattern of module names", &child->pattern);
}

static orr_status read_node(parser *p, orr_plan_node **out);

/* The length of a kind's name when a node begins here, else 0. */
static int node_begins(const parser *p, orr_plan_kind *kind) {
  int length = span(p, is_name), behind = p->at + length;
  while (is_blank(p->text[behind])) behind++;
  if (p->text[behind] != '<') return 0;
  for (*kind = ORR_PLAN_DATA; *kind <= ORR_PLAN_TENSOR; (*kind)++) {
    const char *name = orr_plan_kind_name(*kind);
    if (strlen(name) == (size_t)length && !strncmp(name, p->text + p->at, strlen(name)))
      return length;
  }
  return 0;
}

/* A name may be a variable of the script, which the text of a plan cannot see. */
static orr_status fail_child(const parser *p, const orr_plan_node *parent) {
  const char *expected =
      "expected a device (0, cpu:0, cuda:0) or a node (data<, model<, tensor<)";
  int length = is_digit(peek(p)) ? 0 : span(p, is_name);
  if (length == 0 || length > 40) return orr_plan_fail(p->text, p->at, "%s", expected);
  return orr_plan_fail(p->text, p->at,
                       "%s, not '%.*s'; a variable goes through the constructor, "
                       "parallel.%s(%.*s),",
                       expected, length, p->text + p->at, orr_plan_kind_name(parent->kind),
                       length, p->text + p->at);
}

static orr_status read_child(parser *p, const orr_plan_node *parent, orr_plan_node **first,
                             orr_plan_node **last) {
  orr_plan_kind kind;
  orr_status status;
  char c = peek(p);
  if (node_begins(p, &kind)) {
    status = read_node(p, first);
    *last = *first;
  } else if (is_digit(c) || c == '"' || c == '\'' || !strncmp(p->text + p->at, "cpu:", 4) ||
             !strncmp(p->text + p->at, "cuda:", 5)) {
    status = read_devices(p, first, last);
  } else {
    return fail_child(p, parent);
  }
  if (status) return status;
  skip_blanks(p);
  return peek(p) == ':' ? read_share(p, parent, *first != *last, *last) : ORR_OK;
}

static orr_status read_children(parser *p, orr_plan_node *node) {
  orr_plan_node **tail = &node->first;
  const char *name = orr_plan_kind_name(node->kind);
  skip_blanks(p);
  if (peek(p) == '>' || peek(p) == ';') {
    return orr_plan_fail(p->text, p->at, "%s<> names no device; %s<0> has one", name, name);
  }
  for (;;) {
    orr_plan_node *first = NULL, *last = NULL;
    skip_blanks(p);
    orr_status status = read_child(p, node, &first, &last);
    if (status || !last) return status;
    *tail = first;
    tail = &last->next;
    for (; first; first = first->next) node->n_children++;
    skip_blanks(p);
    if (peek(p) == '>' || peek(p) == ';') return ORR_OK;
    if (peek(p) != ',') return orr_plan_fail(p->text, p->at, "expected '>' or ','");
    p->at++;
  }
}

static orr_status read_node(parser *p, orr_plan_node **out) {
  orr_plan_kind kind;
  int length = node_begins(p, &kind);
  if (length == 0) {
    return orr_plan_fail(p->text, p->at,
                         "a plan begins with data<, model< or tensor<; "
                         "one device is data<0>");
  }
  if (p->depth >= ORR_PLAN_MAX_DEPTH) {
    return orr_plan_fail(p->text, p->at, "nodes are nested deeper than %d", ORR_PLAN_MAX_DEPTH);
  }
  orr_plan_node *node = *out = new_node(p, kind);
  if (!node) return ORR_EMEM;
  p->at += length;
  skip_blanks(p);
  p->at++; /* '<' */
  p->depth++;
  orr_status status = read_children(p, node);
  if (!status && peek(p) == ';') {
    p->at++;
    status = read_options(p, node);
  }
  p->depth--;
  if (!status) p->at++; /* '>' */
  return status;
}

/* -- the whole ---------------------------------------------------------------------------- */

/* The source of the plan: prefix and text, with a zero byte inside the text refused. */
static orr_status take_source(orr_plan *plan, const char *prefix, const char *text,
                              size_t length) {
  size_t before = prefix ? strlen(prefix) : 0;
  if (length > ORR_PLAN_MAX_TEXT) {
    return orr_fail(ORR_EARG, "plan: the text has %zu bytes, at most %d are read", length,
                    ORR_PLAN_MAX_TEXT);
  }
  char *source = orr_plan_take(plan, before + length + 1);
  if (!source) return ORR_EMEM;
  if (before) memcpy(source, prefix, before);
  if (length) memcpy(source + before, text, length);
  plan->source = source;
  if (strlen(source) < before + length) {
    return orr_plan_fail(source, (int)strlen(source), "a zero byte in the text");
  }
  return ORR_OK;
}

static orr_status parse(orr_plan *plan) {
  parser p = {.plan = plan, .text = plan->source};
  skip_blanks(&p);
  orr_status status = read_node(&p, &plan->root);
  if (status) return status;
  skip_blanks(&p);
  if (peek(&p)) {
    return orr_plan_fail(p.text, p.at, "the plan ended before this text; one plan is one node");
  }
  status = orr_plan_build_stages(plan);
  if (status) return status;
  char *text = orr_plan_node_text(plan->root);
  if (!text) return ORR_EMEM;
  plan->text = orr_plan_take_text(plan, text, strlen(text));
  free(text);
  return plan->text ? ORR_OK : ORR_EMEM;
}

orr_status orr_plan_parse(const char *prefix, const char *text, size_t length, orr_plan **out) {
  *out = NULL;
  orr_plan *plan = calloc(1, sizeof *plan);
  if (!plan) return orr_fail(ORR_EMEM, "plan: out of memory");
  orr_status status = take_source(plan, prefix, text, length);
  if (!status) status = parse(plan);
  if (status) {
    orr_plan_free(plan);
    return status;
  }
  *out = plan;
  return ORR_OK;
}
