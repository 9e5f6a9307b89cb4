#!/bin/sh
# sanitize.sh address|thread FOLDER: builds into FOLDER with a sanitizer and runs specs under it.
# From the environment: LUA, SPEC, MAKE, CC. Reports of the sanitizer fail the spec they happen in.
# Invariant: only Lua processes carry the sanitizer's runtime, never a shell (which dies of the thread
# one) or the compiler: the loader preloads it, where LD_PRELOAD would pass it on to every child.
# To silence code that is not ours: tools/tsan.supp, tools/lsan.supp.
set -eu
kind=$1
folder=$2
lua=${LUA:-lua5.1}
make=${MAKE:-make}
root=$(pwd)
sh tools/deps.sh --check test
$make -s --no-print-directory all libs examples BUILD="$folder" SAN="$kind" LUA="$lua" ARCH=
case $kind in
  address)
    runtime=$(${CC:-cc} -print-file-name=libasan.so)
    export ASAN_OPTIONS="detect_leaks=${ORRERY_LEAKS:-0}:abort_on_error=1:fast_unwind_on_malloc=0"
    export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
    export LSAN_OPTIONS="suppressions=$root/tools/lsan.supp"
    ;;
  thread)
    runtime=$(${CC:-cc} -print-file-name=libtsan.so)
    export TSAN_OPTIONS="suppressions=$root/tools/tsan.supp:halt_on_error=0:exitcode=66:second_deadlock_stack=1"
    # Waiting OpenMP threads of libraries are unknown to the tool; one thread has none.
    export OMP_NUM_THREADS=1
    ;;
  *)
    echo "usage: sanitize.sh address|thread FOLDER" >&2
    exit 2
    ;;
esac
# What specs run as the interpreter, and `orrery` by ORRERY_LUA; its name says which core is its own.
program=$(command -v "$lua")
loader=$(readelf -lW "$program" | sed -n 's/.*program interpreter: \(.*\)]/\1/p')
mkdir -p "$folder/preload"
wrapper=$(cd "$folder/preload" && pwd)/$(basename "$lua")
printf '#!/bin/sh\nexec "%s" --preload "%s" "%s" "$@"\n' "$loader" "$runtime" "$program" > "$wrapper"
chmod 755 "$wrapper"
# With fewer random bits of address space the tools find the memory that they must own.
run=
if command -v setarch >/dev/null 2>&1 && setarch -R true 2>/dev/null; then run="setarch -R"; fi
COMMAND="$root/$folder/bin/orrery" BUILD="$folder" PUC_SKIP="house install bench ${SAN_SKIP:-}" ORRERY_SANITIZER="$kind" \
  $run "$lua" tools/test.lua "$wrapper" "${SPEC:-*}"
