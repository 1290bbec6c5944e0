"""Documents and attention sinks against Megatron, each document alone, and transformers' SmolLM3."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import spec_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from test_attention import DIM, GROUPS, HEADS, build, gradients, inputs, make_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, SmolLM3Config, SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import apply_rotary_pos_emb

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.attention.documents import mask_layouts
from megatron_lengthgen.attention.functional import causal_attention
from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import gpt, hybrid
from megatron_lengthgen.specs.checks import check

pytestmark = pytest.mark.usefixtures("megatron_single")
EXACT = {"rtol": 1e-5, "atol": 1e-5}
GRADIENT = {"rtol": 1e-4, "atol": 2e-5}


def windowed(window: int | None, **fields: Any) -> Any:
    return make_config(window_size=None if window is None else (window - 1, 0), **fields)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pack(lengths: list[int], room: list[int] | None = None, **fields: Any) -> PackedSeqParams:
    counts, places = offsets(lengths), None if room is None else offsets(room)
    return PackedSeqParams(
        **{
            "qkv_format": "thd",
            "cu_seqlens_q": counts,
            "cu_seqlens_kv": counts,
            "cu_seqlens_q_padded": places,
            "cu_seqlens_kv_padded": places,
            **fields,
        }
    )


def packed_inputs(total: int) -> list[Tensor]:
    """[tokens, n, d], as ``Attention.forward`` hands them on."""
    return [x.detach().squeeze(1).requires_grad_() for x in inputs(total, total, batch=1)]


@given(
    documents=st.lists(st.tuples(st.integers(0, 150), st.sampled_from([0, 0, 1, 40])), min_size=1, max_size=6),
    tail=st.sampled_from([0, 13]),
    window=st.none() | st.integers(1, 120),
    softmax=st.sampled_from(["vanilla", "learnable"]),
)
@settings(max_examples=40, deadline=None)
def test_a_packed_document_is_attended_as_if_alone(
    documents: list[tuple[int, int]], tail: int, window: int | None, softmax: str
) -> None:
    lengths, room = [n for n, _ in documents], [n + padding for n, padding in documents]
    attention = build(SDPACoreAttention, windowed(window, softmax_type=softmax))
    leaves = packed_inputs(sum(room) + tail + 1)
    got = attention(*leaves, None, packed_seq_params=pack(lengths, room), attn_mask_type=AttnMaskType.padding_causal)
    expected, start = torch.zeros_like(got), 0
    for length, space in zip(lengths, room, strict=True):
        part = slice(start, start + length)
        if length:
            alone = attention(*(x[part][:, None] for x in leaves), None)
            expected = torch.cat([expected[:start], alone[:, 0], expected[start + length :]])
        start += space
    assert got.shape == (sum(room) + tail + 1, HEADS * DIM)
    torch.testing.assert_close(got, expected, **EXACT)
    if expected.requires_grad:
        for a, b in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(a, b, **GRADIENT)


def test_packed_queries_may_follow_cached_keys() -> None:
    attention = build(SDPACoreAttention, windowed(9))
    query, key, value = packed_inputs(90)
    packed = pack([20, 5], cu_seqlens_kv=offsets([60, 30]))
    got = attention(query[:25], key, value, None, packed_seq_params=packed)
    first = attention(query[:20, None], key[:60, None], value[:60, None], None)
    second = attention(query[20:25, None], key[60:, None], value[60:, None], None)
    torch.testing.assert_close(got, torch.cat([first, second])[:, 0], **EXACT)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements, operations = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
                self.operations += 1
        return result


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kind", ["one", "packed", "sink"])
def test_no_tensor_grows_with_the_square_of_the_length(kind: str, window: int | None) -> None:
    attention = build(SDPACoreAttention, windowed(window, softmax_type="learnable" if kind == "sink" else "vanilla"))
    largest = []
    for length in (1024, 4096):
        if kind == "packed":
            leaves = packed_inputs(length)
            arguments: dict[str, Any] = {"packed_seq_params": pack([length // 2, length // 2])}
        else:
            leaves, arguments = inputs(length, length, batch=1), {}
        with Largest() as mode:
            forward = mode.operations
            out = attention(*leaves, None, **arguments)
            assert mode.operations > forward
            forward = mode.operations
            out.sum().backward()
            assert mode.operations > forward, "the backward must be seen"
        largest.append(mode.elements)
    assert largest[1] <= 4.2 * largest[0]
    assert largest[1] < 4096**2 / 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qkv_format": "sbhd"}, "'sbhd'"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q"),
        ({"cu_seqlens_kv": None}, "cu_seqlens_kv"),
        ({"cu_seqlens_q": offsets([10, 25])}, r"\[0, 10, 35\] does not divide 30 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 20, 10, 30])}, "does not divide"),
        ({"cu_seqlens_q": torch.tensor([5, 30])}, "does not divide"),
        ({"cu_seqlens_q": torch.tensor([0])}, "does not divide"),
        ({"cu_seqlens_q_padded": offsets([9, 20])}, "does not divide"),
        ({"cu_seqlens_q_padded": offsets([30])}, "does not divide"),
        ({"cu_seqlens_kv": offsets([30])}, "each query needs a key"),
        ({"cu_seqlens_kv": offsets([9, 21])}, "each query needs a key"),
    ],
)
def test_refuses_offsets_that_do_not_fit(fields: dict[str, Any], words: str) -> None:
    attention = build(SDPACoreAttention, make_config())
    with pytest.raises(UserError, match=words):
        attention(*packed_inputs(30), None, packed_seq_params=pack([10, 20], **fields))


def test_refuses_packed_sequences_with_another_way_to_keep_apart() -> None:
    attention = build(SDPACoreAttention, make_config())
    with pytest.raises(UserError, match="attention_mask"):
        attention(*packed_inputs(8), torch.zeros(1, 1, 8, 8, dtype=torch.bool), packed_seq_params=pack([8]))
    attention.caches = [SequenceCache(8)]
    with pytest.raises(UserError, match="caches"):
        attention(*packed_inputs(8), None, packed_seq_params=pack([8]))


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize("recompute", [{}, RECOMPUTED], ids=["plain", "recomputed"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_packed_model_equals_one_run_per_document(recompute: dict[str, Any], window: int | None) -> None:
    """Through ``Attention.forward`` and its rotary positions, with layers of every kind."""
    pattern = AttentionPattern.from_mapping({"window": window, "rope": [1, 1, 0]}, 3)
    config = spec_models.make_config(**pattern.to_megatron(), **recompute)
    model = spec_models.build(gpt.stock_block(config), config).train()
    lengths, room = [11, 1, 20], [12, 1, 22]
    tokens = torch.randint(0, 96, (1, sum(room)), generator=torch.Generator().manual_seed(3))
    packed = pack(lengths, room, max_seqlen_q=24, max_seqlen_kv=24)
    parts = tokens.split([n for length, space in zip(lengths, room, strict=True) for n in (length, space - length)], 1)
    alone = torch.cat([model(part, torch.arange(part.size(1))[None], None) for part in parts[::2]], dim=1)
    together = model(tokens, torch.arange(tokens.size(1))[None], None, packed_seq_params=packed)
    is_document = torch.cat([torch.full((x.size(1),), i % 2 == 0) for i, x in enumerate(parts)])
    got = together[:, is_document]
    torch.testing.assert_close(got, alone, **EXACT)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for out in (got, alone):
        model.zero_grad()
        (out * weights).sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], **GRADIENT, msg=lambda m, name=name: f"{name}: {m}")


def dataset_mask(lengths: list[int], **switches: bool) -> tuple[Tensor, Tensor]:
    """Mask [1, s, s] and position ids [s] of Megatron's dataset, documents ending in token 0."""
    tokens = torch.cat([torch.cat([torch.ones(n - 1, dtype=torch.int64), torch.zeros(1).long()]) for n in lengths])
    switches = {"reset_position_ids": True, "reset_attention_mask": True, "create_attention_mask": True} | switches
    mask, _, positions = _get_ltor_masks_and_position_ids(tokens, 0, eod_mask_loss=False, **switches)
    return mask, positions


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("window", [None, 7, 50])
def test_documents_of_megatrons_dataset_mask(window: int | None, softmax: str) -> None:
    lengths = [[30, 1, 69], [100], [1, 1, 97, 1]]
    mask = torch.stack([dataset_mask(row)[0] for row in lengths])
    assert mask_layouts(mask) == [[(n, 0) for n in row] for row in lengths]
    attention = build(SDPACoreAttention, windowed(window, softmax_type=softmax))
    leaves = inputs(100, 100, batch=3)
    got = attention(*leaves, mask)
    rows = []
    for row, sizes in enumerate(lengths):
        parts = zip(*(x[:, row : row + 1].split(sizes) for x in leaves), strict=True)
        rows.append(torch.cat([attention(*part, None) for part in parts]))
    expected = torch.cat(rows, dim=1)
    torch.testing.assert_close(got, expected, **EXACT)
    for a, b in zip(gradients(got, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, **GRADIENT)
    if window is None:  # with a window DotProductAttention forgets the mask that it is given
        stock = build(DotProductAttention, windowed(window, softmax_type=softmax))(*leaves, mask)
        torch.testing.assert_close(got, stock, **EXACT)


def test_one_mask_serves_all_rows_and_other_masks_stay_masks() -> None:
    mask = dataset_mask([300, 220])[0][None]
    attention = build(SDPACoreAttention, make_config())
    leaves = inputs(520, 520)
    expected = attention(*leaves, mask.expand(2, -1, -1, -1))
    torch.testing.assert_close(attention(*leaves, mask), expected, **EXACT)
    odd = mask.clone()
    odd[0, 0, 519, 400] = True
    assert mask_layouts(mask) is not None and mask_layouts(odd) is None
    stock = build(DotProductAttention, make_config())
    torch.testing.assert_close(attention(*leaves, odd), stock(*leaves, odd), **EXACT)
    assert mask_layouts(mask.expand(1, HEADS, -1, -1)) is None
    assert mask_layouts(mask[..., :-1]) is None


def test_position_ids_that_restart_do_not_reach_attention() -> None:
    """Without a mask ``reset_position_ids`` leaves a model with rotary positions as it is, ours as Megatron's own."""
    mask, positions = dataset_mask([20, 12], create_attention_mask=False)
    assert mask is None and positions.tolist() == [*range(20), *range(12)]
    config = spec_models.make_config()
    tokens = torch.randint(1, 96, (1, 32), generator=torch.Generator().manual_seed(4))
    for core in ("sdpa", "megatron"):
        model = spec_models.build(gpt.stock_block(config, core_attention=core), config).eval()
        with torch.no_grad():
            running = model(tokens, torch.arange(32)[None], None)
            assert torch.equal(model(tokens, positions[None], None), running)


SOFTMAX = ["off-by-one", "learnable"]


@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("groups", [HEADS, GROUPS, 1])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 130, 400])
@pytest.mark.parametrize("scaling", [False, True])
def test_sinks_equal_megatron_forward_and_backward(
    softmax: str, groups: int, window: int | None, scaling: bool
) -> None:
    config = windowed(
        window,
        softmax_type=softmax,
        num_query_groups=groups,
        apply_query_key_layer_scaling=scaling,
        attention_softmax_in_fp32=True,
    )
    stock, ours = (build(kind, config, 3) for kind in (DotProductAttention, SDPACoreAttention))
    if softmax == "learnable":
        torch.nn.init.normal_(stock.softmax_offset, mean=1.0)
    ours.load_state_dict(stock.state_dict(), strict=True)
    leaves = inputs(256, 256, groups=groups)
    expected, got = (module(*leaves, None, attn_mask_type=AttnMaskType.causal) for module in (stock, ours))
    torch.testing.assert_close(got, expected, **EXACT)
    sources, targets = ([*leaves, *module.parameters()] for module in (ours, stock))
    assert len(sources) == 3 + (softmax == "learnable")
    for a, b in zip(gradients(got, sources), gradients(expected, targets), strict=True):
        torch.testing.assert_close(a, b, **GRADIENT)
    plain = build(SDPACoreAttention, windowed(window, num_query_groups=groups))
    assert not torch.allclose(got, plain(*leaves, None), rtol=1e-2, atol=1e-2)


@given(
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 200),
    steps=st.integers(0, 3),
)
@settings(max_examples=25, deadline=None)
def test_sinks_of_a_cached_sequence_equal_those_of_one_call(chunks: list[int], window: int | None, steps: int) -> None:
    sizes = chunks + [1] * steps
    total = sum(sizes)
    query, key, value = (x.permute(1, 2, 0, 3).detach() for x in inputs(total, total, batch=1))
    sink = torch.linspace(-2, 3, HEADS)
    whole = causal_attention(query, key, value, window=window, sink=sink)
    cache, parts = SequenceCache(total), []
    for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True):
        parts.append(causal_attention(q, *cache.append(1, k, v, window), window=window, sink=sink))
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, **EXACT)


@pytest.mark.parametrize("window", [None, 64])
def test_sinks_in_half_precision_stay_close(window: int | None) -> None:
    leaves = [x.permute(1, 2, 0, 3).detach() for x in inputs(200, 300)]
    sink = torch.linspace(-3, 6, HEADS)
    got = causal_attention(*(x.bfloat16() for x in leaves), window=window, sink=sink.bfloat16())
    exact = causal_attention(*leaves, window=window, sink=sink)
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("softmax", ["vanilla", *SOFTMAX])
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_of_sinks_are_megatrons(softmax: str, ranks: int, megatron_single: Callable[[int], None]) -> None:
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: ranks - 1)
    config = make_config(softmax_type=softmax)
    modules = []
    for kind in (DotProductAttention, SDPACoreAttention):
        megatron_single(11)
        torch.manual_seed(11)
        modules.append(build(kind, config, pg_collection=SimpleNamespace(tp=group)))
    stock, ours = modules
    assert {name: x.shape for name, x in ours.state_dict().items()} == {
        n: x.shape for n, x in stock.state_dict().items()
    }
    metadata = {"dp_cp_group": SimpleNamespace(size=lambda: 1, rank=lambda: 0)}
    shards = [module.sharded_state_dict("layer.", ((0, 1, 4),), dict(metadata)) for module in modules]
    assert shards[0].keys() == shards[1].keys() == ({"layer.softmax_offset"} if softmax == "learnable" else set())
    for name, shard in shards[0].items():
        other = shards[1][name]
        for field in (
            "key",
            "dtype",
            "local_shape",
            "global_shape",
            "global_offset",
            "axis_fragmentations",
            "replica_id",
        ):
            assert getattr(other, field) == getattr(shard, field), field
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert torch.equal(a, b) and a.std() > 0
        assert a.tensor_model_parallel and a.partition_dim == 0


def test_attention_backend_local_is_refused_for_our_core_attention() -> None:
    config = spec_models.make_config(attention_backend=AttnBackend.local)
    with pytest.raises(UserError, match="attention_backend 'local'"):
        check(config, Regularization("none"), core_attention="sdpa")
    check(config, Regularization("none"), core_attention="megatron")
    check(spec_models.make_config(), Regularization("none"), core_attention="sdpa")


def pieces(spec: Any) -> dict[int, Any]:
    """A spec's ``ModuleSpec`` and submodules objects, which Megatron may change, by identity."""
    found: dict[int, Any] = {}
    queue = [spec]
    while queue:
        item = queue.pop()
        if isinstance(item, list | tuple):
            queue += item
        elif isinstance(item, ModuleSpec) or type(item).__name__.endswith("Submodules"):
            found[id(item)] = item
            queue += vars(item).values()
    return found


@pytest.mark.parametrize("core", ["sdpa", "megatron"])
@pytest.mark.parametrize("placement", ["none", "vpad"])
def test_each_call_gives_a_fresh_spec(core: Any, placement: Any) -> None:
    config, regularization = spec_models.make_config(), Regularization(placement, p=0.1)
    for make in (
        lambda: gpt.block_spec(config, regularization, core_attention=core),
        lambda: hybrid.stack_spec("local", regularization, core_attention=core),
    ):
        one, other = pieces(make()), pieces(make())
        attentions = [piece for piece in one.values() if hasattr(piece, "core_attention")]
        assert attentions and all(x.core_attention is gpt.core_attention_class(core) for x in attentions)
        assert not one.keys() & other.keys()


WINDOW = 9
PATTERN = AttentionPattern.from_mapping({"window": WINDOW, "pattern": "WWWF", "rope": "windowed"}, 4)


def smollm3() -> SmolLM3ForCausalLM:
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=64,
        hidden_size=HEADS * DIM,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        no_rope_layers=[1, 1, 1, 0],
        initializer_range=0.3,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return SmolLM3ForCausalLM(config).eval()


def watch(model: SmolLM3ForCausalLM) -> list[list[tuple[Tensor, Any, Tensor]]]:
    """Input, rotary angles and output of each layer's attention, filled call by call."""
    seen: list[list[tuple[Tensor, Any, Tensor]]] = [[] for _ in model.model.layers]
    for layer, calls in zip(model.model.layers, seen, strict=True):

        def keep(module: Any, args: Any, kwargs: Any, output: Any, calls: Any = calls) -> None:
            calls.append((kwargs["hidden_states"], kwargs["position_embeddings"], output[0]))

        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
    return seen


def through_ours(peer: Any, core: SDPACoreAttention, rope: bool, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """A SmolLM3 attention's projections around our core attention; x [b, s, h]."""
    query, key, value = (
        projection(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for projection in (peer.q_proj, peer.k_proj, peer.v_proj)
    )
    if rope:
        query, key = apply_rotary_pos_emb(query, key, *angles)
    out = core(*(y.permute(2, 0, 1, 3) for y in (query, key, value)), None)
    return peer.o_proj(out.transpose(0, 1))


def cores() -> list[SDPACoreAttention]:
    config = make_config(num_layers=4, **PATTERN.to_megatron())
    return [build(SDPACoreAttention, config, number).eval() for number in (1, 2, 3, 4)]


def test_equals_smollm3_in_training() -> None:
    model, ours = smollm3().train(), cores()
    seen = watch(model)
    model(torch.randint(1, 64, (2, 150), generator=torch.Generator().manual_seed(1)))
    for layer, core, rope, calls in zip(model.model.layers, ours, PATTERN.rope, seen, strict=True):
        ((x, angles, expected),) = calls
        weights = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
        got = through_ours(layer.self_attn, core, rope, x, angles)
        torch.testing.assert_close(got, expected, **EXACT)
        mine, peers = gradients(got, [x, *weights]), gradients(expected, [x, *weights])
        for a, b in zip(mine, peers, strict=True):
            assert (a - b).norm() < 1e-5 * b.norm()


def test_equals_smollm3_from_caches() -> None:
    """Prefill in chunks, shorter and longer than the window, then decode steps; exactly as transformers' own cache."""
    model, ours = smollm3(), cores()
    seen, cache = watch(model), DynamicCache(config=smollm3().config)
    sizes = [4, 30, 5, 1, 1, WINDOW, 1, 1]
    tokens = torch.randint(1, 64, (1, sum(sizes)), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for chunk in tokens.split(sizes, dim=1):
            model(chunk, past_key_values=cache, use_cache=True)
        mine = SequenceCache(sum(sizes))
        for layer, core, rope, calls in zip(model.model.layers, ours, PATTERN.rope, seen, strict=True):
            assert [x.size(1) for x, _, _ in calls] == sizes
            core.caches = [mine]
            for x, angles, expected in calls:
                torch.testing.assert_close(through_ours(layer.self_attn, core, rope, x, angles), expected, **EXACT)


@pytest.mark.parametrize("window", [1, 5, 64])
def test_every_path_shows_exactly_the_window(window: int) -> None:
    """With equal scores and one-hot values the output lists the keys that a query sees."""
    total = 200
    attention = build(SDPACoreAttention, windowed(window, num_query_groups=HEADS)).eval()
    query, key = torch.zeros(total, 1, HEADS, total), torch.zeros(total, 1, HEADS, total)
    value = torch.eye(total)[:, None, None].expand(-1, 1, HEADS, -1).contiguous()
    mask = dataset_mask([total])[0][None]
    odd = mask.clone()
    odd[0, 0, 150, 0] = True  # not a mask of documents: too far back for any of these windows
    cache, chunks = SequenceCache(total), []
    attention.caches = [cache]
    for part in (slice(0, 70), slice(70, 75), *(slice(i, i + 1) for i in range(75, 90)), slice(90, total)):
        chunks.append(attention(query[part], key[part], value[part], None))
    attention.caches = None
    packed = attention(query[:, 0], key[:, 0], value[:, 0], None, packed_seq_params=pack([total]))
    training = attention.train()(*(x.clone().requires_grad_() for x in (query, key, value)), None)
    paths = {
        "training": training,
        "mask of documents": attention(query, key, value, mask),
        "other mask": attention(query, key, value, odd),
        "caches": torch.cat(chunks),
        "packed": packed[:, None],
    }
    band = torch.ones(total, total).tril().triu(1 - window)
    expected = band / band.sum(1, keepdim=True)
    for name, out in paths.items():
        first_head = out[:, 0].unflatten(1, (HEADS, total))[:, 0]
        assert torch.equal(first_head > 0, expected > 0), name
        torch.testing.assert_close(first_head, expected, **EXACT)
