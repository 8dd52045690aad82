#!/usr/bin/env bash
# Makes .venv and installs requirements.txt into it, once per content of that file.
# Usage: tools/setup_env.sh VENV_DIR REQUIREMENTS
set -euo pipefail

venv=$1
requirements=$2
here=$(cd "$(dirname "$0")" && pwd)
stamp=$venv/.requirements.stamp

ready() {
    [ -f "$stamp" ] && cmp -s "$stamp" "$requirements" && "$venv/bin/python" -c '' 2>/dev/null
}

if ready; then exit 0; fi
# Two targets at once must not install into the same place: the second waits for the first.
if command -v flock >/dev/null 2>&1; then
    exec 9<"$requirements"
    if ! flock --nonblock 9; then
        echo "setup: another one is under way; waiting for it"
        flock 9
    fi
    if ready; then exit 0; fi
fi
python=$(bash "$here/find_python.sh")
echo "setup: $venv from $python (torch is large: some minutes, 6 GB of disk)"
rm -f "$stamp"
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar off \
    -r "$requirements"
cp "$requirements" "$stamp"
