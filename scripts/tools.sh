#!/usr/bin/env bash
# Make .tools/bin hold the programs of others that tests and `make prometheus` start: prometheus, promtool, chromium.
#
#   scripts/tools.sh                        all of them, as far as this machine allows: what is missing is reported, and the
#                                           tests that need it are skipped (tests/support/environment.py)
#   scripts/tools.sh prometheus             these, or fail
#   ASYNC_RL_WITHOUT=chromium               what to do without, commas between
#   CI=true                                 fail as well when one of all is missing
#
# A program that is on the PATH and starts is taken as it is, on any distribution. Otherwise it comes from Debian's
# packages (or Ubuntu's), which apt downloads and checks and which are unpacked here. Nothing is installed: so it works
# without root, and Debian's service of Prometheus, which listens on all addresses, is not started. Nothing happens when
# all is there; `rm -r .tools` starts over.
#
# Exit 3: a program is missing that must not be; the message says what to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly tools=$PWD/.tools
readonly all="prometheus chromium"

# What to look for, and what to unpack. Chromium reads its data (chromium-common) beside its program, and draws no letter
# without a font.
declare -rA commands=([prometheus]="prometheus promtool" [chromium]="chromium")
declare -rA packages=([prometheus]="prometheus" [chromium]="chromium chromium-common fonts-dejavu-core")

# Each command of a tool, from a folder or, without one, from the PATH.
works() {
  local command
  for command in ${commands[$1]}; do
    "${2:+$2/}$command" --version >/dev/null 2>&1 || return
  done
}

# A mirror that does not answer is given up after a minute.
patient_apt() {
  apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=15 "$@"
}

# The same with lists and caches in .tools, where we may write.
own_apt() {
  patient_apt -o Dir::State::Lists="$tools/apt/lists" -o Dir::Cache="$tools/apt/cache" "$@"
}

# Downloads the packages that a tool needs and this machine lacks. apt's arguments: `missing` only looks at what an
# installation would bring, so it needs no lock; a tool that is installed and does not start is taken again; root
# downloads as root, because `_apt` may not write here.
download() {
  local apt=$1 folder=$2 missing
  shift 2
  missing=$($apt -s --reinstall --no-install-recommends -o Debug::NoLocking=1 install "$@" |
    sed -nE 's/^Inst ([^ ]+) (\[[^]]*\] )?\(([^ ]+) .*/\1=\3/p') || return
  [[ -n $missing ]] && (cd "$folder" && $apt -o APT::Sandbox::User=root download $missing)
}

# Unpacks a tool beside its place and puts it there when it is whole.
unpack() {
  local tool=$1 part=$tools/$1.part package
  rm -rf "$part"
  mkdir -p "$part/packages"
  # The machine's own lists first. They may be absent, as in containers, or name what the mirror no longer has.
  if ! download patient_apt "$part/packages" ${packages[$tool]}; then
    mkdir -p "$tools/apt/lists/partial" "$tools/apt/cache/archives/partial"
    own_apt -o Debug::NoLocking=1 update || return
    download own_apt "$part/packages" ${packages[$tool]} || return
  fi
  for package in "$part"/packages/*.deb; do
    dpkg -x "$package" "$part" || return
  done
  rm -rf "$part/packages" "$tools/$tool"
  mv "$part" "$tools/$tool"
}

# A command that runs an unpacked program with the libraries and fonts that were unpacked with it. The libraries are in
# several folders, for example lib/x86_64-linux-gnu/pulseaudio: installed ones are found there by absolute paths.
# LD_LIBRARY_PATH never ends with a colon, which would add the current folder.
write_command() {
  local command=$1 root=$2 program=$2/usr/bin/$1 libraries
  [[ ! -x $root/usr/lib/$command/$command ]] || program=$root/usr/lib/$command/$command # Chromium's other is a script for /
  libraries=$(find "$root" \( -name '*.so' -o -name '*.so.*' \) -printf '%h:\n' | sort -u | tr -d '\n')
  cat >"$root/fonts.conf" <<END
<fontconfig><include ignore_missing="yes">/etc/fonts/fonts.conf</include><dir>$root/usr/share/fonts</dir></fontconfig>
END
  cat >"$tools/bin/$command" <<END
#!/bin/sh
export LD_LIBRARY_PATH='$libraries'"\${LD_LIBRARY_PATH:-$root}"
export FONTCONFIG_FILE='$root/fonts.conf'
exec '$program' "\$@"
END
  chmod +x "$tools/bin/$command"
}

# Gets a tool into .tools, or leaves in $problem why that cannot be.
get() {
  local tool=$1 log=$tools/$1.log command cause
  problem="$tool is not on the PATH, and this machine has no apt to get it by"
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || return
  echo "[tools] getting $tool from this machine's package mirror, into .tools"
  if ! unpack "$tool" >"$log" 2>&1; then
    cause=$(grep -m 1 '^W: Failed to fetch' "$log" || grep '^E: ' "$log" | tail -n 1)
    problem="$tool could not be downloaded${cause:+ ($cause)}; apt's output is in .tools/$tool.log"
    return 1
  fi
  problem="$tool was unpacked into .tools and does not start"
  for command in ${commands[$tool]}; do
    write_command "$command" "$tools/$tool" || return
  done
  works "$tool" "$tools/bin" && return
  problem+=": $("$tools/bin/${commands[$tool]%% *}" --version 2>&1 | tail -n 1)"
  return 1
}

for tool in "$@"; do
  [[ -n ${commands[$tool]:-} ]] || { echo "tools: $tool is not one of: $all" >&2; exit 2; }
done
required=$#
[[ ${CI:-} != true ]] || required=1
status=0

mkdir -p "$tools/bin"
command -v flock >/dev/null && exec 9<"$tools" && flock 9 # one at a time
for tool in ${@:-$all}; do
  case ",${ASYNC_RL_WITHOUT:-}," in *",$tool,"*) continue ;; esac
  if works "$tool" "" || works "$tool" "$tools/bin" || get "$tool"; then
    rm -f "$tools/$tool.problem"
    continue
  fi
  echo "$problem" >"$tools/$tool.problem" # for the tests' last lines
  printf 'tools: %s.\n' "$problem" "Install $tool so that its commands (${commands[$tool]}) are on the PATH" >&2
  if [[ $required != 0 ]]; then
    status=3
    echo "tools: tests do without it by ASYNC_RL_WITHOUT=$tool" >&2
  else
    echo "tools: until then, tests that need it are skipped" >&2
  fi
done
exit $status
