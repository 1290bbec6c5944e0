"""Megatron-Core 0.19.2 without CUDA: its ``torch.cuda`` calls, redirected to the CPU and gloo.

Megatron-Core asks for CUDA by name in some two hundred places, most of which only want "the device that the model
lives on". :func:`install` answers those requests with the CPU. It is the one place of this package that replaces
functions of torch and Megatron, it does so only where CUDA is absent, and it changes no arithmetic: apart from the
random states, everything that is replaced chooses a device, waits for one, or reports its memory.

What is replaced, and why:

* ``torch.cuda`` device, stream, event, memory and seed functions: no-ops, or the CPU generator's states.
* tensor factories (``torch.empty(..., device="cuda")`` and so on), ``Tensor.cuda``, ``Tensor.to``: the CPU. Plain
  wrappers rather than a ``TorchFunctionMode``, which would cost every operation a Python call and is switched off
  while autograd runs backward, so that recomputation would see CUDA again.
* ``Tensor.type()``: Megatron's optimizers compare it with the names of CUDA tensor types.
* the random-state getters of ``megatron.core.tensor_parallel.random``: without CUDA one raises and the other
  queues its work for a device that never comes, which would leave every fork of the tracker without effect.
* the kernels of ``mamba_ssm`` and ``causal_conv1d``, which run on CUDA alone: :mod:`megatron_lengthgen.ssm`.
* the start method of the asynchronous checkpoint writer. ``pretrain`` ends that process after the last step, and where
  a last save is due then, Megatron spawns another, which would know nothing of all this.
* ``DistributedOptimizer.state_dict`` and ``load_state_dict``, which fail on a fresh optimizer of PyTorch's.
* ``megatron.training``'s CUDA assertion, its compilation of dataset helpers that the wheel already carries, its
  warm-up of fused kernels, and its default of one NCCL communicator per group.
"""

import collections
import contextlib
import functools
import logging
import os
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "is_installed"]

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_installed = False


def is_installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return _installed


def install() -> None:
    """Redirect Megatron-Core's CUDA calls of this process to the CPU. A second call does nothing.

    Call it before the first import of anything from ``megatron``: some modules copy functions when they are imported.

    Raises:
        RuntimeError: where CUDA is present; nothing is replaced then.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"the CPU backend is for machines without CUDA, but torch sees {torch.cuda.device_count()} CUDA device(s); "
            "run Megatron-Core on them as it is, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    _installed = True
    # Inductor needs a C++ compiler at run time, which a bare machine lacks, and compiling outlasts a small run.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    # Huge pages: memory that the system hands out page by page costs a training step a fifth of its time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _redirect_device_functions()
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_megatron_core()
    _redirect_megatron_training()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    wait_stream = wait_event = synchronize = record_event = staticmethod(_nothing)

    def query(self) -> bool:
        return True


class _Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = staticmethod(_nothing)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


def _redirect_device_functions() -> None:
    stream = _Stream()
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=total_memory, multi_processor_count=os.cpu_count() or 1
    )
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": _nothing,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
        # Megatron takes a count of zero for "no model parallelism"; every rank of this node has its own share of CPU.
        "device_count": lambda: max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1),
        "get_device_properties": lambda *args, **kwargs: properties,
        "get_device_capability": lambda *args, **kwargs: (0, 0),
        "get_device_name": lambda *args, **kwargs: "cpu",
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
        # torch.manual_seed calls it after it has seeded the CPU.
        "manual_seed_all": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *args, **kwargs: collections.defaultdict(int),
        "mem_get_info": lambda *args, **kwargs: (total_memory, total_memory),
        # Classes, not functions: some packages annotate with `torch.cuda.Stream | None`.
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": _nothing,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
    }
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
    ):
        replacements[name] = _zero
    for name in _TENSOR_TYPES:
        replacements[name] = getattr(torch, name)
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _on_cpu(device: Any) -> Any:
    """``device``, or the CPU where it names a CUDA device (an integer is one in torch's convention)."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
        return _CPU
    return device


def _redirect_factories() -> None:
    def redirect(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return on_cpu

    # `with torch.device(...)` knows the factories by identity: let it note the originals, which the wrappers call.
    # Without this, what transformers builds under such a context is left uninitialised.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, redirect(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    to, type_of = torch.Tensor.to, torch.Tensor.type

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_of(self, dtype, *args, **kwargs)

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    # torch declares these in C; a type checker sees read-only slots where Python sees plain attributes.
    for owner, name, replacement in (
        (torch.Tensor, "to", to_cpu),
        (torch.Tensor, "type", cuda_type),
        (torch.Tensor, "cuda", same),
        (torch.Tensor, "pin_memory", same),
        (torch.nn.Module, "cuda", same),
    ):
        setattr(owner, name, replacement)


def _redirect_megatron_core() -> None:
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    _provide_mamba_kernels()
    _fork_checkpoint_writers()
    _repair_distributed_optimizer_loading()
    # The tracker warns at every fork that it is not initialised for CUDA graphs; there are none here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _provide_mamba_kernels() -> None:
    """Give ``MambaMixer`` the reference path, under the names that it imports from packages for CUDA."""
    from megatron.core.ssm import mamba_mixer

    from megatron_lengthgen.ssm.mixer import split_conv1d_scan
    from megatron_lengthgen.ssm.scan import chunk_scan
    from megatron_lengthgen.ssm.sharded_norm import ShardedGatedRMSNorm

    replacements: dict[str, Any] = {
        "HAVE_MAMBA_SSM": True,
        "MAMBA_HAS_STATE_DTYPE": True,
        "ExtendedRMSNorm": ShardedGatedRMSNorm,
        "mamba_split_conv1d_scan_combined": split_conv1d_scan,
        "mamba_chunk_scan_combined": chunk_scan,
        # Without these, MambaMixer takes plain PyTorch itself.
        "causal_conv1d_fn": None,
        "causal_conv1d_update": None,
        "selective_state_update": None,
    }
    for name, replacement in replacements.items():
        setattr(mamba_mixer, name, replacement)


def _fork_checkpoint_writers() -> None:
    """Have the fork server start every asynchronous writer; ``training.writers`` prepares that server for it."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    get_process = PersistentAsyncCaller._get_process

    def from_fork_server(rank: int, mp_mode: str = "spawn", *args: Any, **kwargs: Any) -> Any:
        return get_process(rank, "forkserver", *args, **kwargs)

    PersistentAsyncCaller._get_process = staticmethod(from_fork_server)


def _repair_distributed_optimizer_loading() -> None:
    """Let the distributed optimizer load a checkpoint where neither Apex nor Transformer Engine is installed.

    Megatron then reads the step from the state of PyTorch's optimizer, which a fresh one has not got yet, and asserts.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict

    @functools.wraps(state_dict)
    def with_state(self: Any) -> Any:
        if not self.optimizer.state:
            groups = self.optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = 0.0  # the dummy step must not decay weights
            self._init_optimizer_states_with_dummy_values()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        return state_dict(self)

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(set_states)
    def set_without_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # The step came with the parameter groups; PyTorch's optimizer alone keeps it beside every parameter too.
        set_states(self, model_param, {**tensors, "step": None})

    DistributedOptimizer.state_dict = with_state
    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    load_state_dict = DistributedOptimizer.load_state_dict

    @functools.wraps(load_state_dict)
    @torch.no_grad()  # it copies into views of float32 parameters, which autograd forbids
    def load_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        # One step tensor was given to all parameters, and every parameter's update would advance it.
        for values in self.optimizer.state.values():
            values["step"] = values["step"].clone()

    DistributedOptimizer.load_state_dict = load_with_own_steps


def _redirect_megatron_training() -> None:
    try:
        from megatron.training import initialize, training
    except ImportError:
        return

    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize._compile_dependencies = _compile_dependencies(initialize._compile_dependencies)
    # Fused kernels are compiled, and nothing is compiled here (see install).
    training.set_jit_fusion_options = initialize.set_jit_fusion_options = _nothing


def _compile_dependencies(compile_dependencies: Callable[[], None]) -> Callable[[], None]:
    """Skip the compilation of the dataset helpers where the installed wheel carries them already."""

    def compile_if_missing() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            compile_dependencies()

    return compile_if_missing
