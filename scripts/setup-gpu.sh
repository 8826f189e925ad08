#!/usr/bin/env bash
# Make .venv-gpu hold what requirements/gpu.txt names, TransformerEngine built against its torch, and this project
# (editable). Nothing happens when it does already.
#
#   PYTHON=/path/to/python3.11   which interpreter to use, when it is not on the PATH
#   CUDA_HOME=/path              the CUDA toolkit, when nvcc is not on the PATH and not in /usr/local/cuda
#   MAX_JOBS=4                   compiler processes of the build, 2 to 4 GB each; default: all cores
#
# Exit 3: this machine lacks something; the message names it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv-gpu log=.venv-gpu/setup.log min_driver=580 cuda=13
started=$SECONDS

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

pin() { sed -n "s/^\($1[^ ;]*\).*/\1/p" requirements/gpu.txt; }

command -v nvidia-smi >/dev/null ||
  not_ready "needs an NVIDIA driver, and nvidia-smi is not on the PATH. Install driver $min_driver or newer"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
[[ ${driver%%.*} =~ ^[0-9]+$ ]] || not_ready "nvidia-smi names no driver: is a GPU visible to this process?"
((${driver%%.*} >= min_driver)) ||
  not_ready "the driver is $driver; CUDA $cuda needs $min_driver or newer. Update the driver"

[[ -z ${CUDA_HOME:-} ]] || PATH=$CUDA_HOME/bin:$PATH
command -v nvcc >/dev/null || PATH=/usr/local/cuda/bin:$PATH
command -v nvcc >/dev/null ||
  not_ready "needs the CUDA toolkit $cuda, because SGLang and TransformerEngine compile kernels, and there is no nvcc." \
    "Install it (cuda-toolkit-$cuda-0), or say CUDA_HOME=/path/to/it make setup-gpu"
toolkit=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
[[ $toolkit == "$cuda" ]] ||
  not_ready "nvcc is of CUDA ${toolkit:-(unknown)}; torch in requirements/gpu.txt is built for CUDA $cuda. Say CUDA_HOME=/path/to/it"

python=
for candidate in ${PYTHON:-python3.11 python3 python}; do
  if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[[ -n $python ]] || not_ready "needs Python 3.11 with venv, and ${PYTHON:-the PATH} has none: apt install python3.11-venv"

command -v flock >/dev/null && exec 9<. && flock 9 # one set-up at a time in this folder
stamp=$({ pwd; cat requirements/gpu.txt pyproject.toml "${BASH_SOURCE[0]}"; } | sha256sum)
if [[ ! -f $venv/requirements.stamp || $(<"$venv/requirements.stamp") != "$stamp" ]]; then
  say "making $venv with $("$python" --version), about 15 GB on disk"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  : >"$log"
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input)
  # First torch alone: TransformerEngine's extension names only `torch>=2.1` as its build requirement. Built in isolation
  # it would be linked against the newest torch, whose ABI differs from that of the one that it runs with.
  run "torch (1 of 4)" "${pip[@]}" "$(pin torch==)" setuptools wheel ninja cmake pybind11 packaging
  # The build searches the toolkit's own folder only; cuDNN's and NCCL's headers are in torch's dependencies.
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  headers=$packages/nvidia
  run "TransformerEngine, compiled here: some minutes (2 of 4)" env \
    CPATH="$headers/cudnn/include:$headers/nccl/include:$headers/cu$cuda/include${CPATH:+:$CPATH}" \
    "${pip[@]}" --no-build-isolation "$(pin transformer-engine)"
  run "everything else (3 of 4)" "${pip[@]}" -r requirements/gpu.txt --editable ".[rewards]"
  run "importing everything, one kernel (4 of 4)" "$venv/bin/python" -m tests.gpu.first_kernel
  printf '%s\n' "$stamp" >"$venv/requirements.stamp"
  say "ready: make gpu-proof PYTHON=$venv/bin/python"
fi
