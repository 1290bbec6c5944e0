"""SmolLM3 for Megatron Bridge: importing this module registers it, and ``AutoBridge`` knows it from then on."""

from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.llama.llama_bridge import LlamaBridge
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_lengthgen.attention.pattern import AttentionPattern

__all__ = ["SmolLM3Bridge"]


@MegatronModelBridge.register_bridge(source="SmolLM3ForCausalLM", target=GPTModel, model_type="smollm3")
class SmolLM3Bridge(LlamaBridge):
    """Llama's tensors; which layers have a window and rotary positions is read and written per layer.

    Source: ``transformers/models/smollm3/modeling_smollm3.py``.
    """

    def provider_bridge(self, hf_pretrained: PreTrainedCausalLM) -> GPTModelProvider:
        """Megatron's provider for a SmolLM3 configuration.

        Raises:
            UserError: windows or lists of layers that contradict each other.
        """
        provider = super().provider_bridge(hf_pretrained)
        pattern = AttentionPattern.from_hugging_face(hf_pretrained.config.to_dict(), provider.num_layers)
        for name, value in pattern.to_megatron().items():
            setattr(provider, name, value)
        return provider

    @classmethod
    def megatron_to_hf_config(cls, provider: GPTModelProvider) -> dict[str, Any]:
        """SmolLM3's configuration for a provider."""
        pattern = AttentionPattern.from_megatron(provider)
        return super().megatron_to_hf_config(provider) | pattern.to_hugging_face()
