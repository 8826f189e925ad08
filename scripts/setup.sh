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
fingerprint() { { pwd; "$1" -c 'import sys; print(sys.version)'; cat requirements/{cpu-nodeps,cpu,dev,sources,torch,torch-cuda}.txt; } 2>/dev/null | sha256sum; }

is_current() { [[ -f $1 && $(<"$1") == "$2" ]]; }

install() {
  local what=$1 refused
  shift
  say "$what"
  # --no-warn-conflicts: SGLang declares CUDA packages that are left out on purpose; real errors end the command.
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-warn-conflicts "$@" >>"$log" 2>&1; then
    refused=$(sed -n '/DO NOT MATCH THE HASHES/,/ Got /p' "$log" | sed 1d | tr -s ' \n' ' ')
    [[ -z $refused ]] ||
      not_ready "refused a file that is not the one that requirements/ pins:$refused" \
        "Find out who changed it, unless you have changed a version: then run \`make hashes\`. All of pip's output is in $log"
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
  # Lists are whole and name the hash of each file (`make hashes`): nothing else is installed, from whatever index.
  readonly pinned="--no-deps --require-hashes"
  index=()
  [[ -z ${TORCH_INDEX:-} ]] || index=(--index-url "$TORCH_INDEX")
  # The CUDA build of torch has a list of its own, with its libraries: look which build pip takes here.
  torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/torch.txt)
  taken=$("$venv/bin/python" -m pip install --disable-pip-version-check --dry-run --no-deps "$torch" \
    ${index[@]+"${index[@]}"} 2>>"$log" || true)
  build=torch-cuda.txt
  [[ $taken != *"Would install torch-"*+cpu* ]] || build=torch.txt
  install "torch (1 of 5)" $pinned -r "requirements/$build" ${index[@]+"${index[@]}"}
  install "SGLang and Megatron-Core (2 of 5)" $pinned -r requirements/cpu-nodeps.txt
  install "what they need at run time (3 of 5)" $pinned -r requirements/cpu.txt
  install "tests and checks (4 of 5)" $pinned -r requirements/dev.txt
  install "sources that tests read (5 of 5)" $pinned --target "$venv/sources" -r requirements/sources.txt
  fingerprint "$venv/bin/python" >"$venv/requirements.stamp"
fi

project=$(sha256sum pyproject.toml)
if ! is_current "$venv/project.stamp" "$project"; then
  install "async-rl itself" --no-deps --no-build-isolation --editable .
  printf '%s\n' "$project" >"$venv/project.stamp"
  say "ready: .venv/bin/async-rl --help"
fi
