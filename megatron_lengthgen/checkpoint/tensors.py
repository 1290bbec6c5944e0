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
from megatron_lengthgen.models.llama import Entry

__all__ = ["StoredModel"]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# A norm that Transformer Engine fuses with the linear behind it; the local spec stores its norms under these names too.
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
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
            key, layer = self._place(entry.megatron)
            placed[key] = placed.get(key, 0) + 1
            found = list(self._tensors[key].size)[0 if layer is None else 1 :]
            wanted = list(entry.pack([torch.empty(shape, device="meta") for shape in entry.shapes]).shape)
            if found != wanted:
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
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner import LoadPlan
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        key, layer = self._place(name)
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

    def _place(self, name: str) -> tuple[str, int | None]:
        """Key of a parameter, and its layer in the stack of all layers' if that is how it is stored."""
        candidates: list[tuple[str, int | None]] = [(name, None)]
        match = _LAYER.fullmatch(name)
        if match:
            layer, rest = int(match[1]), match[2]
            for spelling in (rest, _FUSED.get(rest, rest)):
                candidates += [(f"decoder.layers.{layer}.{spelling}", None), (f"decoder.layers.{spelling}", layer)]
        for key, layer_in_stack in candidates:
            stored = self._tensors.get(key)
            if stored is not None and (layer_in_stack is None or layer_in_stack < stored.size[0]):
                return key, layer_in_stack
        raise UserError(f"{self._path} lacks {name}, which its arguments ask for; save the checkpoint again")
