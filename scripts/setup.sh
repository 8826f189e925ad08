#!/usr/bin/env bash
# Make .venv hold exactly what requirements/ pins, and this project (editable). Nothing happens when it does already.
#
#   PYTHON=/path/to/python3.11   which interpreter to use, when it is not on the PATH
#   TORCH_INDEX=URL              where to take torch from, for machines whose pip would take the CUDA build:
#                                https://download.pytorch.org/whl/cpu
#
# Exit 3: this machine lacks something; the message names it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv log=.venv/setup.log
started=$SECONDS

say() { printf '[setup %3ds] %s\n' $((SECONDS - started)) "$*"; }

not_ready() {
  printf 'setup: %s\n' "$@" >&2
  exit 3
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python}; do
    # Run it: a pyenv shim exists even where the version behind it does not.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        not_ready "$candidate cannot make virtual environments. Install them: apt install python3.11-venv"
      python=$candidate
      return
    fi
  done
  not_ready "needs Python 3.11, and ${PYTHON:-the PATH} has none (torch and Megatron-Core are pinned for it)." \
    "Install it (apt install python3.11 python3.11-venv, or pyenv install 3.11), or say PYTHON=/path/to/python3.11 make setup"
}

# What a finished environment was made from. The folder counts because an environment cannot be moved.
fingerprint() { { pwd; "$1" -c 'import sys; print(sys.version)'; cat requirements/{cpu-nodeps,cpu,dev,torch}.txt; } 2>/dev/null | sha256sum; }

is_current() { [[ -f $1 && $(<"$1") == "$2" ]]; }

install() {
  local what=$1
  shift
  say "$what"
  # --no-warn-conflicts: SGLang declares CUDA packages that are left out on purpose; real errors end the command.
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-warn-conflicts "$@" >>"$log" 2>&1; then
    grep -E '^ *(ERROR|error)' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
    not_ready "installing $what failed; all of pip's output is in $log. Run the command again to start over"
  fi
}

[[ $(uname -sm) == "Linux x86_64" ]] ||
  not_ready "needs Linux on x86-64, this is $(uname -sm): SGLang and torch have no CPU build for it here"
command -v flock >/dev/null && exec 9<. && flock 9 # one set-up at a time in this folder

# The stamps are written last, so an interrupted set-up is never taken for a finished one.
if [[ ! -x $venv/bin/python ]] || ! is_current "$venv/requirements.stamp" "$(fingerprint "$venv/bin/python")"; then
  find_python
  say "making .venv with $("$python" --version), about 3 GB on disk"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --version >"$log"
  # A CPU build needs nothing that requirements/cpu.txt lacks, and an index of torch may not have those versions. The CUDA
  # build, where pip's own index serves it, needs its libraries.
  install "torch (1 of 4)" -c requirements/cpu.txt -r requirements/torch.txt ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"}
  install "SGLang and Megatron-Core (2 of 4)" --no-deps -r requirements/cpu-nodeps.txt
  install "what they need at run time (3 of 4)" --no-deps -r requirements/cpu.txt
  install "tests and checks (4 of 4)" --no-deps -r requirements/dev.txt
  fingerprint "$venv/bin/python" >"$venv/requirements.stamp"
fi

project=$(sha256sum pyproject.toml)
if ! is_current "$venv/project.stamp" "$project"; then
  install "async-rl itself" --no-deps --no-build-isolation --editable .
  printf '%s\n' "$project" >"$venv/project.stamp"
  say "ready: .venv/bin/async-rl --help"
fi
