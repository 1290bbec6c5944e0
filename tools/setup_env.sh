#!/usr/bin/env bash
# Make .venv with this package in it. Usage: bash tools/setup_env.sh [EXTRA ...]   (extras of pyproject.toml)
# A second start does nothing while pyproject.toml and the extras stay the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$(IFS=,; echo "${*:-hf,eval}")

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null; then
        uv python find 3.12 2>/dev/null || { uv python install -q 3.12 && uv python find 3.12; }
        return
    fi
    return 1
}

stamp="$(cat pyproject.toml tools/setup_env.sh | sha256sum | cut -d' ' -f1) $extras"
if [ "$(cat .venv/.installed 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=$(find_python) || {
        echo "error: Python 3.12 is needed (megatron-core 0.19 has wheels for nothing older); none was found as" \
            "python3.12, in pyenv's versions, or through uv" >&2
        exit 2
    }
    echo "making .venv with $python"
    "$python" -m venv --clear .venv
fi
rm -f .venv/.installed
echo "installing into .venv (torch brings several GB; a few minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off -e ".[$extras]"
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
if [ "${torch%%+*}" != 2.13.0 ]; then
    echo "error: torch $torch was installed where 2.13.0 is needed: remove .venv and start again" >&2
    exit 2
fi
echo "$stamp" > .venv/.installed
