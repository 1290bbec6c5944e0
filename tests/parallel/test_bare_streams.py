"""Masks of models that nobody binds, a bare ``--spec``: right for the layout, though not the same under all layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch import torchrun

SCRIPT = Path(__file__).parent / "bare_streams.py"
SPLIT_FEATURES = {"linear_proj", "linear_fc2"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("streams") / "cases.json"
    torchrun(2, SCRIPT, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize("block", ["gpt", "hybrid"])
@pytest.mark.parametrize("recompute", ["", "_recompute"])
def test_ranks_share_the_masks_of_what_they_share(cases: dict[str, Any], block: str, recompute: str) -> None:
    equal = cases[block + recompute]["equal"]
    assert {"attention", "mlp", "output", "linear_proj"} <= equal.keys()
    assert equal == {site: site not in SPLIT_FEATURES for site in equal}


@pytest.mark.parametrize("block", ["gpt", "hybrid"])
@pytest.mark.parametrize("recompute", ["", "_recompute"])
def test_sequence_parallel_ranks_draw_other_masks_for_their_other_tokens(
    cases: dict[str, Any], block: str, recompute: str
) -> None:
    equal = cases[f"{block}_sp{recompute}"]["equal"]
    assert {"attention", "mlp", "output", "linear_proj"} <= equal.keys()
    assert not any(equal.values())


def test_the_stock_hybrid_stack_draws_equal_masks_for_different_tokens(cases: dict[str, Any]) -> None:
    """Why ``FinalNormHybridStack`` forks."""
    assert all(cases["stock_hybrid_sp"]["equal"].values())


@pytest.mark.parametrize("block", ["gpt", "gpt_sp", "hybrid", "hybrid_sp"])
def test_recomputation_replays_the_masks(cases: dict[str, Any], block: str) -> None:
    assert cases[f"{block}_recompute"]["gradients"] == cases[block]["gradients"]
