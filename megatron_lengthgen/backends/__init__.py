"""Which hardware Megatron-Core runs on."""

import torch

__all__ = ["prepare"]


def prepare() -> str:
    """Make Megatron-Core usable on this machine; call before anything of ``megatron`` is imported.

    Returns:
        ``"cuda"`` where CUDA is present (nothing is touched), else ``"cpu"`` after :mod:`.cpu` was installed.
    """
    if torch.cuda.is_available():
        return "cuda"
    from megatron_lengthgen.backends import cpu

    cpu.install()
    return "cpu"
