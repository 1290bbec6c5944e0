"""Greedy generation with transformers' own ``generate``: the reference, and the way to score a published model."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_lengthgen.errors import UserError

from .base import Request

__all__ = ["HuggingFaceGenerator", "load_config"]


def load_config(source: str) -> Any:
    """The configuration of a model from a local directory or hub id.

    Raises:
        UserError: when it cannot be loaded.
    """
    from transformers import AutoConfig

    with _loading(source):
        return AutoConfig.from_pretrained(source)


@contextlib.contextmanager
def _loading(source: str) -> Iterator[None]:
    """Turns what goes wrong in loading a model into a :class:`UserError`."""
    try:
        yield
    except Exception as error:
        # A file cut short, weights of another shape, a package that is not there: each has an error of its own.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load a model from {source} ({reason}); give a complete directory saved by save_pretrained"
        ) from error


def _check_keys(source: str, keys: Mapping[str, Collection[Any]]) -> None:
    """Refuse what transformers only warns of: random numbers where a tensor is missing, tensors that nothing takes."""
    for kind, says in (
        ("missing_keys", "config.json asks for {names}, which the files do not hold"),
        ("unexpected_keys", "the files hold {names}, for which config.json has no place"),
        ("mismatched_keys", "{names} has another shape than config.json says"),
    ):
        if names := sorted(key if isinstance(key, str) else str(key[0]) for key in keys.get(kind) or ()):
            some = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            raise UserError(
                f"the model in {source} is not whole: {says.format(names=some)}; download it again, or evaluate it "
                "with the configuration that it was saved with"
            )


class HuggingFaceGenerator:
    """One prompt at a time, with transformers' key-value cache.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        rank, size: this process's share when several are started; each holds the whole model.
    """

    is_first_model_rank = True

    def __init__(self, model: Any, rank: int = 0, size: int = 1) -> None:
        self.model = model
        self.data_parallel_rank, self.data_parallel_size = rank, size

    @classmethod
    def from_pretrained(cls, source: str, *, dtype: str = "bf16") -> "HuggingFaceGenerator":
        """Load a model from a local directory or hub id; under ``torchrun``, one copy per process and GPU.

        Args:
            source: what ``AutoModelForCausalLM.from_pretrained`` takes.
            dtype: ``bf16``, ``fp16`` or ``fp32``.

        Raises:
            UserError: for another dtype, or when the model cannot be loaded, or its files and its configuration
                do not name the same tensors.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as hf_logging

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        if dtype not in dtypes:
            raise UserError(f"dtype must be one of {', '.join(dtypes)}, got {dtype!r}")
        hf_logging.disable_progress_bar()
        with _loading(source):
            model, keys = AutoModelForCausalLM.from_pretrained(source, dtype=dtypes[dtype], output_loading_info=True)
        _check_keys(source, keys)
        if torch.cuda.is_available():
            model = model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}")
        return cls(model.eval(), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """See :class:`~megatron_lengthgen.evaluation.generation.base.Generator`.

        Raises:
            UserError: a prompt has a token that the model does not know.
        """
        import torch
        from transformers import GenerationConfig

        # A published generation_config.json may ask for sampling or a repetition penalty; RULER is plain greedy.
        self.model.generation_config = GenerationConfig()
        known = self.model.get_input_embeddings().num_embeddings
        for position, request in enumerate(requests):
            if (highest := max(request.prompt_ids)) >= known:
                raise UserError(
                    f"request {position} holds token {highest}, outside the vocabulary of {known}: tokenizer and model "
                    "do not belong together"
                )
            prompt = torch.tensor([request.prompt_ids], device=self.model.device)
            stop = sorted(request.stop_ids)
            config = GenerationConfig(
                do_sample=False,
                num_beams=1,
                max_new_tokens=request.max_new_tokens,
                eos_token_id=stop or None,
                pad_token_id=stop[0] if stop else 0,
            )
            with torch.inference_mode():
                output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            new = output[0, prompt.shape[1] :].tolist()
            end = next((i for i, token in enumerate(new) if token in request.stop_ids), len(new))
            yield position, new[:end]
