#!/usr/bin/env bash
# Prints the first Python >= 3.12 that really runs and can make virtual environments.
# A python3.12 on PATH may be a pyenv shim that fails, so every candidate is tried, then pyenv's
# own versions. PYTHON=path is tried alone.
set -u

probe='import sys, venv, ensurepip
print(sys.executable)
sys.exit(0 if sys.version_info >= (3, 12) else 3)'
tried=""

try() {
    local found
    if found=$("$1" -c "$probe" 2>/dev/null); then
        echo "$found"
        exit 0
    fi
    tried="$tried
  $1: $("$1" --version 2>&1 | head -n 1)"
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
else
    for name in python3.12 python3.13 python3.14 python3 python; do
        if command -v "$name" >/dev/null 2>&1; then try "$name"; fi
    done
    for minor in 12 13 14; do
        for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.$minor*/bin/python; do
            if [ -x "$path" ]; then try "$path"; fi
        done
    done
fi

echo "error: Megatron-Core needs Python >= 3.12 with the venv module, and none was found. Tried:${tried:-
  nothing: no python on PATH}
Install Python 3.12, or name one: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
