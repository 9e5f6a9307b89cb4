/* control.c: what this machine can do at this moment: two threads of arithmetic, one of copying.
 *
 * Reads commands from standard input and answers each with one line:
 *   scale           how much two threads do in the time of one; 2 where both cores are ours
 *   memcpy BYTES N  seconds of N copies of BYTES between two blocks written before
 * Invariant: no thread but the measured ones runs, and none is left when an answer is given.
 * To add a command: a branch in main.
 */
#define _GNU_SOURCE /* affinity */
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 4000000 }; /* about 10 ms of dependent multiply-adds */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Not inlined: the loop would move to the other side of a clock. */
__attribute__((noinline)) static void *arithmetic(void *result) {
  double a = 1.0, b = 1.5;
  for (int k = 0; k < ROUNDS; k++) {
    a = a * 0.999999 + 1e-6;
    b = b * 0.999998 + 2e-6;
  }
  *(volatile double *)result = a + b;
  return NULL;
}

/* Where the machine has two processors each of the two threads has its own; with more the scheduler
 * finds two that share no core. */
static void stay_on(pthread_t thread, int processor) {
  cpu_set_t both, one;
  if (pthread_getaffinity_np(thread, sizeof both, &both) || CPU_COUNT(&both) != 2) return;
  CPU_ZERO(&one);
  for (int k = 0, seen = 0; k < CPU_SETSIZE; k++)
    if (CPU_ISSET(k, &both) && seen++ == processor) CPU_SET(k, &one);
  pthread_setaffinity_np(thread, sizeof one, &one);
}

/* Seconds that `n` threads (1 or 2) take, each for the whole loop; negative without threads. */
static double threads(int n) {
  pthread_t self = pthread_self(), other;
  cpu_set_t all;
  double result[2];
  if (pthread_getaffinity_np(self, sizeof all, &all)) return -1;
  double start = now();
  if (n == 2 && pthread_create(&other, NULL, arithmetic, &result[1])) return -1;
  if (n == 2) {
    stay_on(other, 1);
    stay_on(self, 0);
  }
  arithmetic(&result[0]);
  if (n == 2) pthread_join(other, NULL);
  double seconds = now() - start;
  pthread_setaffinity_np(self, sizeof all, &all);
  return seconds;
}

static double copy(size_t bytes, long n) {
  char *from = malloc(bytes), *to = malloc(bytes);
  double seconds = -1;
  if (!from || !to) goto done;
  memset(from, 1, bytes);
  memset(to, 2, bytes);
  double start = now();
  for (long k = 0; k < n; k++) {
    memcpy(to, from, bytes);
    __asm__ volatile("" ::"r"(to) : "memory"); /* the copy must happen */
  }
  seconds = now() - start;
done:
  free(from);
  free(to);
  return seconds;
}

int main(void) {
  char line[128];
  const struct timespec pause = {.tv_nsec = 5000000}; /* threads that spin go to sleep */
  while (fgets(line, sizeof line, stdin)) {
    size_t bytes;
    long n;
    nanosleep(&pause, NULL);
    if (!strcmp(line, "scale\n")) {
      double before = threads(1), both = threads(2), after = threads(1);
      double one = before < after ? before : after;
      printf("%.4f\n", both > 0 ? 2 * one / both : 0.0);
    } else if (sscanf(line, "memcpy %zu %ld", &bytes, &n) == 2) {
      printf("%.9f\n", copy(bytes, n));
    } else {
      printf("error unknown command\n");
    }
    fflush(stdout);
  }
  return 0;
}
