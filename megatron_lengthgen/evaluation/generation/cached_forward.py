"""A GPT or hybrid model of Megatron that runs from caches, through its own ``forward``.

``StaticInferenceContext`` caches keys before RoPE, so each decode step ropes the whole cache again in every layer; it
keeps full-length caches for windowed layers, and one length for all rows; and a Mamba layer forgets its state where a
prompt comes in chunks. The caches here sit one step later, in the core attention
(:class:`~megatron_lengthgen.attention.core.SDPACoreAttention`), behind RoPE, and in the mixer
(:class:`~megatron_lengthgen.ssm.cached_mixer.CachedMambaMixer`). The rest is what PyTorch offers: a hook before the
decoder takes the rotary angles away, since each row has positions of its own and core attention rotates by them, from a
table made once; and one behind it keeps the last hidden state alone, so that no logits but the last token's are
computed. Nor does anything but the keys and values of the last layer that attends depend on earlier tokens: they go no
further than its core attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.attention.rotary import Rotary
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.ssm.cached_mixer import CachedMambaMixer

from .stages import Stages

__all__ = ["CachedForward", "vocab_parallel_argmax"]


class CachedForward:
    """Greedy next tokens from a model and caches.

    Args:
        model: this rank's model, one stage of a pipeline or all of it, wrapped in ``Float16Module`` or not. Its layers
            attend through :class:`~megatron_lengthgen.attention.core.SDPACoreAttention`, those of Mamba mix through
            :class:`~megatron_lengthgen.ssm.cached_mixer.CachedMambaMixer`. All ranks of a model make the same calls,
            each with caches of its own, and get the same tokens.
        max_length: most tokens that a sequence may have, prompt and answer together.
        prefill_chunk: most tokens of a prompt that go through the model at once.
        vocab_size: ids from here on are padding of the embedding and never chosen; None where there is no padding.

    Raises:
        UserError: the model is of a kind, or laid out in a way, that cannot be run like this.
    """

    def __init__(self, model: torch.nn.Module, *, max_length: int, prefill_chunk: int, vocab_size: int | None = None):
        self.model = unwrap_model(model)
        _refuse_unsupported(self.model, max_length)
        self.prefill_chunk = prefill_chunk
        self.vocab_size = self.model.vocab_size if vocab_size is None else vocab_size
        cached = (SDPACoreAttention, CachedMambaMixer)
        self._cached = [module for module in self.model.modules() if isinstance(module, cached)]
        self._tp_group = self.model.pg_collection.tp
        self._stages = Stages(self.model)
        self._last_mixing = _last_mixing_layer(self.model) if self._stages.is_last else None
        self._device = next(self.model.parameters()).device
        self._rotary = _rotary_table(self.model, max_length)
        skips = self.model.config.no_rope_freq
        self._rotating = [
            module
            for module in self._cached
            if isinstance(module, SDPACoreAttention) and not (skips and skips[module.layer_number - 1])
        ]

    def extend(self, ids: Sequence[int], cache: SequenceCache, start: int = 0) -> None:
        """Read tokens into a cache that holds ``start`` positions, chunk by chunk."""
        for tokens, positions in self._chunks(ids, start):
            self._forward(tokens, positions, [cache])

    def prefill(self, ids: Sequence[int], cache: SequenceCache, start: int = 0) -> int:
        """As :meth:`extend`, for what is left of a prompt; return the token that follows it."""
        *chunks, (tokens, positions) = self._chunks(ids, start)
        for chunk in chunks:
            self._forward(*chunk, [cache])
        return int(self._next_tokens(tokens, positions, [cache]))

    def decode(self, tokens: Sequence[int], positions: Sequence[int], caches: Sequence[SequenceCache]) -> list[int]:
        """Append one token to each of several sequences; return the tokens that follow.

        Args:
            tokens: [b], the token to append to each sequence.
            positions: [b], its position, which is the number of tokens in the cache.
            caches: [b]
        """
        token_column, position_column = torch.tensor([list(tokens), list(positions)], device=self._device).unsqueeze(2)
        return self._next_tokens(token_column, position_column, caches).tolist()

    def _chunks(self, ids: Sequence[int], start: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and positions, each [1, chunk]."""
        tokens = torch.tensor([list(ids)], device=self._device)
        positions = torch.arange(start, start + tokens.size(1), device=self._device)[None]
        return list(zip(tokens.split(self.prefill_chunk, 1), positions.split(self.prefill_chunk, 1), strict=True))

    def _next_tokens(self, tokens: Tensor, positions: Tensor, caches: Sequence[SequenceCache]) -> Tensor:
        """tokens, positions [b, s] -> the tokens that follow [b], on all ranks."""
        output = self._forward(tokens, positions, caches, last=1)
        if self._stages.is_last:
            output = vocab_parallel_argmax(output[:, -1], self.vocab_size, self._tp_group)
        else:
            output = torch.empty_like(tokens[:, 0])
        return self._stages.share(output)

    @torch.no_grad()
    def _forward(self, tokens: Tensor, positions: Tensor, caches: Sequence[SequenceCache], last: int = 0) -> Tensor:
        """tokens, positions [b, s] -> logits of the ``last`` tokens [b, last, this rank's part], on the last stage."""
        if not self._stages.is_first:
            self.model.set_input_tensor(self._stages.receive(tokens.size(1), tokens.size(0), self._device))
        # Not less than one, since experts want tokens.
        ending = nullcontext() if self._last_mixing is None else _ending(self._last_mixing, max(last, 1))
        with self._attached(positions, caches, last), ending:
            output = self.model(tokens, positions, None, runtime_gather_output=False)
        if not self._stages.is_last:
            self._stages.send(output)
        return output

    @contextmanager
    def _attached(self, positions: Tensor, caches: Sequence[SequenceCache], last: int) -> Iterator[None]:
        """Layers read and fill ``caches``, tokens stand at ``positions`` [b, s], the head sees the ``last`` of them."""

        def without_rotary(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, {**kwargs, "rotary_pos_emb": None}

        def only_last(decoder: Any, args: tuple, hidden_states: Tensor) -> Tensor:
            return hidden_states[hidden_states.size(0) - last :] if self._stages.is_last else hidden_states

        decoder = self.model.decoder
        hooks = [
            decoder.register_forward_pre_hook(without_rotary, with_kwargs=True),
            decoder.register_forward_hook(only_last),
        ]
        rotary = None if self._rotary is None else self._rotary.at(positions)
        for module in self._cached:
            module.caches = caches
        for module in self._rotating:
            module.rotary = rotary
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.model.set_input_tensor(None)
            for module in self._cached:
                module.caches = None
            for module in self._rotating:
                module.rotary = None


@contextmanager
def _ending(layer: Any, tokens: int) -> Iterator[None]:
    """``layer`` attends for its last ``tokens`` alone, and hands nothing but them on."""
    core, bias_dropout_add = layer.self_attention.core_attention, layer.self_attn_bda

    def of_the_last(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = bias_dropout_add(training, fused)
        return lambda x_with_bias, residual, probability: add(x_with_bias, residual[-tokens:], probability)

    core.queries, layer.self_attn_bda = tokens, of_the_last
    try:
        yield
    finally:
        core.queries, layer.self_attn_bda = None, bias_dropout_add


def vocab_parallel_argmax(logits: Tensor, vocab_size: int, group: torch.distributed.ProcessGroup) -> Tensor:
    """Argmax over a vocabulary that is split over ``group``, the same on each of its ranks.

    Args:
        logits: [b, vocabulary of this rank].
        vocab_size: ids from here on are padding and never chosen.
        group: tensor parallel group; rank r holds the r-th part of the vocabulary.

    Returns:
        [b], int64; of equal logits, the lowest id.
    """
    offset = group.rank() * logits.size(1)
    real = min(max(vocab_size - offset, 0), logits.size(1))
    if real:
        values, ids = logits[:, :real].float().max(dim=1)
    else:
        values = logits.new_full((logits.size(0),), float("-inf"), dtype=torch.float32)
        ids = torch.zeros_like(values, dtype=torch.int64)
    if group.size() == 1:
        return ids
    # Both in one message: float64 holds any id and any float32 exactly.
    mine = torch.stack([values.double(), (ids + offset).double()])
    everyone = mine.new_empty(2 * group.size(), mine.size(1))
    torch.distributed.all_gather_into_tensor(everyone, mine, group=group)
    everyone = everyone.view(group.size(), 2, -1)
    best = everyone[:, 0].argmax(dim=0)
    return everyone[:, 1].gather(0, best[None])[0].long()


def _last_mixing_layer(model: Any) -> Any:
    """The last layer of this stage in which tokens see others, if it attends; None where it could not be cut short."""
    if model.config.attention_output_gate:  # it multiplies what core attention returns
        return None
    for layer in reversed(model.decoder.layers):
        if hasattr(layer, "mixer"):
            return None
        if isinstance(getattr(layer.self_attention, "core_attention", None), SDPACoreAttention):
            return layer
    return None


def _rotary_table(model: Any, max_length: int) -> Rotary | None:
    """Of all positions, or None for a model without rotary embeddings."""
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    angles = model.rotary_pos_emb(max_length)
    if model.position_embedding_type == "yarn":
        angles = angles[0]
    config = model.config
    return Rotary.table(
        angles[:, 0, 0],
        interleaved=config.rotary_interleaved,
        scale=_yarn_get_concentration_factor_from_config(config),
        dtype=config.params_dtype,
    )


def _refuse_unsupported(model: Any, max_length: int) -> None:
    if not isinstance(model, (GPTModel, HybridModel)):
        raise UserError(f"generation runs GPTModel and HybridModel, got {type(model).__name__}")
    config = model.config
    if config.sequence_parallel:
        raise UserError("sequence_parallel cannot split one new token: load the checkpoint without it")
    if config.apply_rope_fusion:
        raise UserError("apply_rope_fusion cannot rope rows at different positions: load with --no-rope-fusion")
    if config.virtual_pipeline_model_parallel_size is not None:
        raise UserError(
            f"generation runs one part of the model per stage, got virtual_pipeline_model_parallel_size="
            f"{config.virtual_pipeline_model_parallel_size}: load the checkpoint without it"
        )
    if config.mtp_num_layers:
        raise UserError(f"generation does not run multi-token prediction (mtp_num_layers={config.mtp_num_layers})")
    if model.position_embedding_type not in ("rope", "yarn", "learned_absolute", "none"):
        raise UserError(f"generation has no position_embedding_type={model.position_embedding_type!r}")
    if model.position_embedding_type == "learned_absolute" and max_length > model.max_sequence_length:
        raise UserError(
            f"max_length={max_length} is beyond the {model.max_sequence_length} learned positions of this model"
        )
    for layer in model.decoder.layers:
        for name, wanted in (("self_attention", SDPACoreAttention), ("mixer", CachedMambaMixer)):
            module = getattr(layer, name, None)
            if module is None or isinstance(module, IdentityOp):
                continue
            module = getattr(module, "core_attention", None) if wanted is SDPACoreAttention else module
            if not isinstance(module, wanted):
                raise UserError(
                    f"layer {layer.layer_number} has {type(module).__name__} where generation needs {wanted.__name__}: "
                    "build the model with megatron_lengthgen's local spec and core_attention 'sdpa'; checkpoints fit "
                    "either"
                )
