#!/usr/bin/env bash
# Check the environment of `make setup-gpu` on a machine without a GPU: install it with nvcc from its package, import all
# of it, and run the fast tests and the trainer's with CUDA hidden. By hand, before a release and whenever a pin in
# requirements/gpu* moves: one to one and a half hours on 2 cores, and 15 GB of disk.
#
#   PYTHON, MAX_JOBS   as for scripts/setup-gpu.sh
#   TESTS=PATH         these tests only
#
# A stand-in of the driver's library lets packages load that are linked with it; there is no device for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly toolkit=$PWD/.cuda-toolkit venv=$PWD/.venv-gpu
if ! cmp -s requirements/nvcc.txt "$toolkit/requirements.txt"; then
  rm -rf "$toolkit"
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$toolkit" \
    -r requirements/nvcc.txt
  cp requirements/nvcc.txt "$toolkit/requirements.txt"
fi
WITHOUT_GPU=1 CUDA_HOME=$toolkit/nvidia/cu13 scripts/setup-gpu.sh
# Tools of the tests come last on the path, so that none replaces what the environment has. These five are listed with
# their files for Python 3.11: hypothesis is in the environment, and the tests below do without the others.
grep -vE '^(atheris|hypothesis|librt|mypy|tomli)==' requirements/dev.txt >"$venv/dev.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$venv/tools" \
  --upgrade -r "$venv/dev.txt"
echo "$venv/tools" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tools.pth"

"$venv/bin/python" scripts/driver_stand_in.py "$toolkit/driver"
export LD_LIBRARY_PATH=$toolkit/driver CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
"$venv/bin/python" -m tests.gpu.first_kernel --only-imports
pytest=("$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder)
if [[ -n ${TESTS:-} ]]; then
  "${pytest[@]}" $TESTS
else
  "${pytest[@]}" -m "not real and not long"
  "${pytest[@]}" -m "not long" tests/integration/test_trainer_*.py
fi
