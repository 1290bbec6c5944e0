"""``python -m megatron_lengthgen.specs``: what it lists, and that the names are those that Megatron finds."""

import subprocess
import sys

from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from megatron_lengthgen.specs import __main__ as cli


def test_every_line_names_a_spec_that_megatron_finds() -> None:
    described = cli.describe()
    assert len(described) == 10 and len(set(described.values())) == 5
    for name, text in described.items():
        spec = import_module(("megatron_lengthgen.specs", name))
        assert callable(spec) if name.startswith("gpt_") else isinstance(spec, ModuleSpec)
        assert text.endswith(".") and "\n" not in text and "`" not in text
    assert described["hybrid_vpad_mean_fill"] == described["gpt_vpad_mean_fill"]
    assert "mean fill" in described["gpt_vpad_mean_fill"]


def test_the_command_line_lists_them() -> None:
    command = [sys.executable, "-m", "megatron_lengthgen.specs"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    for name, text in cli.describe().items():
        assert any(line.split(maxsplit=1) == [name, text] for line in lines)
    assert "--spec megatron_lengthgen.specs NAME" in result.stdout
    assert max(map(len, lines)) <= 120
