#!/bin/sh
# gpu_kit.sh LUA BUILD KIT: packs what was built in BUILD, the interpreter and what it links into KIT, under
# 60 MiB, to be carried to a bare machine with CUDA, cuDNN and NCCL; `KIT/run` there runs the GPU's specs
# and benchmark (tools/gpu_run.lua).
# Invariant: the kit needs nothing of the machine but the driver, CUDA's libraries, a shell and a C library.
# To pack more: a line here, and its path in gpu_run.sh where it is searched.
set -e
lua=$(command -v "$1") build=$2 kit=$3
name=$(basename "$lua") modules=$2/$(basename "$lua")/orrery
test -f "$modules/cuda.so" || { echo "make gpu-kit: the plug-in is not built (make cuda)" >&2; exit 1; }
rm -rf "$kit"
mkdir -p "$kit/lib" "$kit/bin" "$kit/share" "$kit/$name/orrery"
cp "$lua" "$kit/lib/interpreter"
printf '%s\n' "$name" > "$kit/lib/name"
# Libraries beside a C library and CUDA's; gpu_run.sh uses those that the machine lacks.
ldd "$lua" "$modules/libcore.so" "$modules/cuda.so" | awk '$3 ~ /^\// { print $3 }' | sort -u |
  grep -v -E '/(libc|libm|libdl|libpthread|librt|ld-linux[^/]*|lib(cu|nccl|nv)[^/]*)\.so' |
  while read -r library; do cp -L "$library" "$kit/lib/"; done
for onednn in $(ldconfig -p 2>/dev/null | awk '/libdnnl\.so\.[0-9]+ / { print $NF }' | head -1); do
  cp -L "$onednn" "$kit/lib/$(basename "$onednn")"
done
cp -r lua spec tools examples bench "$kit/"
rm -rf "$kit/bench/results"
cp "$modules"/*.so "$kit/$name/orrery/"
strip --strip-debug "$kit/$name/orrery"/*.so
cp "$build/gpu_control" "$kit/bin/"
for place in $("$lua" -e 'print((package.path .. ";" .. package.cpath):gsub(";", "\n"))' | sed -n 's|/?.*||p' | sort -u); do
  for module in busted luassert say term system pl mediator cliargs lfs ltn12 cjson; do
    for found in "$place/$module" "$place/$module.lua" "$place/$module.so"; do
      if test -e "$found"; then cp -rL "$found" "$kit/share/"; fi
    done
  done
done
cp "$(command -v busted)" "$kit/bin/busted"
sed -e "s|@LUADIR@|lua|; s|@LIBDIR@|@NAME@|; s|@LUAS@|$name|" tools/orrery.in > "$kit/bin/orrery"
cp tools/gpu_run.sh "$kit/run"
chmod +x "$kit/run" "$kit/bin/orrery"
du -sm "$kit" | awk '{ print "gpu-kit: " $1 " MiB in " $2; if ($1 > 60) { print "gpu-kit: above 60 MiB"; exit 1 } }'
