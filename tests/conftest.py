"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest

import megatron_lengthgen.backends as backends

# Before any test module imports `megatron`: on a machine without CUDA this redirects its CUDA calls to the CPU.
backends.prepare()


@pytest.fixture(scope="session")
def megatron_single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], None]]:
    """Megatron's parallel state for one process: a gloo group of one, all parallel sizes 1, random streams seeded.

    Yields:
        ``seed(n)``, which sets Megatron's random streams (default and tracked) back to what seed ``n`` gives.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        store = tmp_path_factory.mktemp("gloo") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1)

    def seed(value: int) -> None:
        tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)

    seed(1)
    yield seed
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
