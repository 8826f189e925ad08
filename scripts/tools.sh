#!/usr/bin/env bash
# Make .tools/bin hold the programs of others that tests and `make prometheus` start: prometheus, promtool, chromium.
#
#   scripts/tools.sh prometheus chromium    which ones; without names, all
#   ASYNC_RL_WITHOUT=chromium               what to do without, commas between: tests that need it are skipped
#
# A program that is on the PATH is taken as it is, on any distribution. Otherwise it comes from Debian's packages (or
# Ubuntu's), which apt downloads and checks and which are unpacked here. Nothing is installed: so it works without
# root, and Debian's service of Prometheus, which listens on all addresses, is not started. Nothing happens when all
# is there; `rm -r .tools` starts over.
#
# Exit 3: a program cannot be had here; the message says what to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly tools=$PWD/.tools log=$PWD/.tools/tools.log
readonly all="prometheus chromium"

# What to look for, and what to unpack. Chromium draws no letter without a font.
declare -rA commands=([prometheus]="prometheus promtool" [chromium]="chromium")
declare -rA packages=([prometheus]="prometheus" [chromium]="chromium fonts-dejavu-core")

not_ready() {
  local tool=$1
  printf 'tools: %s\n' "$2" \
    "Install $tool so that its commands (${commands[$tool]}) are on the PATH, or do without it:" \
    "ASYNC_RL_WITHOUT=$tool make test leaves out the tests that need it, and says so." >&2
  exit 3
}

# Each command of a tool, from a folder or, without one, from the PATH.
works() {
  local command
  for command in ${commands[$1]}; do
    "${2:+$2/}$command" --version >/dev/null 2>&1 || return
  done
}

# A mirror that does not answer is given up after a while.
patient_apt() {
  apt-get -o Acquire::Retries=3 -o Acquire::http::Timeout=30 "$@"
}

# The same with lists and caches in .tools, where we may write.
own_apt() {
  patient_apt -o Dir::State::Lists="$tools/apt/lists" -o Dir::Cache="$tools/apt/cache" "$@"
}

# Downloads the packages that a tool needs and this machine lacks. apt's arguments: `missing` only looks at what an
# installation would bring, so it needs no lock; root downloads as root, because `_apt` may not write here.
download() {
  local apt=$1 folder=$2 missing
  shift 2
  missing=$($apt -s --no-install-recommends -o Debug::NoLocking=1 install "$@" |
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

# A command that runs an unpacked program with the libraries and fonts that were unpacked with it.
write_command() {
  local command=$1 root=$2 program=$2/usr/bin/$1
  [[ ! -x $root/usr/lib/$command/$command ]] || program=$root/usr/lib/$command/$command # Chromium's other is a script for /
  cat >"$root/fonts.conf" <<END
<fontconfig><include ignore_missing="yes">/etc/fonts/fonts.conf</include><dir>$root/usr/share/fonts</dir></fontconfig>
END
  cat >"$tools/bin/$command" <<END
#!/bin/sh
export LD_LIBRARY_PATH='$root/usr/lib/$(uname -m)-linux-gnu'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export FONTCONFIG_FILE='$root/fonts.conf'
exec '$program' "\$@"
END
  chmod +x "$tools/bin/$command"
}

for tool in ${@:-$all}; do
  [[ -n ${commands[$tool]:-} ]] || { echo "tools: $tool is not one of: $all" >&2; exit 2; }
done

mkdir -p "$tools/bin"
command -v flock >/dev/null && exec 9<"$tools" && flock 9 # one at a time
for tool in ${@:-$all}; do
  case ",${ASYNC_RL_WITHOUT:-}," in *",$tool,"*) continue ;; esac
  works "$tool" "" || works "$tool" "$tools/bin" && continue
  command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    not_ready "$tool" "$tool is not on the PATH, and this machine has no apt to get it by."
  echo "[tools] getting $tool from this machine's package mirror, into .tools"
  unpack "$tool" >>"$log" 2>&1 || {
    grep '^E: ' "$log" | tail -n 3 >&2 || true
    not_ready "$tool" "$tool could not be downloaded; all of apt's output is in .tools/tools.log."
  }
  for command in ${commands[$tool]}; do
    write_command "$command" "$tools/$tool"
  done
  works "$tool" "$tools/bin" ||
    not_ready "$tool" "$tool was unpacked into .tools and does not start: .tools/bin/${commands[$tool]%% *} --version says why."
done
