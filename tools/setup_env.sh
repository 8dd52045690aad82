#!/usr/bin/env bash
# Makes .venv and installs requirements.txt into it, once per content of that file.
# Usage: tools/setup_env.sh VENV_DIR REQUIREMENTS
set -euo pipefail

venv=$1
requirements=$2
here=$(cd "$(dirname "$0")" && pwd)
stamp=$venv/.requirements.stamp

if [ -f "$stamp" ] && cmp -s "$stamp" "$requirements" && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi
python=$(bash "$here/find_python.sh")
echo "setup: $venv from $python (the first time takes a few minutes: torch is large)"
rm -f "$stamp"
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar off \
    -r "$requirements"
cp "$requirements" "$stamp"
