"""Which model answers, and how: from the options of a command line to an engine."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError

from . import launch
from .fingerprint import fingerprint, hugging_face_directory, megatron_iteration
from .prompt import PromptEncoder, load_tokenizer
from .server import authorization
from .vocabulary import check_fit, check_same, unused_rows

__all__ = [
    "MORE_MEMORY",
    "check",
    "check_vocabulary",
    "device",
    "identity",
    "info",
    "locate",
    "make_encoder",
    "make_generator",
    "out_of_memory",
    "positive",
]

#: What to do where memory is short.
MORE_MEMORY = (
    "there is not enough memory for these lengths: finished samples are kept, so start the same command with a smaller "
    "--max-batch-tokens or --prefill-chunk, or over more GPUs with --tensor-parallel, or a new run with shorter lengths"
)


def identity(arguments: Namespace, encoder: PromptEncoder, digest: str) -> dict[str, Any]:
    """What of the engine decides an answer; ``digest`` is the model's."""
    return {
        "model": digest,
        "backend": "hf" if arguments.hf else "openai" if arguments.openai else "megatron",
        "dtype": None if arguments.openai else arguments.dtype,
        "tokenizer": encoder.digest,
        "stop_ids": sorted(encoder.stop_ids),
        "chat_template": arguments.chat_template,
    }


def info(arguments: Namespace, where: str) -> dict[str, Any]:
    """What else is worth knowing of the engine; ``where`` is the model's place."""
    return {
        "model_path": where,
        "server": arguments.openai,
        "tokenizer_path": arguments.tokenizer or arguments.hf,
        "tensor_parallel": arguments.tensor_parallel,
        "pipeline_parallel": arguments.pipeline_parallel,
        "processes": launch.world_size(),
    }


def positive(name: str, value: int | None) -> None:
    """Raise :class:`UserError` unless ``value`` is None or at least 1."""
    if value is not None and value < 1:
        raise UserError(f"{name} must be positive, got {value}")


def check(arguments: Namespace) -> None:
    """Refuse options that the chosen engine does not have, or that do not fit the processes of this launch.

    Raises:
        UserError: naming the option and the way out.
    """
    for name in ("max_batch_tokens", "prefill_chunk", "tensor_parallel", "pipeline_parallel"):
        positive("--" + name.replace("_", "-"), getattr(arguments, name))
    if not arguments.checkpoint:
        why = "with --hf each process holds the model" if arguments.hf else "with --openai the server decides"
        defaults = {"tensor_parallel": 1, "pipeline_parallel": 1, "max_batch_tokens": None, "prefill_chunk": None}
        for name, default in defaults.items():
            if getattr(arguments, name) != default:
                raise UserError(f"--{name.replace('_', '-')} is for --checkpoint; {why}")
    if arguments.openai:
        from .generation.openai import check_timeout, completions_url

        completions_url(arguments.openai)
        authorization("OPENAI_API_KEY")
        check_timeout(arguments.request_timeout)
        positive("--concurrency", arguments.concurrency)
    if arguments.openai and not arguments.model:
        raise UserError("--openai needs --model: the name under which the server offers the model")
    if arguments.model and not arguments.openai:
        raise UserError(f"--model {arguments.model} is for --openai; --checkpoint and --hf name the model themselves")
    if not arguments.hf and not arguments.tokenizer:
        raise UserError(
            f"{'--openai' if arguments.openai else '--checkpoint'} needs --tokenizer: the directory of the Hugging "
            "Face tokenizer that the model was trained with"
        )
    world = launch.world_size()
    size = arguments.tensor_parallel * arguments.pipeline_parallel
    if world % size:
        sizes = f"--tensor-parallel {arguments.tensor_parallel}"
        if arguments.pipeline_parallel > 1:
            sizes += f" times --pipeline-parallel {arguments.pipeline_parallel}"
        raise UserError(
            f"{sizes} does not divide the {world} processes; "
            f"start with torchrun --nproc-per-node set to a multiple of {size}"
        )


def locate(arguments: Namespace) -> tuple[str, str]:
    """Check the model's place; return where it is and, in the leading process, a digest of it.

    Raises:
        UserError: when there is no model.
    """
    if arguments.openai:
        return arguments.model, arguments.model
    if arguments.hf:
        directory = hugging_face_directory(arguments.hf)
        where = arguments.hf
    else:
        directory = megatron_iteration(arguments.checkpoint)
        where = arguments.checkpoint
    return where, where if directory is None else fingerprint(directory) if launch.leads() else ""


def make_encoder(arguments: Namespace, chat: bool | None = None) -> PromptEncoder:
    """The tokenizer, with what ends an answer.

    Args:
        chat: with the chat template; None for what the arguments say.

    Raises:
        UserError: when there is none, or it lacks what is asked of it.
    """
    source = arguments.tokenizer or arguments.hf
    return PromptEncoder(
        load_tokenizer(source),
        chat=arguments.chat_template == "on" if chat is None else chat,
        stop_files=[directory for directory in (source, arguments.hf) if directory],
        stop_tokens=arguments.stop_token,
    )


def check_vocabulary(arguments: Namespace, encoder: PromptEncoder) -> None:
    """Refuse a tokenizer that is not the model's, as far as can be told without loading the model; warn of doubt.

    Raises:
        UserError: when the tokenizer gives other ids than the one that lies with the model, or ids beyond its
            vocabulary, or the model's configuration cannot be read.
    """
    if arguments.openai:
        return
    rows, own = _vocabulary(arguments)
    name = str(arguments.tokenizer or arguments.hf)
    if own is not None and Path(own).resolve() != Path(name).resolve():
        try:
            tokenizer = load_tokenizer(own)
        except UserError:
            # A model without a tokenizer, or a broken one, is no fault of the tokenizer given.
            pass
        else:
            check_same(encoder.tokenizer, name, tokenizer, own)
    if rows is None:
        return
    check_fit(encoder, name, rows)
    if launch.leads() and (warning := unused_rows(encoder, name, rows)):
        print(warning, file=sys.stderr, flush=True)


def _vocabulary(arguments: Namespace) -> tuple[int | None, str | None]:
    """Size of the model's vocabulary where it is known, and where the tokenizer lies that came with it."""
    if arguments.checkpoint:
        from megatron_lengthgen.checkpoint.load import checkpoint_args, tokenizer_dir

        stored, own = checkpoint_args(arguments.checkpoint), tokenizer_dir(arguments.checkpoint)
        return stored.vocab_size or stored.padded_vocab_size, None if own is None else str(own)
    from .generation.huggingface import load_config

    return getattr(load_config(arguments.hf).get_text_config(), "vocab_size", None), arguments.hf


def make_generator(arguments: Namespace, encoder: PromptEncoder, max_length: int) -> Any:
    """The engine, its model loaded; under torchrun every process calls it.

    Args:
        max_length: most tokens that a request may need, prompt and answer together.
    """
    if arguments.openai:
        from .generation.openai import OpenAIGenerator

        return OpenAIGenerator(
            arguments.openai,
            arguments.model,
            encoder,
            as_text=arguments.prompt_as == "text",
            concurrency=arguments.concurrency,
            timeout=arguments.request_timeout,
            rank=launch.rank(),
            size=launch.world_size(),
        )
    if arguments.hf:
        from .generation.huggingface import HuggingFaceGenerator

        return HuggingFaceGenerator.from_pretrained(arguments.hf, dtype=arguments.dtype)
    from .generation.megatron import MegatronGenerator

    return MegatronGenerator.from_checkpoint(
        arguments.checkpoint,
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
        dtype=arguments.dtype,
        max_length=max_length,
        max_batch_tokens=arguments.max_batch_tokens,
        prefill_chunk=arguments.prefill_chunk,
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python could not get the memory that it asked for."""
    import torch

    # On a CPU it is a plain RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def device(arguments: Namespace) -> str:
    """What a process computes on, as reports name it."""
    if arguments.openai:
        return "server"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
