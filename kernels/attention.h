/* attention.h: scaled dot-product attention, o = softmax(scale q k^T) v, forward and backward.
 *
 * Invariant: no matrix of queries by keys is ever kept: scores live one tile at a time, and
 * backward computes them again from the logarithm of each row's sum. Each head is worked by
 * one thread in one order, so results do not depend on the team. Room comes from the caller.
 * To add an input (a bias, say): a pointer in the body's `head`, read where scores are made.
 * Method: T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention: Fast and Memory-Efficient
 * Exact Attention with IO-Awareness", NeurIPS 2022, algorithms 1 and 4; the order of loops and
 * the saved logarithm as in T. Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
 */
#ifndef ORR_K_ATTENTION_H
#define ORR_K_ATTENTION_H

#include <stddef.h>

#include "kernel.h"

/* q (N, H, T, D), k (N, H, S, D), v (N, H, S, E), o and g (N, H, T, E) of one float type, any
 * strides; lse (N, H, T), of f64 with f64 and else of f32: log(sum_j exp(scale q_i . k_j)).
 * causal: query i sees keys j <= i. Without keys o is 0. */
typedef struct orr_k_attention_args {
  const orr_view *q, *k, *v, *o, *lse;
  const orr_view *g, *gq, *gk, *gv; /* of backward alone */
  bool causal;
  double scale;
  int threads; /* no more than this work at once, each with its own part of `room` */
  void *room;  /* orr_k_attention_room bytes, aligned to 64 */
} orr_k_attention_args;

/* Threads worth using here and now. */
int orr_k_attention_threads(const orr_view *q);
size_t orr_k_attention_room(const orr_k_attention_args *a, bool backward);

void orr_k_attention(const orr_k_attention_args *a);
/* gq, gk, gv from the output o, its gradient g, and lse. */
void orr_k_attention_back(const orr_k_attention_args *a);

#endif
