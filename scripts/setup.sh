#!/bin/sh
# Makes the environment that `make test` and `make demo` run in. Called by the Makefile.
#
#   setup.sh PYTHON VENV STAMP TORCH...
#
# The variable REQUIREMENTS may name a requirements file, which is installed with them.
#
# TORCH is what pip is told to install first, alone. STAMP is created when all is done, so
# that an interrupted run starts over. Running it twice changes nothing.
set -eu

python=$1 venv=$2 stamp=$3
shift 3
if [ -t 1 ]; then quiet=; else quiet=--quiet; fi # a progress bar for whoever watches

fail() {
    echo "setup: $1" >&2
    exit 1
}

# pip has told the details already; its log says whether the network was the reason.
install() {
    what=$1
    shift
    log=$venv/pip.log
    rm -f "$log"
    # shellcheck disable=SC2086
    if "$venv/bin/python" -m pip --disable-pip-version-check --log "$log" install $quiet "$@"; then
        rm -f "$log"
        return
    fi
    if grep -q 'No space left on device' "$log"; then
        fail "the disk is full: free some space (a CUDA build of torch takes 5 GB) and run make again"
    fi
    if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError' \
        "$log"; then
        fail "no network: pip cannot reach its package index to install $what; connect, or point pip at a mirror (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS), and run make again"
    fi
    fail "pip could not install $what; the reason is above, details in $log"
}

version_of() {
    "$venv/bin/python" -c 'import sys
from importlib.metadata import version
print(version(sys.argv[1]))' "$1"
}

command -v "$python" >/dev/null 2>&1 ||
    fail "$python is not here: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "$python does not run: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is Python $found, 3.10 or newer is needed: name one: make PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: install it (Debian, Ubuntu: apt install python3-venv) and run make again"

# What is there is kept when it works and is of the Python that was asked for.
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv exists and is no virtual environment: move it away, or use another: make VENV=path"
fi
rm -f "$venv"/.ready-*
has=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    has=none
if [ "$has" != "$found" ]; then
    echo "setup: making $venv with Python $found"
    "$python" -m venv --clear "$venv" ||
        fail "$venv could not be made: is there space, and may this directory be written?"
fi

echo "setup: installing $* (this can take minutes)"
install "$*" "$@"
torch=$(version_of torch 2>/dev/null) || fail "'$*' did not install torch; see TORCH in the Makefile"
echo "setup: installing everstep and its development tools"
install "everstep and its development tools" --editable ".[dev]" --editable "./bench" ${REQUIREMENTS:+-r "$REQUIREMENTS"}
[ "$(version_of torch)" = "$torch" ] ||
    fail "torch $torch was replaced by $(version_of torch): a dependency in pyproject.toml forbids it"

: >"$stamp"
echo "setup: ready: Python $found, torch $torch, in $venv"
