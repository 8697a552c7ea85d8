"""
The recurrent layers of a target, whose cache is a state and not a list of tokens, so that no crop can roll it back.

The state is copied at every commit. After a forward of which only some columns stay, it is put back, and the mixer
alone is run again on what it was given for those columns: attention, MLP and experts are not, and what its linear
layers said of those columns is remembered, so that no weight matrix is read again.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin


@dataclass
class MixerCall:
    """
    How a mixer was called in the latest forward of the target.

    Args:
        mixer (`nn.Module`): the part of a decoder layer that updates the state.
        args (`tuple`), kwargs (`dict`): of its forward; tensors of shape `(B, n, ...)` are about n columns.
        outputs (`dict[int, list[torch.Tensor]]`): of its linear layers, by the identity of their weight.
    """

    mixer: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class _Remembered(TorchFunctionMode):
    """
    Products with matrices whose results are known are not computed.

    Args:
        outputs (`Mapping[int, torch.Tensor]`): by the identity of the weight.
    """

    def __init__(self, outputs: Mapping[int, torch.Tensor]):
        super().__init__()
        self.outputs = outputs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and len(args) > 1 and id(args[1]) in self.outputs:
            return self.outputs[id(args[1])]
        return func(*args, **(kwargs or {}))


class RecurrentLayers:
    """
    The recurrent layers of `cache`, as of the last commit; at first, of the prompt.

    Args:
        cache (`Cache`): of the target.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        # Before transformers 5.24, layers that keep nothing have a cache of this kind too.
        self.indices = [i for i, layer in enumerate(cache.layers) if is_recurrent(layer) and _states(layer)]
        self._saved: dict[int, LinearAttentionCacheLayerMixin] = {}
        self.save()

    def save(self) -> None:
        """Here is a commit: copy the states."""
        for i in self.indices:
            _trim(self.cache.layers[i])
            self._saved[i] = copy_of(self.cache.layers[i])

    def restore(self) -> None:
        """Go back to the last commit."""
        for i, saved in self._saved.items():
            layer, again = self.cache.layers[i], copy_of(saved)
            layer.conv_states, layer.recurrent_states = again.conv_states, again.recurrent_states

    def replay(self, kept: Sequence[int], appended: int, calls: Mapping[int, MixerCall]) -> None:
        """
        Let the states be those after the first `kept[b]` of the `appended` columns of row b.

        Rows that keep equally many are run together, since a recurrent layer knows no padding in the middle.

        Args:
            calls (`Mapping[int, MixerCall]`): that of each layer, by its index.
        """
        rows_by_count: dict[int, list[int]] = {}
        for row, count in enumerate(kept):
            if count < appended:
                rows_by_count.setdefault(count, []).append(row)
        for i in self.indices if rows_by_count else ():
            layer = self.cache.layers[i]
            _trim(layer)
            for count, rows in rows_by_count.items():
                part = self._run(i, calls[i], rows, slice(count), (len(kept), appended))
                for state, new in zip(_states(layer), _states(part), strict=True):
                    state[rows] = new

    def _run(self, index: int, call: MixerCall, rows: list[int], columns: slice, shape: tuple[int, int]):
        """A layer with the states of `rows` after `columns` of a call, whose tensors begin with the sizes `shape`."""
        cache = copy.copy(self.cache)
        cache.layers = list(self.cache.layers)
        cache.layers[index] = layer = copy_of(self._saved[index], rows)

        def part(value):
            if value is self.cache:
                return cache
            return value[rows, columns] if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value

        # Of layers that were called once, and on the columns as they are.
        known = {
            key: part(each[0]) for key, each in call.outputs.items() if len(each) == 1 and each[0].shape[:2] == shape
        }
        with _Remembered(known):
            call.mixer(*map(part, call.args), **{name: part(value) for name, value in call.kwargs.items()})
        _trim(layer)
        return layer

    def select(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        self._saved = {i: copy_of(saved, rows) for i, saved in self._saved.items()}
        self.restore()


def is_recurrent(layer) -> bool:
    """Whether a layer of a cache keeps a state, beside keys and values or alone."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def copy_of(layer: LinearAttentionCacheLayerMixin, rows: list[int] | slice = slice(None)):
    """A layer with the states of `rows` for itself: transformers changes them in place."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
    for states in (new.conv_states, new.recurrent_states):
        for slot, state in states.items():
            states[slot] = state if state is None else state[rows].clone()
    return new


def _states(layer: LinearAttentionCacheLayerMixin) -> list[torch.Tensor]:
    """All that it keeps."""
    return [
        state for kind in (layer.conv_states, layer.recurrent_states) for state in kind.values() if state is not None
    ]


def _trim(layer: LinearAttentionCacheLayerMixin) -> None:
    """Keep of the columns before a convolution what it needs: a layer that slides too and so records has more."""
    for slot, size in layer.conv_kernel_size.items():
        if size is not None:
            layer.conv_states[slot] = layer.conv_states[slot][..., -size:]
