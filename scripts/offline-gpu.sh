#!/usr/bin/env bash
# Carry what a GPU machine without a network lacks: packed here, where a package index is, and installed there.
#
#   offline-gpu.sh build BUNDLE --python 3.12 --torch 2.11.0+cu130 [--transformers 5.17.0] [--parts "A B C D"]
#                  [--part-mib 55]
#   offline-gpu.sh install BUNDLE --target FOLDER [--parts A B]
#
# The machine has that Python, torch and transformers, and nvcc. Needs here: that Python with Python.h, g++, 10 GB of
# disk beside BUNDLE (BUNDLE.work, which a second run continues), and no GPU.
#
#   MAX_JOBS=1   compilers of TransformerEngine's extension at a time: 2 GB each; an hour on a busy machine
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository arch=90

die() {
  printf 'offline-gpu: %s\n' "$@" >&2
  exit 2
}

bundle() { PYTHONPATH=$repository "$python" -m scripts.offline_gpu.bundle "$@"; }

section() { awk -v head="# $1:" '/^# /{on = index($0, head) == 1; next} on' "$list"; }

# Install packages of a section of the list into a folder, by hash.
fetch() {
  section "$1" | grep -v "${3:-^$}" >"$work/list.txt"
  "${pip[@]}" install --no-deps --require-hashes --no-compile --target "$2" -r "$work/list.txt"
}

prepare() {
  list=$repository/scripts/offline_gpu/python$version.txt
  [[ -f $list ]] || die "there is no $list: copy another one, and see scripts/offline_gpu/pins.py"
  command -v "python$version" >/dev/null || die "there is no python$version on the PATH"
  mkdir -p "$work"
  [[ -d $work/venv ]] || "python$version" -m venv "$work/venv"
  python=$work/venv/bin/python
  pip=("$python" -m pip -q --disable-pip-version-check --no-input)
  # Not carried, and so by version only, with what they depend on.
  "${pip[@]}" install "torch==${torch%+*}" "transformers==$transformers"
  section build >"$work/list.txt"
  "${pip[@]}" install --no-deps --require-hashes -r "$work/list.txt"
  found=$("$python" -c 'import torch; print(torch.__version__)')
  [[ $found == "$torch" ]] || die "the index has torch $found, not $torch: an extension would not fit"
  nvidia=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
  export CUDA_HOME=$nvidia/cu13 PATH=$nvidia/cu13/bin:$work/venv/bin:$PATH
  # The packages of CUDA have neither lib64 nor the names that linkers look for.
  ln -sfn lib "$CUDA_HOME/lib64"
  for library in "$CUDA_HOME"/lib/lib*.so.*; do
    [[ -e ${library%%.so.*}.so ]] || ln -s "${library##*/}" "${library%%.so.*}.so"
  done
}

make_A() {
  if ! compgen -G "$work/wheels/transformer_engine_torch-*.whl" >/dev/null; then
    section "part A" | grep ^transformer-engine-torch >"$work/list.txt"
    # Forced, because its setup.py takes an unverified wheel from elsewhere first; and not from pip's cache, where one may
    # be that was built against another torch.
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=$arch TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=${MAX_JOBS:-1} \
      CPATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include \
      "${pip[@]}" wheel --no-cache-dir --no-deps --require-hashes --no-build-isolation \
      -w "$work/wheels" -r "$work/list.txt"
  fi
  fetch "part A" "$work/A" ^transformer-engine-torch
  # Unpacked, because a second call of pip does not add to a package that is in the target.
  "$python" -m zipfile -e "$work"/wheels/transformer_engine_torch-*.whl "$work/A"
  # From a copy, because a build leaves files where it runs.
  rm -rf "$work/source" && mkdir "$work/source"
  (cd "$repository" && cp -r pyproject.toml README.md LICENSE async_rl agent_loops trainer "$work/source")
  "${pip[@]}" install --no-deps --no-build-isolation --no-compile --target "$work/A" "$work/source"
}

make_B() {
  [[ -d $work/A ]] || die "part B is compiled with packages of part A: build A first"
  fetch "part B" "$work/B"
  cp -r "$repository"/scripts/offline_gpu/stand_ins/. "$work/B"
  PYTHONPATH=$repository:$work/A:$work/B "$python" -m scripts.offline_gpu.jit_cache "$work/B"
}

make_C() { fetch "part C" "$work/C"; }

make_D() { fetch "part D" "$work/D"; }

command=${1:-} folder=${2:-}
[[ -n $folder ]] || die "say: offline-gpu.sh build|install BUNDLE ..., see the head of ${BASH_SOURCE[0]}"
shift 2
case $command in
  install) python=${PYTHON:-python3} && bundle install "$folder" "$@" ;;
  build)
    version='' torch='' transformers=5.17.0 parts='A B C D' size=55
    while (($#)); do
      case $1 in
        --python) version=$2 ;;
        --torch) torch=$2 ;;
        --transformers) transformers=$2 ;;
        --parts) parts=$2 ;;
        --part-mib) size=$2 ;;
        *) die "unknown option $1" ;;
      esac
      shift 2
    done
    [[ -n $version && -n $torch ]] ||
      die "say which Python and torch the machine has: --python 3.12 --torch 2.11.0+cu130"
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd) work=$folder.work
    prepare
    for part in $parts; do
      rm -rf "${work:?}/$part"
      "make_$part"
      bundle pack "$part" "$work/$part" "$folder" --python "$version" --torch "$torch" --part-mib "$size" --arch "$arch"
    done
    ;;
  *) die "unknown command $command: build or install" ;;
esac
