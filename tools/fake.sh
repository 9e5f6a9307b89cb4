#!/bin/sh
# fake.sh LUA BUILD SPECS: the specs on fake GPUs, built in BUILD by make fake.
# Ends with a line "N passed, N failed". Invariant: no CUDA, driver or GPU is needed.
lua=$1 build=$2 specs=$3
export BUILD="$build" COMMAND="$PWD/$build/bin/orrery" ORRERY_SPEC_DEVICES=cuda ORRERY_SANITIZER=1
export ORRERY_FAKE_GPUS="${ORRERY_FAKE_GPUS:-8}" SPEC_TIMEOUT="${SPEC_TIMEOUT:-600}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$lua" tools/test.lua "$lua" "$specs" | tee "$log"
SPEC_FOLDER=spec/fake "$lua" tools/test.lua "$lua" | tee -a "$log"
# Lanes in another order, device memory closed to the host, two logical devices a GPU.
ORRERY_FAKE_LANES=reverse ORRERY_FAKE_GUARD=1 ORRERY_OPS="add sum softmax cross_entropy layer_norm sort embedding" \
  "$lua" tools/test.lua "$lua" op_matrix | tee -a "$log"
ORRERY_CUDA_DEVICES=0,0,1,1,2,2,3,3 "$lua" tools/test.lua "$lua" zero | tee -a "$log"
awk '/^[0-9]+ passed, [0-9]+ failed$/ { p += $1; f += $3 } END { print p " passed, " f " failed"; exit f > 0 || p == 0 }' "$log"
