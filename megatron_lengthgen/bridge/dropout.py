"""Dropout in a Megatron Bridge recipe: a spec that configuration files hold, and the callback that counts steps."""

import dataclasses
import inspect
from typing import Any, Literal

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import binding, checks, substitution
from megatron_lengthgen.specs.site import sites

__all__ = ["MaskCallback", "RegularizedSpec", "allow_targets", "apply"]

_FIELDS: dict[Literal["gpt", "hybrid"], str] = {"gpt": "transformer_layer_spec", "hybrid": "hybrid_stack_spec"}


@dataclasses.dataclass(frozen=True)
class RegularizedSpec:
    """A provider's own layer spec, whatever its model, with dropout substituted into it when the model is built.

    A value and not a function, so that ``run_config.yaml`` holds all of it and gives it back.

    Attributes:
        base: The provider's ``transformer_layer_spec`` or ``hybrid_stack_spec``: a spec, or a function that makes one.
        regularization: Which dropout.

    Source: ``megatron/bridge/models/gpt_provider.py::GPTModelProvider.provide``,
    ``megatron/bridge/models/hybrid/hybrid_provider.py::HybridModelProvider._resolve_hybrid_stack_spec``.
    """

    base: Any
    regularization: Regularization

    def __call__(self, config: Any, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
        """The spec for ``config``, the provider itself."""
        spec = self.base
        if not isinstance(spec, ModuleSpec):
            parameters = inspect.signature(spec).parameters
            stage = {"vp_stage": vp_stage} if "vp_stage" in parameters else {}
            spec = spec(config, **stage) if parameters else spec()
        return substitution.apply(spec, self.regularization)


class MaskCallback:
    """Bridge training callback: tells the masks which training step it is."""

    def __init__(self) -> None:
        self._is_bound = False
        self._state: Any = None

    def on_train_start(self, context: Any) -> None:
        """Keep Bridge's ``GlobalState``; its ``train_state.step`` counts finished steps, also after a resume."""
        if not self._is_bound:
            raise UserError(
                "the model was built from another configuration than the one that megatron_lengthgen.bridge.apply "
                "was given: call it last, on the configuration that pretrain gets"
            )
        self._state = context.state

    def step(self) -> int:
        """Number of finished training steps."""
        if self._state is None:
            raise UserError(
                "the training step is not known: give what megatron_lengthgen.bridge.apply returned to pretrain, "
                "callbacks=[...]"
            )
        return int(self._state.train_state.step)

    def bind(self, models: list[torch.nn.Module], *, seed: int) -> None:
        """Give the masks of a built model their seed and step."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        binding.bind(models, seed=seed, step=self.step, microbatches=get_num_microbatches)
        self._is_bound = True


def allow_targets() -> None:
    """Let Megatron and Bridge make this package's objects when they read a YAML file that names them.

    :func:`apply` does it too; call it before a ``run_config.yaml`` is read in a process that does not train. Bridge's
    ``register_allowed_target_prefix`` changes the same list.

    Source: ``megatron/training/config/instantiate_utils.py``.
    """
    from megatron.training.config.instantiate_utils import target_allowlist

    target_allowlist.add_prefix("megatron_lengthgen.")


def apply(cfg: Any, regularization: Regularization) -> MaskCallback:
    """Put dropout into the model of a Bridge recipe.

    The provider's layer spec is kept and substituted into. Megatron's own dropouts (``hidden_dropout``, which drops
    embeddings too, and ``attention_dropout``) are set to 0: p acts through the spec alone.

    Args:
        cfg: ``ConfigContainer`` after all overrides; its ``model`` and only that is changed.
        regularization: Which dropout. p None takes ``cfg.model.hidden_dropout``.

    Returns:
        A callback for Bridge's ``pretrain`` or ``finetune``. Training without it stops at the first microbatch.

    Raises:
        UserError: a model without a layer spec to substitute into, no p, or a combination that Megatron would run
            wrongly (:mod:`megatron_lengthgen.specs.checks`).
    """
    model = cfg.model
    kind = _kind(model)
    field = _FIELDS[kind]
    regularization = _with_probability(regularization, model)
    _check(cfg, regularization, kind)
    spec = RegularizedSpec(_stock(getattr(model, field), kind), regularization)
    setattr(model, field, spec)
    model.hidden_dropout = model.attention_dropout = 0.0
    allow_targets()
    callback = MaskCallback()

    # A function: a deep copy of the provider keeps it, and it keeps the callback.
    def bind(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        if getattr(model, field) is not spec or _lacks_dropout(models, regularization):
            raise UserError(
                f"the model was not built from the {field} that megatron_lengthgen.bridge.apply set: call it last, "
                "and once"
            )
        if model.hidden_dropout:
            raise UserError(
                f"hidden_dropout was set to {model.hidden_dropout} after megatron_lengthgen.bridge.apply, and would "
                "drop embeddings: call apply last"
            )
        _check(cfg, regularization, kind)
        checks.check_tracker(model, regularization, _tracker(), keyed=True)
        callback.bind(models, seed=cfg.rng.seed)
        return models

    model.register_pre_wrap_hook(bind)
    return callback


def _kind(model: Any) -> Literal["gpt", "hybrid"]:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

    if isinstance(model, HybridModelProvider):
        return "hybrid"
    if isinstance(model, GPTModelProvider):
        return "gpt"
    raise UserError(
        f"cfg.model is a {type(model).__name__}, and dropout can be put into Megatron Bridge's GPTModelProvider and "
        "HybridModelProvider: use one of them"
    )


def _stock(base: Any, kind: str) -> Any:
    if isinstance(base, RegularizedSpec):  # from a run_config.yaml
        return base.base
    if base is None and kind == "hybrid":
        from megatron.bridge.models.hybrid.hybrid_provider import get_default_hybrid_stack_spec

        return get_default_hybrid_stack_spec
    return base


def _with_probability(regularization: Regularization, model: Any) -> Regularization:
    if regularization.p is not None or regularization.placement == "none":
        return regularization
    if not model.hidden_dropout:
        raise UserError(
            f"placement {regularization.placement!r} has no p, and hidden_dropout of the recipe is 0: give "
            "Regularization(p=...)"
        )
    return dataclasses.replace(regularization, p=model.hidden_dropout)


def _check(cfg: Any, regularization: Regularization, kind: Literal["gpt", "hybrid"]) -> None:
    if getattr(cfg.dist, "use_decentralized_pg", False):
        raise UserError(
            "dist.use_decentralized_pg is on, and masks find their place through Megatron's global process groups: "
            "switch it off"
        )
    if regularization.is_active and "mtp" in regularization.sites:
        raise UserError(
            "site 'mtp' is behind enorm and hnorm, which Megatron Bridge builds past the layer spec: leave the site out"
        )
    checks.check(cfg.model, regularization, kind=kind, keyed=True, mtp_follows_spec=kind == "gpt")


def _lacks_dropout(models: list[torch.nn.Module], regularization: Regularization) -> bool:
    """Are there layers, and no site where they should have some?"""
    wanted = regularization.is_active and regularization.p
    modules = [module for model in models for module in model.modules()]
    has_layers = any(isinstance(module, (TransformerLayer, MambaLayer)) for module in modules)
    return bool(wanted and has_layers and not any(True for model in models for _ in sites(model)))


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
