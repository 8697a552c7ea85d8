"""The target as the drafter sees it: its embedding, layers and head, and how hidden states are tapped."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_dflash import EMBEDDING_TAP
from .modeling_dflash import DFlashDraftModel


# Where the hooks of the running call put what they see. A context variable, so that hooks hold no state of their own:
# they can be copied and pickled with the target, and calls in different threads do not mix.
_taps: ContextVar[dict[int, torch.Tensor] | None] = ContextVar("dflash_hf_taps", default=None)


# The tag: a CUDA graph would replay without coming here.
@torch.library.custom_op("dflash_hf::tap", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _tap(states: torch.Tensor, layer_id: int) -> torch.Tensor:
    """A step of a compiled graph that cannot be looked into: the listening call gets a copy. Returns another."""
    taps = _taps.get()
    if taps is not None:
        taps[layer_id] = states.clone()
    return states.clone()


@_tap.register_fake
def _(states: torch.Tensor, layer_id: int) -> torch.Tensor:
    return torch.empty_like(states)


class TapHook:
    """
    Forward hook of a decoder layer or of the embedding: hands its output to the call that listens, if one does.

    Args:
        layer_id (`int`): of the layer, -1 of the embedding.
        stays (`bool`): whether it is there until the drafter is detached, and not for one call.
    """

    def __init__(self, layer_id: int, stays: bool):
        self.layer_id, self.stays = layer_id, stays

    def __call__(self, module: nn.Module, args: tuple, output):
        whole = isinstance(output, torch.Tensor)
        states = output if whole else output[0]
        if torch.compiler.is_compiling():
            # In a graph, only what is used is computed: the layer goes on with what the tap returns. Nobody listens
            # while gradients are computed, which could not pass.
            if torch.is_grad_enabled():
                return None
            states = _tap(states, self.layer_id)
            return states if whole else (states, *output[1:])
        taps = _taps.get()
        if taps is not None:
            taps[self.layer_id] = states
        return None


class Target:
    """
    A causal language model as a target.

    Attributes:
        model (`PreTrainedModel`): the model itself.
        decoder (`nn.Module`): the part that returns hidden states, with `layers`.
        num_layers, hidden_size, vocab_size (`int`): of the text part; `vocab_size` counts the embedding's rows.
        num_logits (`int`): width of the model's logits.
        device (`torch.device`): where the head is, and where the drafter is best placed.
        takes_positions (`bool`): whether the model's forward has `position_ids`.

    Raises:
        `TypeError`: when the model has no decoder layers, embedding or head where transformers keeps them.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.decoder = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        layers = getattr(self.decoder, "layers", None)
        for part, name in ((layers, "decoder.layers"), (self.embedding, "input"), (self.head, "output embeddings")):
            if part is None:
                raise TypeError(
                    f"{type(model).__name__} is no decoder-only language model: it has no {name}. "
                    "DFlash needs a model with a decoder, an embedding and a head."
                )
        self.layers = layers
        text = model.config.get_text_config(decoder=True)
        self.num_layers = len(layers)
        self.hidden_size = text.hidden_size
        self.vocab_size = self.embedding.weight.shape[0]
        self.num_logits = text.vocab_size
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return self.head.weight.device

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """
        Embeddings of `ids` `(B, n)` as the drafter was trained on them: the target's own, `(B, n, H)`.

        They are not taken for a tap of the embedding.
        """
        token = _taps.set(None)
        try:
            return self.embedding(ids)
        finally:
            _taps.reset(token)

    @contextmanager
    def capture(self, layer_ids: list[int]) -> Iterator[dict[int, torch.Tensor]]:
        """
        Collect the outputs of the decoder layers `layer_ids` (-1: the embedding) while the context is open.

        Yields:
            `dict[int, torch.Tensor]`: layer id to hidden state `(B, n, H)` of the latest forward. [`concatenate`]
            turns it into the drafter's input.
        """
        taps: dict[int, torch.Tensor] = {}
        # Hooks of this call alone where none stays: what another call removes must not be missed here.
        handles = [self._hook(i, stays=False) for i in layer_ids if not self._has_hook(i)]
        token = _taps.set(taps)
        try:
            yield taps
        finally:
            _taps.reset(token)
            for handle in handles:
                handle.remove()

    def install_hooks(self, layer_ids: list[int]) -> None:
        """
        Put hooks on the layers `layer_ids` for good, until [`~Target.remove_hooks`].

        A hook that comes after the first compiled forward does not fire; one that was there before does.
        """
        for i in layer_ids:
            if not self._has_hook(i):
                self._hook(i, stays=True)

    def remove_hooks(self) -> None:
        """Take off what [`~Target.install_hooks`] put on."""
        for module in (self.embedding, *self.layers):
            for key, hook in list(module._forward_hooks.items()):
                if isinstance(hook, TapHook) and hook.stays:
                    del module._forward_hooks[key]

    def _hook(self, layer_id: int, *, stays: bool):
        return self._tapped(layer_id).register_forward_hook(TapHook(layer_id, stays))

    def _has_hook(self, layer_id: int) -> bool:
        """Whether a hook that stays is there."""
        hooks = list(self._tapped(layer_id)._forward_hooks.values())
        return any(isinstance(hook, TapHook) and hook.stays for hook in hooks)

    def _tapped(self, layer_id: int) -> nn.Module:
        return self.embedding if layer_id == EMBEDDING_TAP else self.layers[layer_id]

    def check_pair(self, drafter: DFlashDraftModel) -> None:
        """
        Raise `ValueError` when `drafter` cannot work with this target; the message names field, values and remedy.

        Different vocabulary sizes are no error: the drafter uses the target's embedding and head.
        """
        config = drafter.config
        rules = [
            (
                config.hidden_size == self.hidden_size,
                f"hidden_size: the drafter has {config.hidden_size}, the target {self.hidden_size}",
                "they must be equal, because the drafter works on the target's embeddings",
            ),
            (
                max(config.target_layer_ids) < self.num_layers,
                f"target_layer_ids: the drafter taps layer {max(config.target_layer_ids)}, "
                f"the target has layers 0 to {self.num_layers - 1}",
                "every tapped layer must exist",
            ),
            (
                config.num_target_layers in (None, self.num_layers),
                f"num_target_layers: the drafter expects {config.num_target_layers}, the target has {self.num_layers}",
                "the drafter was trained for a target of another depth",
            ),
            (
                config.mask_token_id < self.vocab_size,
                f"mask_token_id: {config.mask_token_id}, but the target's embedding has {self.vocab_size} rows",
                "the mask must be a row of the embedding",
            ),
            (
                drafter.draft_token_ids is None or int(drafter.draft_token_ids.max()) < self.vocab_size,
                f"draft_token_ids: the drafter proposes ids beyond the target's {self.vocab_size} rows",
                "every proposed token must exist",
            ),
        ]
        for holds, found, rule in rules:
            if not holds:
                raise ValueError(
                    f"This drafter is not for this target. {found}: {rule}. "
                    "Load the drafter that was trained for this target."
                )


def concatenate(taps: dict[int, torch.Tensor], layer_ids: list[int]) -> torch.Tensor:
    """
    Take the tapped hidden states out of `taps`, in the order of `layer_ids`, on the feature axis: `(B, n, M * H)`.

    All are taken out, also those of other drafters, so that none holds a prompt's states longer than needed, and a
    hook that does not fire in the next forward cannot go unnoticed.

    Raises:
        `RuntimeError`: when a hook did not fire.
    """
    missing = [i for i in layer_ids if i not in taps]
    if missing:
        raise RuntimeError(
            f"The forward of the target passed by the hooks of layers {missing}. If the target is compiled, attach "
            "the drafter before the first forward."
        )
    states = [taps[i] for i in layer_ids]
    taps.clear()
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)
