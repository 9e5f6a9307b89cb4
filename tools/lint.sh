#!/bin/sh
# lint.sh: formatting, clang-tidy, luacheck and layers; every check runs, any finding fails.
# From the environment: BUILD, LUA, LUA_INCDIR, DEFINES (as the Makefile has them), JOBS.
# Invariant: it changes no file. To add a check: another `check` line.
set -u

status=0
check() {
  name=$1
  shift
  if "$@"; then echo "ok   $name"; else
    echo "FAIL $name"
    status=1
  fi
}

sources() { find csrc kernels examples -name '*.c' -o -name '*.h' | LC_ALL=C sort; }
format() { sources | xargs -r clang-format --dry-run -Werror; }

# One process a file, JOBS at a time; a clean file is not read again until it or a header changes.
tidy() {
  stamps=${BUILD:-build}/tidy
  mkdir -p "$stamps"
  newest=$(ls -t csrc/*.h kernels/*.h kernels/*.def .clang-tidy 2>/dev/null | head -n 1)
  for file in csrc/*.c kernels/*.c; do
    [ -e "$file" ] || continue
    stamp=$stamps/$(echo "$file" | tr / _)
    if [ -e "$stamp" ] && [ "$stamp" -nt "$file" ] && [ "$stamp" -nt "$newest" ]; then continue; fi
    printf '%s\n' "$file"
  done | STAMPS=$stamps xargs -r -P "${JOBS:-2}" -I{} sh tools/tidy.sh {}
}

check clang-format format
check clang-tidy tidy
check luacheck luacheck -q .
check layers "${LUA:-luajit}" tools/layers.lua
exit $status
