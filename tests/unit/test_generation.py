"""The Megatron generation engine against full forwards without a cache, and against transformers' ``generate``."""

from collections.abc import Callable, Sequence

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.cached_forward import vocab_parallel_argmax
from megatron_lengthgen.evaluation.generation.megatron import MegatronGenerator
from megatron_lengthgen.evaluation.generation.prefixes import Family, families
from megatron_lengthgen.models.llama import key_map

VOCAB = 96
SHAPE = dict(num_layers=4, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2, kv_channels=8)
PATTERNS = {
    "full": dict(),
    "windows": dict(window_size=(6, 0)),
    "windows and NoPE": dict(window_size=(10, 0), window_attn_skip_freq=4, no_rope_freq=[0, 0, 0, 1]),
}


def build_model(position_embedding_type: str = "rope", **changes) -> GPTModel:
    config = TransformerConfig(
        **(
            SHAPE
            | dict(
                normalization="RMSNorm",
                layernorm_epsilon=1e-6,
                gated_linear_unit=True,
                activation_func=torch.nn.functional.silu,
                add_bias_linear=False,
                use_cpu_initialization=True,
                init_method_std=0.3,
                hidden_dropout=0.1,
                attention_dropout=0.1,
            )
            | changes
        )
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=VOCAB,
        max_sequence_length=256,
        position_embedding_type=position_embedding_type,
        share_embeddings_and_output_weights=True,
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def expected(model: GPTModel, request: Request) -> list[int]:
    """Greedy decoding by a full forward for each token."""
    ids, new = list(request.prompt_ids), []
    model.eval()
    while len(new) < request.max_new_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        token = int(logits[0, -1].argmax())
        if token in request.stop_ids:
            break
        ids.append(token)
        new.append(token)
    return new


def check(model: GPTModel, requests: Sequence[Request], **arguments) -> None:
    engine = MegatronGenerator(model, **(dict(max_length=128) | arguments))
    assert dict(engine.generate(requests)) == {i: expected(model, request) for i, request in enumerate(requests)}


@pytest.fixture(params=PATTERNS)
def model(megatron_single: Callable[[int], None], request: pytest.FixtureRequest) -> GPTModel:
    megatron_single(3)
    return build_model(**PATTERNS[request.param])


@pytest.mark.parametrize("chunk", [1, 7, 16, None])
def test_equals_full_forwards(model: GPTModel, chunk: int | None) -> None:
    check(model, [Request(prompt(45), 25, frozenset())], prefill_chunk=chunk)


def test_rows_of_unequal_length_decode_together(model: GPTModel) -> None:
    lengths, news = [3, 40, 41, 17, 1, 64, 30], [20, 5, 1, 12, 30, 9, 2]
    requests = [Request(prompt(n, n), k, frozenset()) for n, k in zip(lengths, news, strict=True)]
    check(model, requests, prefill_chunk=16)
    # Room for one sequence or two at a time: the others wait their turn.
    check(model, requests, prefill_chunk=16, max_length=80, max_batch_tokens=80)


def test_stop_tokens_end_an_answer_and_are_not_part_of_it(model: GPTModel) -> None:
    free = expected(model, Request(prompt(20), 12, frozenset()))
    stop = free[5]
    cut = free[: free.index(stop)]
    engine = MegatronGenerator(model, max_length=64)
    requests = [Request(prompt(20), 12, frozenset([stop])), Request(prompt(20), 12, frozenset(free[:1]))]
    assert dict(engine.generate(requests)) == {0: cut, 1: []}


def test_answers_come_as_they_finish(model: GPTModel) -> None:
    requests = [Request(prompt(10, 1), 8, frozenset()), Request(prompt(10, 2), 2, frozenset())]
    assert [position for position, _ in MegatronGenerator(model, max_length=64).generate(requests)] == [1, 0]


def start_alike(sizes: Sequence[int], shared: Sequence[int]) -> list[Request]:
    """Prompts of ``sizes`` that follow one text for ``shared`` tokens and then go ways of their own."""
    text = prompt(128, 99)
    return [
        Request(text[:start] + prompt(size - start, 100 + i), 6, frozenset())
        for i, (size, start) in enumerate(zip(sizes, shared, strict=True))
    ]


def test_a_shared_start_is_read_once(model: GPTModel) -> None:
    """The windows are shorter than what is shared, so that windowed layers go on from a window of the path."""
    requests = start_alike(sizes=[60, 70, 45, 64, 33, 9], shared=[40, 21, 33, 64, 8, 0])
    arguments = dict(max_length=96, prefill_chunk=8)
    alone = MegatronGenerator(model, **arguments, share_prefixes=False)
    answers = dict(alone.generate(requests))
    assert answers == {i: expected(model, request) for i, request in enumerate(requests)}
    assert (alone.prompt_tokens, alone.shared_tokens) == (281, 0)
    # Whole chunks of 8: 40, 16, 32, 40 (nobody follows the fourth further), 8, 0; the path's 40 are read once.
    for room, shared in ((4 * 96, 136 - 40), (96, 72 - 16)):
        # With room for the longest request (76 tokens) and no more than 20 of a path, that is cut to 16.
        engine = MegatronGenerator(model, **arguments, max_batch_tokens=room)
        assert dict(engine.generate(requests)) == answers
        assert (engine.prompt_tokens, engine.shared_tokens) == (281, shared)


def test_sharing_changes_no_bit(model: GPTModel) -> None:
    """Chunks of a prompt are the same with and without a shared start, and so are all keys and values behind it."""
    requests = start_alike(sizes=[50, 61], shared=[27, 30])
    caches = []
    for share in (False, True):
        engine = MegatronGenerator(model, max_length=96, prefill_chunk=8, share_prefixes=share)
        seen, prefill = [], engine._run.prefill

        def remember(ids, cache, start=0, seen=seen, prefill=prefill):
            token = prefill(ids, cache, start)
            seen.append({n: (layer.keys, layer.values, layer.end) for n, layer in cache._layers.items()})
            return token

        engine._run.prefill = remember
        list(engine.generate(requests))
        assert (engine.shared_tokens > 0) is share
        caches.append(seen)
    for alone, shared in zip(*caches, strict=True):
        for number, (keys, values, end) in alone.items():
            other_keys, other_values, other_end = shared[number]
            both = min(end, other_end)
            assert torch.equal(keys[:, :, end - both : end], other_keys[:, :, other_end - both : other_end])
            assert torch.equal(values[:, :, end - both : end], other_values[:, :, other_end - both : other_end])


def test_one_new_token_and_no_requests(model: GPTModel) -> None:
    check(model, [Request(prompt(9), 1, frozenset())])
    check(model, [])


def test_learned_positions(megatron_single: Callable[[int], None]) -> None:
    megatron_single(5)
    model = build_model("learned_absolute")
    check(model, [Request(prompt(30), 10, frozenset()), Request(prompt(21, 1), 10, frozenset())], prefill_chunk=8)
    with pytest.raises(UserError, match="256 learned positions"):
        MegatronGenerator(model, max_length=257)


def test_model_is_left_as_it_was(model: GPTModel) -> None:
    model.train()
    model.embedding.eval()
    before = {name: module.training for name, module in model.named_modules()}
    answers = MegatronGenerator(model, max_length=64).generate(
        [Request(prompt(9), 5, frozenset()), Request((1,), 1, frozenset())]
    )
    next(answers)
    answers.close()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(m.caches is None for m in model.modules() if isinstance(m, SDPACoreAttention))
    loss = model(torch.tensor([prompt(9)]), torch.arange(9)[None], None, labels=torch.tensor([prompt(9)])).sum()
    loss.backward()


def test_only_the_last_position_meets_the_vocabulary(model: GPTModel) -> None:
    rows = []
    model.output_layer.register_forward_hook(lambda layer, inputs, output: rows.append(output[0].shape[:2]))
    list(MegatronGenerator(model, max_length=64, prefill_chunk=16).generate([Request(prompt(40), 3, frozenset())]))
    assert [row for row in rows if row[0]] == [(1, 1)] * 3


def test_only_the_last_position_goes_beyond_the_last_attention(model: GPTModel) -> None:
    lengths: list[list[int]] = [[], []]
    hooks = [
        layer.mlp.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(inputs[0].size(0)))
        for layer, seen in zip(model.decoder.layers[-2:], lengths, strict=True)
    ]
    dict(MegatronGenerator(model, max_length=64, prefill_chunk=16).generate([Request(prompt(40), 3, frozenset())]))
    for hook in hooks:
        hook.remove()
    assert lengths == [[16, 16, 8, 1, 1], [1, 1, 1, 1, 1]]
    last = model.decoder.layers[-1]
    assert last.self_attention.core_attention.queries is None
    assert last.self_attn_bda is model.decoder.layers[0].self_attn_bda


def test_a_gate_on_attention_has_all_positions(megatron_single: Callable[[int], None]) -> None:
    megatron_single(3)
    check(build_model(attention_output_gate=True), [Request(prompt(40), 6, frozenset())], prefill_chunk=16)


def test_padding_of_the_vocabulary_is_never_chosen(model: GPTModel) -> None:
    with torch.no_grad():
        model.embedding.word_embeddings.weight[VOCAB - 16 :] *= 50
    request = Request(tuple(t % (VOCAB - 16) for t in prompt(20)), 10, frozenset())
    assert max(expected(model, request)) >= VOCAB - 16
    [(_, new)] = MegatronGenerator(model, max_length=64, vocab_size=VOCAB - 16).generate([request])
    assert len(new) == 10 and max(new) < VOCAB - 16


def test_argmax_takes_the_lowest_of_equals(megatron_single: Callable[[int], None]) -> None:
    group = torch.distributed.group.WORLD
    logits = torch.tensor([[0.0, 2.0, 2.0, 9.0], [-1.0, -1.0, -3.0, 9.0]])
    assert vocab_parallel_argmax(logits, 3, group).tolist() == [1, 0]


def test_attention_serves_megatrons_own_static_context(model: GPTModel) -> None:
    """Chunked prefill and decode through ``StaticInferenceContext``, which says `no_mask` to what follows a prefix."""
    tokens = torch.tensor([prompt(40)])
    positions = torch.arange(40)[None]
    model.eval()
    with torch.no_grad():
        whole = model(tokens, positions, None)
        context, parts = StaticInferenceContext(1, 64), []
        for size in (13, 20, 1, 6):
            chunk = slice(context.sequence_len_offset, context.sequence_len_offset + size)
            parts.append(model(tokens[:, chunk], positions[:, chunk], None, inference_context=context))
            context.sequence_len_offset += size
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_equals_transformers_generate(megatron_single: Callable[[int], None]) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=SHAPE["hidden_size"],
            intermediate_size=SHAPE["ffn_hidden_size"],
            num_hidden_layers=SHAPE["num_layers"],
            num_attention_heads=SHAPE["num_attention_heads"],
            num_key_value_heads=SHAPE["num_query_groups"],
            head_dim=SHAPE["kv_channels"],
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=None,
        )
    ).eval()
    model = build_model()
    args = SHAPE | dict(
        group_query_attention=True,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        untie_embeddings_and_output_weights=False,
    )
    source = peer.state_dict()
    state = {entry.megatron: entry.pack([source[name] for name in entry.hugging_face]) for entry in key_map(args)}
    model.load_state_dict(state, strict=False)
    requests = [Request(prompt(n, n), 30, frozenset()) for n in (50, 33)]
    engine = MegatronGenerator(model, max_length=128, prefill_chunk=16)
    for position, new in engine.generate(requests):
        ids = torch.tensor([requests[position].prompt_ids])
        settings = GenerationConfig(do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0)
        out = peer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert new == out[0, ids.size(1) :].tolist()


def test_families_follow_the_path_that_most_take() -> None:
    a, b, c = (1, 1), (2, 2), (3, 3)
    prompts = [a + b + (9,), a + c + (9,), a + b + c, c + a + b, a + b, a + b + c + (9,), c + a, (7,), a + b + c + (8,)]
    one, two, rest = families(prompts, block=2, limit=10)
    assert one.path == a + b + c
    # (a + b) leaves after a, because its last token must be read; the sixth and the ninth share all of c.
    assert one.members == ((2, 1), (2, 4), (4, 0), (4, 2), (6, 5), (6, 8))
    assert (two, rest) == (Family(c, ((2, 3), (2, 6))), Family((), ((0, 7),)))
    assert families(prompts, block=2, limit=5)[0].path == a + b
    assert families(prompts, block=2, limit=0) == [Family((), tuple((0, i) for i in range(9)))]
    assert families([], block=2, limit=8) == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request((), 4, frozenset()), "empty prompt"),
        (Request((1, 2), 0, frozenset()), "0 new tokens"),
        (Request(tuple(range(30)), 3, frozenset()), "needs 33 tokens.*max_length=32"),
        (Request((1, VOCAB), 1, frozenset()), f"token {VOCAB}, outside the vocabulary"),
        (Request((1, -2), 1, frozenset()), "token -2, outside the vocabulary"),
    ],
)
def test_refuses_bad_requests_at_once(megatron_single: Callable[[int], None], request_: Request, words: str) -> None:
    engine = MegatronGenerator(build_model(), max_length=32)
    with pytest.raises(UserError, match=f"request 1 .*{words}"):
        engine.generate([Request((1,), 1, frozenset()), request_])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(max_length=1), "max_length"),
        (dict(max_length=64, max_batch_tokens=63), "max_batch_tokens=63"),
        (dict(max_length=64, prefill_chunk=0), "prefill_chunk"),
    ],
)
def test_refuses_bad_sizes_before_loading(arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        MegatronGenerator.from_checkpoint("nowhere", **arguments)


def test_refuses_models_it_cannot_run(megatron_single: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    for name in ("sequence_parallel", "apply_rope_fusion"):
        monkeypatch.setattr(model.config, name, True)
        with pytest.raises(UserError, match=name):
            MegatronGenerator(model, max_length=32)
        monkeypatch.undo()
    with pytest.raises(UserError, match="GPTModel and HybridModel, got Linear"):
        MegatronGenerator(torch.nn.Linear(1, 1), max_length=32)
    stock = GPTModel(
        config=model.config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    with pytest.raises(UserError, match="layer 1 has DotProductAttention where generation needs SDPACoreAttention"):
        MegatronGenerator(stock, max_length=32)
    monkeypatch.setattr(model.config, "virtual_pipeline_model_parallel_size", 2)
    with pytest.raises(UserError, match="virtual_pipeline_model_parallel_size=2"):
        MegatronGenerator(model, max_length=32)
