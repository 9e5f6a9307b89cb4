/* plan.h: the plan language: a tree that says which devices share the work, and how.
 *
 *     data<0,1>   model<0: 3, 1: 5>   tensor<0..3>   data<tensor<0,1>, tensor<2,3>; zero=3>
 *
 * Text is parsed to a tree of orr_plan_node (plan_parse.c), the tree is pulled into stages of
 * one mesh each (plan_stages.c), and the stages' leaves are matched to the devices that are
 * visible (plan_resolve.c). plan.c holds the option table, the canonical text and the errors'
 * shape.
 *
 * Invariant: an orr_plan that was returned is whole and never changes: its tree has stages, no
 * device stands in it twice, and parsing its canonical text gives an equal plan.
 * To add an option: a row in plan.c's table, its name in orr_plan_option. To add a kind of
 * node: orr_plan_kind, its name in plan.c, and what it does to meshes in plan_stages.c.
 */
#ifndef ORR_PLAN_H
#define ORR_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

#define ORR_PLAN_MAX_DEVICES 1024
#define ORR_PLAN_MAX_DEPTH 32
#define ORR_PLAN_MAX_TEXT 65536
#define ORR_PLAN_MAX_AXES 2

typedef enum orr_plan_kind {
  ORR_PLAN_DEVICE, /* a leaf */
  ORR_PLAN_DATA,   /* children hold replicas, the batch is split */
  ORR_PLAN_MODEL,  /* children hold consecutive layers: stages */
  ORR_PLAN_TENSOR  /* children split the layers themselves */
} orr_plan_kind;

typedef enum orr_plan_option {
  ORR_PLAN_ZERO,      /* data: shard optimizer state (1), gradients (2), parameters (3) */
  ORR_PLAN_BUCKET,    /* data: bytes of gradient reduced at a time */
  ORR_PLAN_SYNC_BN,   /* data: batch statistics over the axis */
  ORR_PLAN_MICRO,     /* data, model: micro-batches a step; one value for the plan */
  ORR_PLAN_SCHEDULE,  /* model: gpipe, 1f1b, interleaved */
  ORR_PLAN_CHUNKS,    /* model: pieces of the net a stage holds */
  ORR_PLAN_RECOMPUTE, /* model: true, false, stage, or a pattern of module names */
  ORR_PLAN_BALANCE,   /* model: flops, time */
  ORR_PLAN_SEQUENCE,  /* tensor: split the sequence between the split layers */
  ORR_PLAN_N_OPTIONS
} orr_plan_option;

typedef enum orr_plan_value_type {
  ORR_PLAN_INT,
  ORR_PLAN_BYTES,
  ORR_PLAN_BOOL,
  ORR_PLAN_WORD,   /* one of a few words */
  ORR_PLAN_PATTERN /* any word; module names with * and ? */
} orr_plan_value_type;

typedef struct orr_plan_option_row {
  const char *name;
  unsigned kinds; /* bit 1 << orr_plan_kind: the nodes that take it */
  orr_plan_value_type type;
  int64_t least, most;  /* INT, BYTES */
  const char *words[4]; /* WORD: the legal words, NULL ended */
  const char *takes;    /* the legal values, in an error's words */
} orr_plan_option_row;

typedef struct orr_plan_value {
  bool set;
  int64_t number;   /* INT, BYTES; BOOL as 0 or 1; WORD as the index of its word */
  const char *text; /* WORD, PATTERN */
  int at;           /* offset in the plan's source, for errors */
} orr_plan_value;

typedef enum orr_plan_naming {
  ORR_PLAN_BARE, /* 3: the third visible device, counting from 0 */
  ORR_PLAN_CPU,  /* cpu:3 */
  ORR_PLAN_CUDA, /* cuda:3 */
  ORR_PLAN_BUS   /* "0000:3b:00.0" or "GPU-5a2c": found by the environment */
} orr_plan_naming;

typedef struct orr_plan_node {
  orr_plan_kind kind;
  int at;                     /* offset of the node in the plan's source */
  int n_children;             /* 0 in a device */
  struct orr_plan_node *next; /* the next child of the same parent */
  struct orr_plan_node *first;
  orr_plan_value *options; /* ORR_PLAN_N_OPTIONS values; NULL in a device */
  int64_t count;           /* child of a model: its number of layers; 0: not given */
  const char *pattern;     /* child of a model: its modules' names; NULL: not given */
  orr_plan_naming naming;  /* device */
  int index;               /* device: BARE, CPU, CUDA */
  const char *id;          /* device: BUS */
} orr_plan_node;

typedef struct orr_plan_axis {
  orr_plan_kind kind; /* DATA or TENSOR */
  int size;
  const orr_plan_value *options; /* ORR_PLAN_N_OPTIONS values, agreed by the axis' nodes */
} orr_plan_axis;

/* One stage: a mesh of axes in tree order; n_devices is the product of their sizes. */
typedef struct orr_plan_stage {
  int n_axes;
  orr_plan_axis axis[ORR_PLAN_MAX_AXES];
  int n_devices;
  const orr_plan_node **leaf; /* the devices, row-major: the last axis runs fastest */
  int64_t count;              /* layers of this stage; 0: to be balanced */
  const char *pattern;        /* modules of this stage, or NULL */
} orr_plan_stage;

typedef struct orr_plan {
  struct orr_plan_block *blocks; /* all the plan's memory */
  const char *source;            /* what was parsed, with the prefix */
  const char *text;              /* canonical; parses to an equal plan */
  orr_plan_node *root;
  int n_stages;
  orr_plan_stage *stage;
  int n_devices;
  const orr_plan_value *options; /* model's options and micro, agreed by the whole tree */
} orr_plan;

/* Parses `length` bytes of text. `prefix` ("data", "model", "tensor") is put before the text,
 * so that "<0,1>" is whole; NULL: the text is a whole plan. On failure *out is NULL and the
 * message shows the text with a caret under the column at fault. */
orr_status orr_plan_parse(const char *prefix, const char *text, size_t length, orr_plan **out);
void orr_plan_free(orr_plan *plan);

/* The devices that are visible. A bare number names a CUDA device where there is one. */
typedef struct orr_plan_env {
  int n_cpu, n_cuda;
  const char *cpu_why, *cuda_why; /* why so many, "ORRERY_CPU_DEVICES=2"; may be NULL */
  /* (optional) The cuda index of a PCI bus id or UUID prefix; -1: none, -2: several. */
  int (*find)(const void *find_data, const char *id);
  const void *find_data;
} orr_plan_env;

typedef struct orr_plan_place {
  const char *kind; /* "cpu" or "cuda", static */
  int id;
} orr_plan_place;

/* Places of all stages, one stage after the other: stage s begins at first[s]. */
typedef struct orr_plan_places {
  int n_places;
  int *first;
  orr_plan_place *place;
} orr_plan_places;

orr_status orr_plan_resolve(const orr_plan *plan, const orr_plan_env *env,
                            orr_plan_places **out);
void orr_plan_places_free(orr_plan_places *places);

/* -- between the plan_*.c files and the Lua binding --------------------------------------- */

const char *orr_plan_kind_name(orr_plan_kind kind);
const orr_plan_option_row *orr_plan_option_of(orr_plan_option option);

/* Writes a device as the language does: 0, cpu:1, "0000:3b:00.0". Returns the length. */
int orr_plan_device_text(const orr_plan_node *device, char *buffer, size_t size);

/* Memory that lives as long as the plan; zeroed; NULL with the error set when there is none. */
void *orr_plan_take(orr_plan *plan, size_t bytes);
char *orr_plan_take_text(orr_plan *plan, const char *text, size_t length);

/* Fails with ORR_EARG: "plan: <message> at column c", the line of source, a caret. */
orr_status orr_plan_fail(const char *source, int at, const char *format, ...) ORR_PRINTF(3, 4);

/* The canonical text of a node, with its options; owned by the caller; NULL without memory. */
char *orr_plan_node_text(const orr_plan_node *node);

/* Fills stage, n_stages, n_devices and options from the tree. */
orr_status orr_plan_build_stages(orr_plan *plan);

#endif
