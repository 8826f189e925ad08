#!/usr/bin/env bash
# Make .venv-gpu hold what requirements/gpu-py3*.txt pin, TransformerEngine built against its torch, and this project
# (editable). Nothing happens when it does already.
#
#   PYTHON=/path/to/python3.12   which interpreter to use, when it is not on the PATH: 3.11 or 3.12
#   CUDA_HOME=/path              the CUDA toolkit, when nvcc is not on the PATH and not in /usr/local/cuda
#   MAX_JOBS=4                   compiler processes of the build, 2 to 4 GB each; default: all cores
#   WITHOUT_GPU=1                no driver is needed, and no kernel runs (scripts/check-gpu-environment.sh)
#
# Exit 3: this machine lacks something; the messages name all of it, before anything is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv-gpu log=.venv-gpu/setup.log min_driver=580 cuda=13 min_gxx=11 disk_gb=15
readonly os_release=${OS_RELEASE:-/etc/os-release}
started=$SECONDS missing=()

say() { printf '[setup-gpu %4ds] %s\n' $((SECONDS - started)) "$*"; }

not_ready() {
  printf 'setup-gpu: %s\n' "$@" >&2
  exit 3
}

run() {
  local what=$1
  shift
  say "$what"
  "$@" >>"$log" 2>&1 || {
    grep -E '^ *(ERROR|error|.*Error:)' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
    not_ready "$what failed; all of the output is in $log. Run the command again to start over"
  }
}

# -- what this machine needs; each check adds a sentence to `missing`

check_driver() {
  local driver
  command -v nvidia-smi >/dev/null ||
    { missing+=("no NVIDIA driver: nvidia-smi is not on the PATH. Install driver $min_driver or newer"); return; }
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  if ! [[ ${driver%%.*} =~ ^[0-9]+$ ]]; then
    missing+=("nvidia-smi names no driver: is a GPU visible to this process?")
  elif ((${driver%%.*} < min_driver)); then
    missing+=("the driver is $driver; CUDA $cuda needs $min_driver or newer. Update the driver")
  fi
}

check_toolkit() {
  local toolkit
  command -v nvcc >/dev/null || {
    missing+=("no nvcc, by which SGLang and TransformerEngine compile kernels. Install the CUDA toolkit $cuda (apt install \
cuda-toolkit-$cuda-0, from NVIDIA's repository), or say CUDA_HOME=/path/to/it make setup-gpu")
    return
  }
  toolkit=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p' || true)
  [[ $toolkit == "$cuda" ]] ||
    missing+=("nvcc is of CUDA ${toolkit:-(unknown)}; torch in requirements/gpu.txt is built for CUDA $cuda. Install \
cuda-toolkit-$cuda-0 beside it, and say CUDA_HOME=/path/to/it make setup-gpu")
}

check_compiler() {
  local found
  found=$(g++ -dumpversion 2>/dev/null | cut -d. -f1 || true)
  [[ $found =~ ^[0-9]+$ ]] && ((found >= min_gxx)) ||
    missing+=("g++ is ${found:-missing}, and $min_gxx or newer compiles TransformerEngine and, in runs, Triton's launchers: \
apt install g++")
}

check_disk() {
  local free_kb at=.
  [[ ! -d $venv ]] || at=$venv/ # it may be a link
  free_kb=$(df -Pk "$at" | awk 'NR == 2 { print $4 }')
  [[ ! -d $venv ]] || free_kb=$((free_kb + $(du -sk "$venv/" | cut -f1))) # which will be removed first
  ((free_kb >= disk_gb * 1000000)) ||
    missing+=("$PWD has $((free_kb / 1000000)) GB free, and $venv takes $disk_gb GB. Free some, or make $venv a link to an \
empty folder on a larger disk")
}

# How this machine gets a Python with headers. Ubuntu 22.04 has a release candidate of 3.11 only.
python_remedy() {
  local release uv
  uv="python3 -m pip install --user uv && python3 -m uv python install 3.12, then \
PYTHON=\$(python3 -m uv python find 3.12) make setup-gpu"
  release=$(. "$os_release" 2>/dev/null && echo "${ID:-}-${VERSION_ID:-}" || true)
  case $release in
    ubuntu-24.04) echo "apt install python3.12-venv python3.12-dev" ;;
    ubuntu-22.04) echo "add-apt-repository ppa:deadsnakes/ppa && apt install python3.12-venv python3.12-dev; or without root: $uv" ;;
    debian-12) echo "apt install python3.11-venv python3.11-dev" ;;
    *) echo "$uv" ;;
  esac
}

# Prints what is wrong with an interpreter, or nothing.
flaw_of() {
  "$1" - <<'PYTHON' 2>/dev/null || true
import os, sys, sysconfig
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    print(f"is {version}, and SGLang's packages have wheels for 3.11 and 3.12")
elif sys.version_info.releaselevel != "final":
    print(f"is {version}{sys.version_info.releaselevel}, which is no release")
else:
    try:
        import ensurepip, venv
    except ImportError:
        print("cannot make virtual environments")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        print("has no Python.h, which TransformerEngine and, in runs, Triton compile against")
PYTHON
}

check_python() {
  local candidate flaw flaws=
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    "$candidate" -c '' 2>/dev/null || continue # a pyenv shim exists even where the version behind it does not
    flaw=$(flaw_of "$candidate")
    if [[ -z $flaw ]]; then
      python=$candidate
      return
    fi
    flaws+="${flaws:+; }$candidate ${flaw//$'\n'/ and }"
  done
  missing+=("no Python 3.11 or 3.12 with venv and headers (${flaws:-${PYTHON:-the PATH} has none}): $(python_remedy)")
}

command -v flock >/dev/null && exec 9<. && flock 9 # one set-up at a time in this folder
stamp=$({ pwd; echo "${WITHOUT_GPU:-}"; cat requirements/gpu*.txt pyproject.toml "${BASH_SOURCE[0]}"; } | sha256sum)
[[ ! -f $venv/requirements.stamp || $(<"$venv/requirements.stamp") != "$stamp" ]] || exit 0

[[ -z ${CUDA_HOME:-} ]] || PATH=$CUDA_HOME/bin:$PATH
command -v nvcc >/dev/null || PATH=/usr/local/cuda/bin:$PATH
python=
[[ -n ${WITHOUT_GPU:-} ]] || check_driver
check_toolkit
check_compiler
check_disk
check_python
((${#missing[@]} == 0)) || not_ready "${missing[@]}"

say "making $venv with $("$python" --version), about $disk_gb GB on disk"
[[ ! -L $venv ]] || mkdir -p "$(readlink -f "$venv")"
rm -rf "${venv:?}"/* "$venv"/.[!.]*
"$python" -m venv "$venv"
: >"$log"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps)
lock=requirements/gpu-$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt
run "what $lock pins (1 of 4)" "${pip[@]}" --require-hashes -r "$lock"
# The extension is linked against the torch that is installed, whose ABI differs from others': hence no isolation, and no
# wheel for some other torch: neither of its project's release page, which its set-up would look for and not verify, nor
# from pip's cache, built earlier.
# The build searches the toolkit's own folder only; cuDNN's and NCCL's headers are in torch's dependencies.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
headers=$packages/nvidia
run "TransformerEngine, compiled here: some minutes (2 of 4)" env NVTE_PYTORCH_FORCE_BUILD=TRUE \
  CPATH="$headers/cudnn/include:$headers/nccl/include:$headers/cu$cuda/include${CPATH:+:$CPATH}" \
  "${pip[@]}" --no-cache-dir --no-build-isolation --require-hashes -r requirements/gpu-source.txt
run "this project (3 of 4)" "${pip[@]}" --no-build-isolation --editable .
if [[ -z ${WITHOUT_GPU:-} ]]; then
  run "importing everything, one kernel (4 of 4)" "$venv/bin/python" -m tests.gpu.first_kernel
fi
printf '%s\n' "$stamp" >"$venv/requirements.stamp"
say "ready: make gpu-proof PYTHON=$venv/bin/python"
