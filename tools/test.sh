#!/usr/bin/env bash
# Make .venv and run the checks: format, lint, types, tests. Usage: bash tools/test.sh [pytest arguments]
# `bash tools/test.sh -m slow` runs the minutes-long tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup_env.sh dev
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
