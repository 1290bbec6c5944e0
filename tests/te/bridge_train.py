"""Train a small model through Megatron Bridge's own ``pretrain`` on a CPU, as ``conf/bridge`` shows it; print JSON.

Run by ``test_bridge_training.py``, in a process of its own: Transformer Engine's optimizer kernels have to be hidden
before Megatron is first imported. Usage: ``te-python bridge_train.py FOLDER``.
"""

import functools
import importlib.util
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any


def import_bridge_without_cuda() -> None:
    """Import Bridge's training. Without CUDA there is no Transformer Engine optimizer, for which Megatron has
    alternatives, and no resiliency package, of which ``pretrain`` needs one name in an annotation."""
    import transformer_engine.pytorch  # noqa: F401

    from megatron_lengthgen import backends

    kernels = sys.modules["transformer_engine.pytorch.optimizers"]
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]
    backends.prepare()
    sys.modules["transformer_engine.pytorch.optimizers"] = kernels

    import megatron.bridge.training.initialize as initialize
    import megatron.bridge.training.setup as setup
    import megatron.bridge.training.train

    # The wheel holds the compiled dataset helpers, and no makefile.
    initialize.compile_helpers = lambda: None
    setup.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    name = "nvidia_resiliency_ext"
    inprocess = types.SimpleNamespace(CallWrapper=object)
    sys.modules |= {name: types.SimpleNamespace(inprocess=inprocess), f"{name}.inprocess": inprocess}  # type: ignore[dict-item]
    import megatron.bridge.training.pretrain  # noqa: F401

    del sys.modules[name], sys.modules[f"{name}.inprocess"]


def small_recipe() -> Any:
    """What all recipes start from, with a model, data and precision for a CPU."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common

    from megatron_lengthgen.specs.gpt import stock_block

    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        vocab_size=128,
        seq_length=32,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        params_dtype=torch.float32,
        # Transformer Engine cannot compute here, and Bridge's local layers end in one of its norms.
        transformer_impl="local",
        transformer_layer_spec=stock_block,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )
    cfg.mixed_precision = None
    cfg.dist.distributed_backend = "gloo"
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 127
    cfg.dataset.seq_length, cfg.dataset.num_workers = 32, 0
    cfg.dataset.pin_memory = cfg.dataset.persistent_workers = False
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 4, 4, 2
    cfg.validation.eval_interval, cfg.validation.eval_iters = 2, 1
    cfg.optimizer.bf16 = cfg.optimizer.use_distributed_optimizer = False
    cfg.ddp.use_distributed_optimizer = cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = False
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 0, 8
    cfg.checkpoint.save = cfg.checkpoint.load = cfg.logger.tensorboard_dir = None
    cfg.logger.log_interval = 1
    return cfg


def example() -> types.ModuleType:
    """The file that users copy, with the small recipe in place of its own, which is for GPUs."""
    path = Path(__file__).parents[2] / "conf" / "bridge" / "llama32_1b_vpad.py"
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.llama32_1b_pretrain_config = small_recipe  # type: ignore[attr-defined]
    return module


class Run:
    """One training; what the masks and the loss were."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int, int]] = []
        self.losses: list[float] = []

    def __call__(self, main: Any, *overrides: str) -> dict[str, Any]:
        from megatron_lengthgen.errors import UserError
        from megatron_lengthgen.specs import step_key

        self.keys, self.losses, error, write = [], [], None, step_key.write

        def spy(key: Any) -> None:
            self.keys.append((key.step, key.microbatch, key.key))
            write(key)

        step_key.write = spy
        try:
            main(list(overrides))
        except UserError as refused:
            error = str(refused)
        except SystemExit:  # exit_interval
            pass
        finally:
            step_key.write = write
        return {"keys": self.keys, "losses": self.losses, "error": error}


def read_back(checkpoint: Path) -> dict[str, str]:
    """The layer spec that Bridge reads from a checkpoint's ``run_config.yaml``, and without this package's prefix."""
    from megatron.bridge.training.model_load_save import load_model_config
    from megatron.training.config.instantiate_utils import InstantiationException, target_allowlist

    model, _ = load_model_config(str(checkpoint))
    spec = model.transformer_layer_spec
    read = {"base": f"{spec.base.__module__}.{spec.base.__name__}", "regularization": repr(spec.regularization)}
    target_allowlist.remove_prefix("megatron_lengthgen.")
    try:
        load_model_config(str(checkpoint))
    except InstantiationException as refused:
        read["refused"] = str(refused)
    return read


def main(folder: Path) -> dict[str, Any]:
    import_bridge_without_cuda()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    from megatron.bridge.training import train as bridge_train

    module, run = example(), Run()
    log = bridge_train.training_log

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        run.losses.append(float(loss_dict["lm loss"]))
        return log(loss_dict, *args, **kwargs)

    bridge_train.training_log = training_log
    pretrain = module.pretrain  # type: ignore[attr-defined]
    results = {"whole": run(module.main)}
    results["again"] = run(module.main)
    save = f"checkpoint.save={folder}/run"
    results["first half"] = run(module.main, save, "checkpoint.save_interval=2", "train.exit_interval=2")
    results["second half"] = run(module.main, f"checkpoint.load={folder}/run")
    results["written"] = read_back(folder / "run" / "iter_0000002")
    choice = module.Regularization  # type: ignore[attr-defined]
    module.Regularization = lambda *args, **kwargs: choice("none")  # type: ignore[attr-defined]
    results["no dropout"] = run(module.main)
    module.Regularization = choice  # type: ignore[attr-defined]
    module.pretrain = lambda cfg, step, callbacks: pretrain(cfg, step)  # type: ignore[attr-defined]
    results["without callback"] = run(module.main)
    return results


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # Megatron and Bridge print
    text = json.dumps(main(Path(sys.argv[1])))
    os.write(out, f"{text}\n".encode())
