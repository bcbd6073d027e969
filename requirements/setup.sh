#!/usr/bin/env bash
# Brings .venv in line with requirements/<device>.lock:  setup.sh cpu | setup.sh gpu
# Resolves pyproject.toml into both locks again:         setup.sh lock [OPTION OF uv pip compile ...]
#
# Does nothing when .venv is up to date. Safe to interrupt and to run again: the stamp is written last, and a .venv without
# one is made anew. Needs Python 3.11+ with venv, and whatever index pip is configured for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=$1
lock=requirements/${device/#lock/cpu}.lock
venv=.venv
stamp=$venv/ownloop-stamp
log=$venv/setup.log

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Runs a command with its output in the log, and shows the end of the log if it fails.
quietly() {
  if ! "$@" >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "set-up failed; the whole log is in $log. Wheels that the registry lacks, torch's CPU build among them, are looked
       for where pip's configuration points: find-links and extra-index-url."
  fi
}

# The first of $PYTHON (default python3) and the usual names that is new enough.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed; '${PYTHON:-python3}' is $("${PYTHON:-python3}" --version 2>&1 || true). Name another: make train PYTHON=python3.11"
}

# What pip is configured with under one name, as words, where pip itself looks: the environment, then [install], then [global].
pip_option() {
  local variable=PIP_${1^^}
  variable=${variable//-/_}
  if [ -n "${!variable:-}" ]; then
    echo "${!variable}" | xargs
  else
    { "$venv/bin/python" -m pip config get "install.$1" ||
      "$venv/bin/python" -m pip config get "global.$1" || true; } 2>/dev/null | xargs
  fi
}

# uv does not read pip's configuration; hands it on, except where uv's own variables are set.
hand_pip_configuration_to_uv() {
  local find_links index_url extra_index_url cert
  find_links=$(pip_option find-links)
  index_url=$(pip_option index-url)
  extra_index_url=$(pip_option extra-index-url)
  cert=$(pip_option cert)
  if [ -n "$find_links" ]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-${find_links// /,}}; fi
  if [ -n "$index_url" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index_url}; fi
  # pip takes the best version from all indexes; uv would stop at the first that knows the name.
  if [ -n "$extra_index_url" ]; then
    export UV_INDEX=${UV_INDEX:-$extra_index_url} UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
  fi
  if [ -n "$cert" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}; fi
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} # seconds without a byte; uv gives up after 30
}

[ -f "$lock" ] || die "DEVICE is '$device'; there is a lock for: $(cd requirements && ls ./*.lock | sed 's|./||; s|\.lock||' | xargs)"

# One set-up at a time in this checkout; the lock goes with the process.
exec 9<requirements/setup.sh
if command -v flock >/dev/null && ! flock -n 9; then
  say "waiting for another set-up of this checkout"
  flock 9
fi

# Two lines: what is installed, and where. Scripts in .venv name its path, so a checkout that was moved needs a new one.
# Of pyproject.toml, what follows the first [tool] table configures tools that read it themselves.
wanted="$device $({ cat "$lock"; sed '/^\[tool\./,$d' pyproject.toml; } | sha256sum | cut -c1-16)"$'\n'"$PWD"
found=$(cat "$stamp" 2>/dev/null || true)
usable=no
if "$venv/bin/uv" --version >/dev/null 2>&1 && [ "${found#*$'\n'}" = "$PWD" ]; then usable=yes; fi
if [ "$usable" = yes ] && [ "$found" = "$wanted" ] && [ -x "$venv/bin/python" ]; then exit 0; fi

if [ "$usable" = no ]; then
  if [ -e "$venv" ]; then
    say "$venv is incomplete; making it anew"
    rm -rf "$venv"
  fi
  python=$(find_python)
  say "1/3 Python environment with uv ($("$python" --version))"
  mkdir "$venv"
  quietly "$python" -m venv "$venv"
  quietly "$venv/bin/python" -m pip --disable-pip-version-check install "$(grep '^uv==' "$lock")"
fi
hand_pip_configuration_to_uv

if [ "$device" = lock ]; then
  shift
  for device in cpu gpu; do
    say "resolving requirements/$device.lock"
    "$venv/bin/uv" pip compile pyproject.toml --extra "$device" --extra tinker --extra megatron --extra dev --override "requirements/overrides-$device.txt" \
      --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --quiet \
      --custom-compile-command "make lock" --output-file "requirements/$device.lock" "$@"
  done
  exit 0
fi

rm -f "$stamp"
say "2/3 $(grep -c '==' "$lock") packages of $lock"
quietly "$venv/bin/uv" pip sync --python "$venv/bin/python" "$lock"
say "3/3 ownloop itself, and bytecode"
quietly "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
# Otherwise the processes of the first run would each compile the same modules at once. Some files are for later Pythons.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -qq -j 0 "$packages"/{torch,torchtitan,transformers,vllm} || true
for module in controller.meshes.store trainer.engines.titan.engine generator.engine; do # and whatever else a start imports
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import $module" >>"$log" 2>&1 || true
done
echo "$wanted" >"$stamp"
say "done in ${SECONDS} s"
