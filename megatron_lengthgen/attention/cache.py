"""What one sequence leaves behind in all layers: keys (after RoPE) and values of attention, states of Mamba."""

import torch
from torch import Tensor

__all__ = ["SequenceCache"]


class SequenceCache:
    """Key-value cache of one sequence, and the states of its Mamba layers.

    Megatron's ``StaticInferenceContext`` keeps keys before RoPE and ropes all of them again on each call, at full
    length also for windowed layers. This one sits behind RoPE, in the core attention, and a layer with a window of W
    tokens keeps a buffer of at most 2 W + 1024 positions. A Mamba layer keeps the same few tensors at any length.

    Args:
        capacity: most tokens that the sequence will hold.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._layers: dict[int, _Layer] = {}
        #: Layer number -> the state that a Mamba layer left behind, whose tensors nobody writes to.
        self.states: dict[int, tuple[Tensor, ...]] = {}

    def append(self, layer_number: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add new positions of a layer and return all that its new queries may see.

        Args:
            layer_number: which layer.
            key: [1, g, n, d], the n positions that follow those already there.
            value: [1, g, n, d].
            window: number of keys that a query sees, itself included; None for all.

        Returns:
            Keys and values [1, g, m, d], the last m positions; views that the next call may overwrite.

        Raises:
            ValueError: the sequence outgrows its capacity.
        """
        if layer_number not in self._layers:
            self._layers[layer_number] = _Layer(key, value, self.capacity, window)
        return self._layers[layer_number].append(key, value)

    def fork(self, capacity: int) -> "SequenceCache":
        """A cache of its own with the same positions, to go on from here in another way.

        It copies what later queries can see: all keys of full layers, the window of windowed ones. States are shared.

        Args:
            capacity: most tokens that the new sequence will hold, those already there included.

        Raises:
            ValueError: it holds less than there are.
        """
        other = SequenceCache(capacity)
        other._layers = {number: layer.fork(capacity) for number, layer in self._layers.items()}
        other.states = dict(self.states)
        return other

    @property
    def nbytes(self) -> int:
        """Memory of buffers and states in bytes."""
        buffers = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._layers.values())
        return buffers + sum(tensor.nbytes for state in self.states.values() for tensor in state)


class _Layer:
    def __init__(self, key: Tensor, value: Tensor, capacity: int, window: int | None):
        self.capacity, self.window = capacity, window
        size = capacity if window is None else min(capacity, 2 * window + 1024)
        self.keys = key.new_empty(1, key.size(1), size, key.size(3))
        self.values = value.new_empty(1, value.size(1), size, value.size(3))
        self.seen = 0  # positions appended so far
        self.end = 0  # positions in the buffer

    def fork(self, capacity: int) -> "_Layer":
        if self.seen > capacity:
            raise ValueError(f"a sequence of {self.seen} tokens does not fit its cache of {capacity}")
        other = _Layer(self.keys, self.values, capacity, self.window)
        kept = self.end if self.window is None else min(self.end, self.window)
        other.keys[:, :, :kept] = self.keys[:, :, self.end - kept : self.end]
        other.values[:, :, :kept] = self.values[:, :, self.end - kept : self.end]
        other.seen, other.end = self.seen, kept
        return other

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new, size = key.size(2), self.keys.size(2)
        self.seen += new
        if self.seen > self.capacity:
            raise ValueError(f"a sequence of {self.seen} tokens does not fit its cache of {self.capacity}")
        if self.end + new > size:
            assert self.window is not None
            kept = min(self.end, self.window)
            tail = slice(self.end - kept, self.end)
            if kept + new > size:
                # A chunk longer than the buffer: attend from a copy, keep what later queries can see.
                keys = torch.cat([self.keys[:, :, tail], key], dim=2)
                values = torch.cat([self.values[:, :, tail], value], dim=2)
                self.end = min(keys.size(2), self.window)
                self.keys[:, :, : self.end] = keys[:, :, -self.end :]
                self.values[:, :, : self.end] = values[:, :, -self.end :]
                return keys, values
            self.keys[:, :, :kept] = self.keys[:, :, tail].clone()
            self.values[:, :, :kept] = self.values[:, :, tail].clone()
            self.end = kept
        start, self.end = self.end, self.end + new
        self.keys[:, :, start : self.end] = key
        self.values[:, :, start : self.end] = value
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]
