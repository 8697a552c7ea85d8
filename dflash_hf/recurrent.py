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
        products (`dict[int, tuple]`): of its linear layers, by the identity of their weight: the weight itself, so
            that nothing else gets that identity, what was returned, or `None` if that was more than one thing, and
            the version of that, which tells whether it was changed in place.
    """

    mixer: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    products: dict[int, tuple[torch.Tensor, torch.Tensor | None, int]] = field(default_factory=dict)

    def remember(self, weight: torch.Tensor, output: torch.Tensor) -> None:
        """Note what a linear layer returned; it may be told twice, by the hooks of two calls at once."""
        if output.is_inference():  # has no version
            return
        _, before, version = self.products.get(id(weight), (weight, output, output._version))
        self.products[id(weight)] = weight, output if before is output else None, version


class _Remembered(TorchFunctionMode):
    """
    Products with matrices whose results are known are not computed.

    Args:
        products (`Mapping[int, tuple]`): weight and result, by the identity of the weight.
    """

    def __init__(self, products: Mapping[int, tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.products = products

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and len(args) > 1:
            weight, product = self.products.get(id(args[1]), (None, None))
            if weight is args[1]:
                return product
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
            self._saved[i] = copy_of(self.cache.layers[i])
            if hasattr(self._saved[i], "keys"):  # of attention beside the state, which the cache itself goes back on
                self._saved[i].keys = self._saved[i].values = None

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

        # Of layers that were called once, on the columns as they are, and whose results nobody has changed since.
        known = {
            key: (weight, part(product))
            for key, (weight, product, version) in call.products.items()
            if product is not None and product.shape[:2] == shape and product._version == version
        }
        with _Remembered(known):
            call.mixer(*map(part, call.args), **{name: part(value) for name, value in call.kwargs.items()})
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
