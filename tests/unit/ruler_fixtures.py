"""Tokenizers, engines and models that several test files share."""

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.ruler.data import Ruler
from megatron_lengthgen.evaluation.ruler.documents import Documents, load_hotpotqa, load_squad
from megatron_lengthgen.evaluation.ruler.essays import Essays
from megatron_lengthgen.evaluation.ruler.sources import Sources
from megatron_lengthgen.evaluation.ruler.words import load_words

ESSAY = (
    "A good idea is rarely obvious at first. Dr. Smith said so in 1993, and few listened. "
    "Most people work on what others work on! Why would they not? It is safe, and safety is comfortable. "
    "But the best work is done at the edges, where nobody looks. One has to be a little stubborn to stay there. "
    "Stubbornness alone is not enough: it takes judgement as well. How does one learn it? By making things.[1] "
    "Things answer back. A plan never does. So start small, show it to somebody, and change it the same day. "
) * 3

CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\nHere are the rules.\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@functools.cache
def essays() -> Essays:
    return Essays.from_text(ESSAY)


def tokenizer(bos: bool = False, eos_after: bool = False, across_words: bool = False) -> Any:
    """A byte-level BPE trained on the essay; ``bos`` and ``eos_after`` make it add those tokens to a text, and with
    ``across_words`` its tokens pay no heed to where words end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across_words)
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|turn|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([ESSAY], trainer)
    if bos or eos_after:
        single = f"{'<s> ' if bos else ''}$A{' </s>' if eos_after else ''}"
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=special[2:]
    )
    made.chat_template = CHAT_TEMPLATE
    return made


#: SQuAD v2.0 as its file is: two articles, one question that has no answer.
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} part {part}. " + " ".join(ESSAY.split(". ")[part : part + 2 + part % 3]),
                    "qas": [
                        {
                            "question": f"What is part {part} of {title}?",
                            "answers": [{"text": f"{title} {part}", "answer_start": 0}, {"text": title}],
                            "is_impossible": False,
                        },
                        {"question": f"What is not in {title} {part}?", "answers": [], "is_impossible": True},
                    ],
                }
                for part in range(6)
            ],
        }
        for title in ("Alpha", "Beta", "Gamma")
    ],
}

#: HotpotQA as its file is: questions with ten pages each, in sentences.
HOTPOTQA = [
    {
        "question": f"Who wrote {number}?",
        "answer": f"Author {number}",
        "context": [[f"Page {number}.{page}", ["It is old.", f" It is by author {page}."]] for page in range(10)],
    }
    for number in range(4)
]


def sources() -> Sources:
    return Sources(load_words(), essays(), squad_documents(), hotpotqa_documents())


@functools.cache
def squad_documents() -> Documents:
    return _loaded(load_squad, SQUAD)


@functools.cache
def hotpotqa_documents() -> Documents:
    return _loaded(load_hotpotqa, HOTPOTQA)


def _loaded(load: Callable[[str], Documents], value: Any) -> Documents:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "data.json"
        file.write_text(json.dumps(value), encoding="utf-8")
        return load(str(file))


def make_ruler(
    seed: int = 42, max_new_tokens: int | None = None, chat: bool = False, splice: bool = True, **kinds: Any
) -> Ruler:
    encoder = PromptEncoder(tokenizer(**kinds), chat=chat)
    return Ruler(encoder, sources(), seed=seed, max_new_tokens=max_new_tokens, splice=splice)


class Oracle:
    """Answers right, by reading the needle out of the decoded prompt; every ``fail``-th answer is empty."""

    def __init__(self, encoder: PromptEncoder, fail: int = 0, reverse: bool = False) -> None:
        self.encoder, self.fail, self.reverse = encoder, fail, reverse
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        order = range(len(requests) - 1, -1, -1) if self.reverse else range(len(requests))
        for position in order:
            request = requests[position]
            self.prompts.append(request.prompt_ids)
            if self.fail and len(self.prompts) % self.fail == 0:
                yield position, []
                continue
            text = self.encoder.decode(request.prompt_ids)
            asked = re.findall(r"special magic \w+ for ([^?]+) mentioned in the provided text (?:is|are)$", text)[0]
            keys = re.split(r", and |, ", asked)
            found = [v for key in keys for v in re.findall(rf"for {re.escape(key)} is: ([\w-]+)\.", text)]
            yield position, self.encoder.tokenizer.encode(f" {', '.join(found)}.", add_special_tokens=False)


class Killed(Exception):
    """Stands for the death of the process."""


class Mortal:
    """An engine that dies after ``lives`` answers."""

    def __init__(self, inner: Oracle, lives: int) -> None:
        self.inner, self.lives = inner, lives

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        for answer in self.inner.generate(requests):
            if not self.lives:
                raise Killed
            self.lives -= 1
            yield answer


def tiny_llama(vocabulary: int = 600) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def save_model(directory: Path) -> Path:
    """A tiny random Llama and its tokenizer, as a published model lies on disk."""
    tiny_llama().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
