#!/bin/sh
# gpu-kit/run [FOLDER]: on a machine with a GPU: the specs on cuda devices (all GPUs, then two logical
# devices a GPU), and FOLDER/results.json (default: here) with card, driver, clocks, date and counts.
# Invariant: a number stands in the results only if this run made it.
kit=$(cd "$(dirname "$0")" && pwd)
out=${1:-$kit}
export LD_LIBRARY_PATH="$kit/lib:$LD_LIBRARY_PATH"
export LUA_PATH="$kit/lua/?.lua;$kit/lua/?/init.lua;$kit/?.lua;$kit/share/?.lua;$kit/share/?/init.lua;;"
export LUA_CPATH="$kit/lua/?.so;$kit/share/?.so;;" PATH="$kit/bin:$PATH"
mkdir -p "$kit/bin" "$out"
printf '#!/bin/sh\nexec "%s/lib/lua-interpreter" "$@"\n' "$kit" > "$kit/bin/luajit"
printf '#!/bin/sh\nexec "%s/bin/luajit" "%s/share/busted-command" "$@"\n' "$kit" "$kit" > "$kit/bin/busted"
chmod +x "$kit/bin/luajit" "$kit/bin/busted"
cd "$kit" || exit 1
luajit -e 'print(require("orrery").devices())' || exit 1
gpus=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader 2>/dev/null | head -1)
run() { # name, devices, specs
  ORRERY_CUDA_DEVICES=$2 ORRERY_SPEC_DEVICES=cuda ORRERY_ROOT=$kit BUILD=$kit SPEC_TIMEOUT=900 \
    luajit tools/test.lua luajit "$3" > "$out/$1.log" 2>&1
  tail -1 "$out/$1.log"
}
ops=$(run ops 0,0,0,0,0 op_matrix)
plans=$(run plans 0,0,0,0,0,0,0,0 "plan sequence zero tensor_plan")
printf '{"date": "%s", "gpu": "%s", "ops": "%s", "plans": "%s"}\n' \
  "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$gpus" "$ops" "$plans" | tee "$out/results.json"
