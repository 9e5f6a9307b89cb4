/* process.h: checks of the fake runtimes, each in a process of its own.
 *
 * Invariant: a check ends well when it returns, or by the signal that its row names; NEED and
 * SAYS end it with the line that failed.
 * To add a check: a row in the `processes` of a file.
 */
#ifndef ORR_FAKE_PROCESS_H
#define ORR_FAKE_PROCESS_H

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "../fake.h"

#define NEED(what)                                                                            \
  do {                                                                                        \
    if (what) break;                                                                          \
    printf("FAIL %s:%d: %s; the report: %s\n", __FILE__, __LINE__, #what, orr_fake_report()); \
    fflush(stdout);                                                                           \
    _exit(1);                                                                                 \
  } while (0)
/* The report holds the words; "": it is empty. */
#define SAYS(words) \
  NEED(*words ? strstr(orr_fake_report(), words) != NULL : !*orr_fake_report())

struct Process {
  const char *name;
  void (*run)();
  const char *environment; /* "A=1 B=2" */
  int signal;
};
extern const std::vector<Process> processes;

static void run_child(const Process &p) {
  std::stringstream words(p.environment);
  for (std::string word; words >> word;) {
    size_t at = word.find('=');
    setenv(word.substr(0, at).c_str(), word.c_str() + at + 1, 1);
  }
  if (p.signal && !freopen("/dev/null", "w", stderr)) _exit(1);
  p.run();
  fflush(stdout);
  _exit(0);
}

int main(int argc, char **argv) {
  int failed = 0;
  for (const Process &p : processes) {
    int status = 0;
    if (argc > 2 && strcmp(argv[2], p.name) != 0) continue;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) run_child(p);
    if (child < 0 || waitpid(child, &status, 0) < 0) return 1;
    bool well = p.signal ? WIFSIGNALED(status) && WTERMSIG(status) == p.signal
                         : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    printf("%s %s\n", well ? "ok" : "FAIL", p.name);
    failed += !well;
  }
  return failed != 0;
}

#endif
