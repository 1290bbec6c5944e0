"""Single parameters out of a ``torch_dist`` checkpoint, whatever layout wrote it: no model, no process group."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_lengthgen import backends
from megatron_lengthgen.checkpoint import load
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.entries import Entry

__all__ = ["StoredModel"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# A norm that Transformer Engine fuses with the linear behind it; the local spec stores its norms under these names too.
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm.weight": "mixer.in_proj.layer_norm_weight",
}
# What MambaMixer stores in parts, which tensor-parallel ranks split each for itself (``ssm/mamba_mixer.py``).
_PARTS = {
    "mixer.in_proj.weight": [f"mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")],
    "mixer.conv1d_weight": [f"mixer.conv1d.weight.{part}" for part in "xBC"],
    "mixer.conv1d_bias": [f"mixer.conv1d.bias.{part}" for part in "xBC"],
}


class StoredModel:
    """The model's tensors in one iteration directory; optimizer state and the rest are passed over.

    A reader of ``torch.distributed.checkpoint`` gets a plan for one parameter at a time, since its own ``load`` would
    read the index anew for each, and could not take one layer out of a stack of them.

    Args:
        path: an iteration directory, as :func:`.load.find_checkpoint` gives it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        backends.prepare()
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._path = Path(path)
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and load.is_model_key(key)
        }

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes in which the parameters are stored."""
        return {stored.properties.dtype for stored in self._tensors.values()}

    def check(self, entries: Iterable[Entry]) -> None:
        """Hold the stored tensors against the key map; reads no weights.

        Raises:
            UserError: a parameter that is missing, of another shape, or without a place in the key map.
        """
        placed: dict[str, int] = {}
        for entry in entries:
            places = self._places(entry.megatron)
            for key, _ in places:
                placed[key] = placed.get(key, 0) + 1
            shapes = [list(self._tensors[key].size)[0 if layer is None else 1 :] for key, layer in places]
            found = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
            wanted = list(entry.pack([torch.empty(shape, device="meta") for shape in entry.shapes]).shape)
            if found != wanted:
                key = places[0][0] if len(places) == 1 else entry.megatron
                raise UserError(f"{key} in {self._path} has shape {found}, but its arguments ask for {wanted}")
        for key, layers in placed.items():
            if layers > 1 and layers != self._tensors[key].size[0]:
                raise UserError(
                    f"{key} in {self._path} has {self._tensors[key].size[0]} layers, but its arguments have {layers}"
                )
        left_over = sorted(self._tensors.keys() - placed.keys())
        if left_over:
            more = f" and {len(left_over) - 1} more" if len(left_over) > 1 else ""
            raise UserError(
                f"{self._path} holds {left_over[0]}{more}, for which no architecture of transformers that export "
                "knows has a place: it cannot be exported"
            )

    def read(self, name: str) -> Tensor:
        """One parameter, whole, in the dtype it is stored in.

        Args:
            name: as :attr:`.Entry.megatron`.

        Raises:
            UserError: not there, or not all of it.
        """
        parts = [self._read(key, layer) for key, layer in self._places(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, key: str, layer: int | None) -> Tensor:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        stored = self._tensors[key]
        offsets, sizes = [0] * len(stored.size), list(stored.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        target = torch.empty(sizes, dtype=stored.properties.dtype)

        class Planner(DefaultLoadPlanner):
            def lookup_tensor(self, index: object) -> Tensor:
                return target

        items = create_read_items_for_chunk_list(
            key, stored, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
        )
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise UserError(f"{self._path} does not hold all of {key}; copy or save the checkpoint again")
        self._reader.read_data(LoadPlan(items), Planner())
        return target if layer is None else target[0]

    def _places(self, name: str) -> list[tuple[str, int | None]]:
        """Keys of a parameter's parts along its first axis, one as a rule, each with its layer where all are stacked.

        In a stack of all layers the first axis is the layer's.
        """
        candidates: list[list[tuple[str, int | None]]] = [[(name, None)]]
        match = _LAYER.fullmatch(name)
        if match:
            layer, rest = int(match[1]), match[2]
            for spellings in ([rest], [_FUSED.get(rest, rest)], _PARTS.get(rest, [rest])):
                candidates += [
                    [(f"decoder.layers.{layer}.{spelling}", None) for spelling in spellings],
                    [(f"decoder.layers.{spelling}", layer) for spelling in spellings],
                ]
        for places in candidates:
            if all(self._holds(key, layer) for key, layer in places):
                return places
        raise UserError(f"{self._path} lacks {name}, which its arguments ask for; save the checkpoint again")

    def _holds(self, key: str, layer: int | None) -> bool:
        stored = self._tensors.get(key)
        return stored is not None and (layer is None or layer < stored.size[0])
