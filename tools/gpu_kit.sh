#!/bin/sh
# gpu_kit.sh LUA BUILD: packs the built tree, the interpreter and what it links into BUILD/gpu-kit, under
# 60 MiB, to be carried to a bare machine with CUDA, cuDNN and NCCL; `gpu-kit/run` there runs the specs on
# its GPU and writes results.json: card, driver, clocks, date, and what passed.
# Invariant: the kit needs nothing of the machine but the driver, CUDA's libraries and a C library.
set -e
lua=$(command -v "$1") build=$2 kit=$2/gpu-kit
test -f "$build/$(basename "$lua")/orrery/cuda.so" || { echo "make gpu-kit: the plug-in is not built (make cuda)" >&2; exit 1; }
rm -rf "$kit"
mkdir -p "$kit/lib" "$kit/lua" "$kit/share"
cp "$lua" "$kit/lib/lua-interpreter"
ldd "$lua" "$build/$(basename "$lua")/orrery/libcore.so" | awk '$3 ~ /^\// { print $3 }' | sort -u |
  grep -v -E '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*)\.so' | while read -r library; do cp -L "$library" "$kit/lib/"; done
for onednn in $(ldconfig -p 2>/dev/null | awk '/libdnnl\.so/ { print $NF }' | head -1); do cp -L "$onednn" "$kit/lib/"; done
cp -r lua/orrery "$kit/lua/"
cp -r "$build/$(basename "$lua")/orrery" "$kit/lua/"
strip --strip-debug "$kit/lua/orrery"/*.so
cp -r spec tools examples bench "$kit/"
for place in $("$lua" -e 'print((package.path .. ";" .. package.cpath):gsub(";", "\n"))' | sed -n 's|/?.*||p' | sort -u); do
  for module in busted luassert say term system pl mediator cliargs lfs ltn12 cjson; do
    for found in "$place/$module" "$place/$module.lua" "$place/$module.so"; do
      test -e "$found" && cp -r "$found" "$kit/share/"
    done
  done
done
cp "$(command -v busted)" "$kit/share/busted-command"
cp tools/gpu_run.sh "$kit/run"
chmod +x "$kit/run"
du -sm "$kit" | awk '{ print "gpu-kit: " $1 " MiB in " $2; if ($1 > 60) { print "gpu-kit: above 60 MiB"; exit 1 } }'
