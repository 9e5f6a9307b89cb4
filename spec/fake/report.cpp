/* report.cpp: what the fakes count and tell: calls and which of them must fail, handles that
 * are out, complaints.
 *
 * Invariant: all of it is called with orr_fake_lock held, and lives as long as exit handlers
 * do. ORRERY_FAKE_FAIL: the n-th call of any library fails, or (cudaMalloc, cudaMalloc:3) the
 * n-th of that name; ORRERY_FAKE_FAIL_KIND=sticky: and its device is lost. From within the
 * process: orr_fake_fail_at, again and again.
 * To add a kind of failure: a row of orr_fake_kind, its effect where that is asked for.
 */
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"

std::recursive_mutex orr_fake_lock;

namespace {

std::string &report = *new std::string;
std::string &failed_call = *new std::string;
std::string &fail_name = *new std::string; /* "": any */
std::map<const void *, std::string> &handles = *new std::map<const void *, std::string>;
std::map<std::string, long> &called = *new std::map<std::string, long>;
long calls, fail_at;
orr_fake_kind fail_kind;
bool is_read;

void set_failure(const char *name, long n, int kind) {
  is_read = true;
  fail_name = name ? name : "";
  fail_at = n;
  fail_kind = (orr_fake_kind)kind;
  failed_call.clear();
}

void read_environment() {
  const char *text = getenv("ORRERY_FAKE_FAIL"), *kind = getenv("ORRERY_FAKE_FAIL_KIND");
  std::string name = text ? text : "";
  long n = 1;
  size_t colon = name.find(':');
  if (colon != std::string::npos) {
    n = strtol(name.c_str() + colon + 1, nullptr, 10);
    name.resize(colon);
  } else if (name.empty() || strspn(name.c_str(), "0123456789") == name.size()) {
    n = strtol(name.c_str(), nullptr, 10);
    name.clear();
  }
  set_failure(name.c_str(), n, kind && strcmp(kind, "sticky") == 0 ? FAKE_LOST : FAKE_PLAIN);
}

bool is_picked(const char *name) {
  if (!is_read) read_environment();
  if (fail_at <= 0 || (!fail_name.empty() && fail_name != name) || --fail_at > 0) return false;
  failed_call = name;
  return true;
}

} // namespace

long orr_fake_number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

void orr_fake_complain(const char *format, ...) {
  char line[600];
  va_list ap;
  va_start(ap, format);
  vsnprintf(line, sizeof line, format, ap);
  va_end(ap);
  if (report.find(line) != std::string::npos) return; /* once is enough */
  if (report.size() < 4000) report += report.empty() ? line : std::string("; ") + line;
}

bool orr_fake_fails(const char *name) { return orr_fake_fails_on(orr_fake_current(), name); }

bool orr_fake_fails_on(int device, const char *name) {
  calls++;
  called[name]++;
  if (fail_kind == FAKE_ASYNC || fail_kind == FAKE_STALL || !is_picked(name)) return false;
  if (fail_kind == FAKE_LOST) orr_fake_lose(device, "an error was injected");
  return true;
}

bool orr_fake_picks(const char *name, orr_fake_kind kind) {
  return fail_kind == kind && is_picked(name);
}

orr_fake_kind orr_fake_kind_now(void) { return fail_kind; }

void orr_fake_born(const void *handle, const char *kind) { handles[handle] = kind; }

bool orr_fake_is(const void *handle, const char *kind) {
  auto found = handles.find(handle);
  if (found != handles.end() && found->second == kind) return true;
  orr_fake_complain("%s that is not there", kind);
  return false;
}

void orr_fake_gone(const void *handle) { handles.erase(handle); }

std::string orr_fake_left(void) {
  std::map<std::string, int> kinds;
  std::string text;
  for (auto &h : handles) kinds[h.second]++;
  for (auto &k : kinds)
    text += (text.empty() ? "" : ", ") + std::to_string(k.second) + " times " + k.first;
  return text;
}

extern "C" {

const char *orr_fake_report(void) { return report.c_str(); }
void orr_fake_forget(void) { report.clear(); }
long orr_fake_calls(void) { return calls; }
const char *orr_fake_failed_call(void) { return failed_call.c_str(); }
void orr_fake_fail_after(long n, int sticky) { set_failure("", n, sticky); }
void orr_fake_fail_at(const char *name, long n, int kind) { set_failure(name, n, kind); }
long orr_fake_called(const char *name) { return called.count(name) ? called[name] : 0; }
/* Blocks of memory, streams, events, graphs, and what the libraries gave out. */
long orr_fake_live(void) { return (long)handles.size(); }

} // extern "C"

__attribute__((destructor)) static void say_leaks() {
  if (!orr_fake_number("ORRERY_FAKE_LEAKS", 0)) return;
  if (orr_fake_live()) fprintf(stderr, "fake: live at the end: %s\n", orr_fake_left().c_str());
  if (!report.empty()) fprintf(stderr, "fake: %s\n", report.c_str());
  if (orr_fake_number("ORRERY_FAKE_LEAKS", 0) < 2) return;
  if (!failed_call.empty()) fprintf(stderr, "failed: %s\n", failed_call.c_str());
  for (auto &c : called)
    fprintf(stderr, "called by the end: %s %ld\n", c.first.c_str(), c.second);
}
