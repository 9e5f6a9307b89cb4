#!/bin/sh
# deps.sh: makes the Python environment that `make bench` compares with, outside the tree.
# ORRERY_BENCH_VENV names its folder (default: orrery/bench-venv in the user's cache). The newest PyTorch
# wheel comes first; where none can be had, Debian's python3-torch; where neither is, a word and success.
# Invariant: an environment that already imports torch is left alone.
# To add a package of the peer: after `torch numpy`.
set -eu

venv=${ORRERY_BENCH_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/orrery/bench-venv}
if "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "bench-deps: $venv has PyTorch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
  exit 0
fi
if command -v python3 >/dev/null 2>&1; then
  echo "bench-deps: installing torch and numpy into $venv (some GB)"
  mkdir -p "$(dirname "$venv")"
  if python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet torch numpy &&
    "$venv/bin/python" -c 'import torch'; then
    exit 0
  fi
fi
echo "bench-deps: the newest wheel could not be installed; trying Debian's python3-torch"
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
if command -v apt-get >/dev/null 2>&1 &&
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    python3-torch >/dev/null 2>&1; then
  echo "bench-deps: python3-torch is installed; the bench names it"
else
  echo "bench-deps: no PyTorch can be had here; the bench will skip it"
fi
