"""Does a passage entail a claim: a model that the user names."""

from typing import Any, Protocol

from megatron_lengthgen.errors import UserError

__all__ = ["Entailment", "Seq2SeqEntailment"]


class Entailment(Protocol):
    """Judges claims by passages."""

    @property
    def name(self) -> str: ...

    def entails(self, premise: str, hypothesis: str) -> bool: ...


class Seq2SeqEntailment:
    """A model that answers ``1`` to ``premise: ... hypothesis: ...`` where the one entails the other.

    HELMET's is ``google/t5_xxl_true_nli_mixture`` (Honovich et al., "TRUE: re-evaluating factual consistency
    evaluation", 2022).

    Args:
        source: a local directory or hub id.

    Raises:
        UserError: when it cannot be loaded.
    """

    def __init__(self, source: str) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.name = source
        cuda = torch.cuda.is_available()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForSeq2SeqLM.from_pretrained(source, dtype=torch.bfloat16 if cuda else torch.float32)
        except Exception as error:
            # As with any model: each library has errors of its own.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"cannot load the entailment model {source} ({reason}); give --entailment a sequence-to-sequence model "
                "such as google/t5_xxl_true_nli_mixture"
            ) from error
        self._model = model.to("cuda" if cuda else "cpu").eval()

    def entails(self, premise: str, hypothesis: str) -> bool:
        """Whether the model's answer is ``1``."""
        import torch

        encoded = self._tokenizer(f"premise: {premise} hypothesis: {hypothesis}", return_tensors="pt", verbose=False)
        with torch.inference_mode():
            answer = self._model.generate(encoded.input_ids.to(self._model.device), max_new_tokens=10)
        return self._tokenizer.decode(answer[0], skip_special_tokens=True) == "1"
