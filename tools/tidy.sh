#!/bin/sh
# tidy.sh FILE: clang-tidy on one C file; a clean run leaves a stamp in $STAMPS for lint.sh.
# Invariant: any warning of .clang-tidy's list is an error. To add a check: in .clang-tidy.
set -u
file=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086
if clang-tidy --quiet --warnings-as-errors='*' "$file" -- -std=gnu11 -D_GNU_SOURCE -fopenmp -pthread ${DEFINES:-} \
  -I. -Icsrc -Ikernels -isystem spec/fake/include -I"${LUA_INCDIR:-/usr/include}" >"$log" 2>/dev/null; then
  touch "$STAMPS/$(echo "$file" | tr / _)"
else
  grep -A 2 'error:' "$log" || cat "$log"
  exit 1
fi
