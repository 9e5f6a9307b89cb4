#!/bin/sh
# gpu-kit/run [FOLDER] [STEP...]: on a machine with a GPU: specs, sanitizer and benchmark, step by step, each
# with its log under FOLDER/logs, and FOLDER/results.json (default: the kit's folder results). `run list` names the steps;
# `run merge FOLDER FILE...` joins the results of several runs. Ends with 1 where a step failed.
# This file only makes the environment of tools/gpu_run.lua: the kit's interpreter and modules, libraries
# that the machine lacks, and where CUDA's are. To search CUDA in another place: `places`.
kit=$(cd "$(dirname "$0")" && pwd)
export PATH="$kit/bin:${PATH:-/usr/local/bin:/usr/bin:/bin}:/usr/local/cuda/bin:/usr/sbin:/sbin"
name=$(cat "$kit/lib/name")
# What Python is started with: its libraries are its own.
export ORRERY_PEER_LIBRARY_PATH="${LD_LIBRARY_PATH-}"
rm -rf "$kit/need"
mkdir -p "$kit/need"
for file in "$kit"/lib/*.so*; do
  library=$(basename "$file")
  ldconfig -p 2>/dev/null | grep -q "[[:space:]]$library " || ln -s "$file" "$kit/need/$library"
done
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$kit/need"
export LD_LIBRARY_PATH

missing() { ldd "$kit/$name/orrery/cuda.so" 2>/dev/null | awk '/not found/ { print $1 }'; }
if [ -n "$(missing)" ]; then
  site=$(LD_LIBRARY_PATH=$ORRERY_PEER_LIBRARY_PATH python3 -c \
    'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
  places="${CUDA_HOME:-/usr/local/cuda}/lib64 /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib
    /usr/lib/x86_64-linux-gnu /usr/lib64 $site/nvidia/*/lib"
  for library in $(missing); do
    for place in $places; do
      if [ -e "$place/$library" ]; then
        LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$place"
        break
      fi
    done
  done
fi
if [ -n "$(missing)" ]; then
  echo "gpu-kit/run: not found: $(missing | tr '\n' ' ')(set LD_LIBRARY_PATH to their folders)" >&2
  exit 1
fi

export LUA_PATH="$kit/lua/?.lua;$kit/lua/?/init.lua;$kit/?.lua;$kit/share/?.lua;$kit/share/?/init.lua;;"
export LUA_CPATH="$kit/$name/?.so;$kit/share/?.so;;"
export ORRERY_GPU_CONTROL="$kit/bin/gpu_control" ORRERY_LUA="$name" BUILD="$kit" COMMAND="$kit/bin/orrery"
printf '#!/bin/sh\nexec "%s/lib/interpreter" "$@"\n' "$kit" > "$kit/bin/$name"
chmod +x "$kit/bin/$name"
here=$(pwd)
cd "$kit" && exec "$name" tools/gpu_run.lua "$here" "$@"
