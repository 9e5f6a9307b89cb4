#!/bin/sh
# deps.sh: installs the Debian packages that a task needs and that are missing.
#   deps.sh [--check] demo|test|lint|fake|all
# --check is quick and silent when nothing is missing. ORRERY_NO_DEPS=1 leaves packages alone.
# Invariant: packages come from the machine's own apt sources and nothing is upgraded on purpose.
# To add a package: in the list of the first task that needs it; later lists contain earlier ones.
set -eu

check=0
if [ "${1:-}" = --check ]; then
  check=1
  shift
fi
task=${1:-all}
[ -z "${ORRERY_NO_DEPS:-}" ] || exit 0

demo="gcc libc6-dev luajit libluajit-5.1-dev libdnnl-dev libreadline-dev lua-cjson"
test="$demo lua-busted lua5.1 liblua5.1-0-dev lua5.4 liblua5.4-dev luarocks"
lint="$demo clang-format clang-tidy lua-check"
fake="$test g++"
case $task in
  demo) want=$demo ;;
  test) want=$test ;;
  lint) want=$lint ;;
  fake) want=$fake ;;
  all) want="$fake clang-format clang-tidy lua-check" ;;
  *)
    echo "usage: deps.sh [--check] demo|test|lint|fake|all" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null 2>&1 || ! command -v apt-get >/dev/null 2>&1; then
  [ "$check" = 1 ] && exit 0
  echo "deps: this is no Debian system; install the equivalents of: $want" >&2
  exit 1
fi

missing=
for package in $want; do
  # Status of every architecture of the package; one installed copy is enough.
  dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
    missing="$missing $package"
done
if [ -z "$missing" ]; then
  [ "$check" = 1 ] || echo "deps: nothing is missing"
  exit 0
fi

sudo=
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null 2>&1; then
    echo "deps: as root run: apt-get install -y --no-install-recommends$missing" >&2
    exit 1
  fi
  sudo=sudo
fi
echo "deps: installing$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Names of packages must split into words.
# shellcheck disable=SC2086
install() {
  $sudo env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $missing >"$log" 2>&1
}
install || {
  { $sudo apt-get update -qq >"$log" 2>&1 && install; } || {
    cat "$log" >&2
    echo "deps: apt-get could not install:$missing" >&2
    exit 1
  }
}
