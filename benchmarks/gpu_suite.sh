#!/usr/bin/env bash
# Build, check and time the kernel of norm and dropout on this machine's GPU, and write one JSON.
# Usage: bash benchmarks/gpu_suite.sh [OUTPUT.json]        (default gpu_suite.json; PYTHON=... takes another environment)
# Under 8 minutes on one H200 once the environment is there. For the peers and the whole layer it wants Transformer
# Engine and Liger beside it (bash tools/setup_env.sh dev,te; pip install liger-kernel); what is absent is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=$(realpath -m "${1:-gpu_suite.json}")
if [ -z "${PYTHON:-}" ]; then
    bash tools/setup_env.sh dev
    PYTHON=.venv/bin/python
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $PYTHON finds no CUDA device here: run this on a machine with a GPU" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Checks that fail leave a JSON behind that says so; so does a benchmark that runs out of its time.
"$PYTHON" -m pytest tests/gpu --junitxml="$work/tests.xml" || true
timeout 330 "$PYTHON" benchmarks/norm_dropout.py --json "$work/times.json" || echo "norm_dropout.py did not finish" >&2

"$PYTHON" - "$work" "$output" <<'PY'
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from megatron_lengthgen.files import write_json

work, output = Path(sys.argv[1]), sys.argv[2]
suites = list(ElementTree.parse(work / "tests.xml").iter("testsuite"))
names = ("tests", "failures", "errors", "skipped")
tests = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
failed = [
    f"{case.get('classname')}::{case.get('name')}"
    for case in ElementTree.parse(work / "tests.xml").iter("testcase")
    if case.find("failure") is not None or case.find("error") is not None
]
times = json.loads((work / "times.json").read_text()) if (work / "times.json").exists() else None
gpu = {"name": torch.cuda.get_device_name(), "bytes": torch.cuda.mem_get_info()[1], "cuda": torch.version.cuda}
write_json(output, {"gpu": gpu, "tests": {**tests, "failed": failed}, "norm_dropout": times})
claims = times["claims"] if times else []
print(f"{output}: {tests['tests']} tests, {len(failed)} failed, {tests['skipped']} skipped; "
      f"{sum(claim['holds'] for claim in claims)} of {len(claims)} claims hold")
sys.exit(1 if failed or not tests["tests"] or times is None else 0)
PY
