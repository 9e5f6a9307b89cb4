/* report.cpp: what the fakes count and tell: calls and which of them must fail, handles that
 * are out, complaints.
 *
 * Invariant: all of it is called with orr_fake_lock held, and lives as long as exit handlers
 * do. ORRERY_FAKE_FAIL: the n-th call of any library fails, or (cudaMalloc, cudaMalloc:3) the
 * n-th of that name; ORRERY_FAKE_FAIL_KIND=sticky: and its device is lost.
 * To add a kind of failure: a word of ORRERY_FAKE_FAIL_KIND, its effect in orr_fake_fails.
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
long calls, fail_at;
bool fail_sticky, is_read;

void set_failure(const char *name, long n, bool sticky) {
  is_read = true;
  fail_name = name ? name : "";
  fail_at = n;
  fail_sticky = sticky;
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
  set_failure(name.c_str(), n, kind && strcmp(kind, "sticky") == 0);
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

bool orr_fake_fails(const char *name) {
  if (!is_read) read_environment();
  calls++;
  if (fail_at <= 0 || (!fail_name.empty() && fail_name != name) || --fail_at > 0) return false;
  failed_call = name;
  if (fail_sticky) orr_fake_lose(orr_fake_current(), "an error was injected");
  return true;
}

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
void orr_fake_fail_after(long n, int sticky) { set_failure("", n, sticky != 0); }
void orr_fake_fail_at(const char *name, long n, int sticky) {
  set_failure(name, n, sticky != 0);
}
/* Blocks of memory, streams, events, graphs, and what the libraries gave out. */
long orr_fake_live(void) { return (long)handles.size(); }

} // extern "C"

__attribute__((destructor)) static void say_leaks() {
  if (!orr_fake_number("ORRERY_FAKE_LEAKS", 0)) return;
  if (orr_fake_live()) fprintf(stderr, "fake: live at the end: %s\n", orr_fake_left().c_str());
  if (!report.empty()) fprintf(stderr, "fake: %s\n", report.c_str());
}
