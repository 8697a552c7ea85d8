"""The target as the drafter sees it: its embedding, layers and head, and how hidden states are tapped."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .configuration_dflash import EMBEDDING_TAP, DFlashConfig
from .recurrent import MixerCall


# Where a decoder layer with a recurrent state has what updates it. One that has it elsewhere is rolled back whole.
MIXERS = ("linear_attn", "mamba", "conv", "mixer")


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """`logits`, pressed between `-cap` and `cap`."""
    return (logits / cap).tanh() * cap


# What targets make of the head's output before it is their logits: fields of the configuration, in this order. The
# drafter's law is shaped alike, since it is better accepted then; the text does not depend on it.
LOGITS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "logits_scaling": torch.div,  # Granite, MiniCPM3
    "logit_scale": torch.mul,  # Cohere
    "lm_head_multiplier": torch.mul,  # Falcon-H1
    "output_multiplier": torch.mul,  # Muse
    "final_logit_softcapping": softcap,  # Gemma, Muse
}
_INVERTED = {("hyperclovax", "logits_scaling"): torch.mul}


@dataclass
class Taps:
    """
    What the hooks saw in the latest forward of the target.

    Args:
        states (`dict[int, torch.Tensor]`): layer id to hidden states `(B, n, H)`; [`concatenate`] takes them out.
        mixers (`dict[int, MixerCall | None]`): layer id to the call of its mixer.
        noting (`bool`): whether calls of mixers are noted; if not, only that there were some.
    """

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    mixers: dict[int, MixerCall | None] = field(default_factory=dict)
    noting: bool = False

    def clear(self) -> None:
        self.states.clear()
        self.mixers.clear()

    def take_calls(self) -> dict[int, MixerCall]:
        """Take the calls of the mixers out, and note no more."""
        calls, self.mixers, self.noting = self.mixers, {}, False
        return calls

    def concatenate(self, layer_ids: list[int]) -> torch.Tensor:
        """
        Take the hidden states out, in the order of `layer_ids`, on the feature axis: `(B, n, M * H)`.

        All are taken out, also those of other drafters, so that none holds a prompt's states longer than needed, and
        a hook that does not fire in the next forward cannot go unnoticed.

        Raises:
            `RuntimeError`: when a hook did not fire.
        """
        missing = [i for i in layer_ids if i not in self.states]
        if missing:
            raise RuntimeError(
                f"The forward of the target passed by the hooks of layers {missing}. If the target is compiled, "
                "attach the drafter before the first forward."
            )
        states = [self.states[i] for i in layer_ids]
        self.states.clear()
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)


# Where the hooks of the running call put what they see. A context variable, so that hooks hold no state of their own:
# they can be copied and pickled with the target, and calls in different threads do not mix.
_taps: ContextVar[Taps | None] = ContextVar("dflash_hf_taps", default=None)


# The tag: a CUDA graph would replay without coming here.
@torch.library.custom_op("dflash_hf::tap", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _tap(states: torch.Tensor, layer_id: int) -> torch.Tensor:
    """A step of a compiled graph that cannot be looked into: the listening call gets a copy. Returns another."""
    taps = _taps.get()
    if taps is not None:
        taps.states[layer_id] = states.clone()
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
            taps.states[self.layer_id] = states
        return None


class MixerHook:
    """Forward pre-hook of a mixer: tells the call that listens how it was called. In a compiled graph it cannot."""

    def __init__(self, layer_id: int, stays: bool):
        self.layer_id, self.stays = layer_id, stays

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        # While another thread takes its hook off, torch may forget that this one wants the keyword arguments.
        if torch.compiler.is_compiling() or kwargs is None:
            return
        taps = _taps.get()
        if taps is not None and taps.mixers.get(self.layer_id) is None:
            taps.mixers[self.layer_id] = MixerCall(module, args, kwargs) if taps.noting else None


class LinearHook:
    """Forward hook of a linear layer of a mixer: what it returns is remembered with the call of the mixer."""

    def __init__(self, layer_id: int, stays: bool):
        self.layer_id, self.stays = layer_id, stays

    def __call__(self, module: nn.Linear, args: tuple, output: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        taps = _taps.get()
        call = None if taps is None else taps.mixers.get(self.layer_id)
        if call is not None:
            call.remember(module.weight, output)


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes; `None` for one without weights."""
    # Of weights that are brought in for each call, accelerate knows where to.
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "execution_device", None) is not None:
                return torch.device(each.execution_device)
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)


class Target:
    """
    A causal language model as a target.

    Args:
        model (`PreTrainedModel` or `peft.PeftModel`): the model; of a wrapper, what it wraps is used, its adapters
            included.

    Attributes:
        model (`PreTrainedModel`): the model itself.
        decoder (`nn.Module`): the part that returns hidden states, with `layers`.
        num_layers, hidden_size, vocab_size (`int`): of the text part; `vocab_size` counts the embedding's rows.
        num_logits (`int`): width of the model's logits.
        mixers (`dict[int, nn.Module]`): of the layers with a recurrent state, what updates it, by layer id.
        takes_positions (`bool`): whether the model's forward has `position_ids`.

    Raises:
        `TypeError`: when the model has no decoder layers, embedding or head where transformers keeps them, or an
            adapter that adds tokens.
    """

    def __init__(self, model: PreTrainedModel):
        # While it generates, peft puts a method of the wrapper on the model.
        wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model)
        adapter = getattr(wrapper, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise TypeError(
                f"{type(adapter).__name__}: adapters that put tokens of their own before the text are not supported, "
                "only those that change the layers, such as LoRA."
            )
        self.model = model = model.get_base_model() if hasattr(model, "get_base_model") else model
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
        self.text_config = model.config.get_text_config(decoder=True)
        self.num_layers = len(layers)
        self.hidden_size = self.text_config.hidden_size
        self.vocab_size = getattr(self.embedding, "num_embeddings", self.text_config.vocab_size)
        self.num_logits = self.text_config.vocab_size
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        children = [(i, dict(layer.named_children())) for i, layer in enumerate(layers)]
        self.mixers = {i: named[name] for i, named in children for name in MIXERS if name in named}

    @property
    def device(self) -> torch.device:
        """Where the head computes, and where the drafter is best placed."""
        return device_of(self.head) or self.model.device

    @property
    def head_dtype(self) -> torch.dtype:
        """What the head takes. A quantised one may have no weight, or one of integers: then what the model takes."""
        weight = getattr(self.head, "weight", None)
        plain = isinstance(weight, torch.Tensor) and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return weight.dtype if plain else self.model.dtype

    def embed(self, ids: torch.Tensor, config: DFlashConfig | None = None) -> torch.Tensor:
        """
        Embeddings of `ids` `(B, n)`: the target's own, or as the drafter with `config` is given them, `(B, n, H)`.

        They are not taken for a tap of the embedding.
        """
        # A plain embedding module returns the rows of its table.
        if config is not None and config.input_embeddings == "table" and type(self.embedding) is not nn.Embedding:
            embeds = F.embedding(ids, self.embedding.weight)
        else:
            token = _taps.set(None)
            try:
                embeds = self.embedding(ids)
            finally:
                _taps.reset(token)
        return embeds if config is None or config.input_embedding_scale == 1 else embeds * config.input_embedding_scale

    def shape_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """From the head's output `(..., V)` to what the target's forward returns, by its scale and soft-cap."""
        for name, step in LOGITS.items():
            value = getattr(self.text_config, name, None)
            if value is not None:
                logits = _INVERTED.get((self.text_config.model_type, name), step)(logits, value)
        return logits

    def has_adapters_by_row(self) -> bool:
        """Whether peft runs rows with adapters of their own (`adapter_names`), so that none may be left out."""
        if not hasattr(self.model, "peft_config"):
            return False
        hooks = (hook for module in self.model.modules() for hook in module._forward_pre_hooks.values())
        return any("adapter_names" in (getattr(hook, "keywords", None) or {}) for hook in hooks)

    @contextmanager
    def capture(self, layer_ids: list[int], *, mixers: bool = False) -> Iterator[Taps]:
        """
        Collect the outputs of the decoder layers `layer_ids` (-1: the embedding), and with `mixers` the calls of the
        mixers too, while the context is open.

        Yields:
            [`Taps`]: of the latest forward.
        """
        taps = Taps()
        # Hooks of this call alone where none stays: what another call removes must not be missed here.
        handles = [self._hook(i, stays=False) for i in layer_ids if not _has_hook(self._tapped(i))]
        handles += self._hook_mixers(stays=False) if mixers else []
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
            if not _has_hook(self._tapped(i)):
                self._hook(i, stays=True)
        self._hook_mixers(stays=True)

    def remove_hooks(self) -> None:
        """Take off what [`~Target.install_hooks`] put on."""
        for module in (self.embedding, *self.layers, *self._parts_of_mixers()):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(hook, _HOOKS) and hook.stays:
                        del hooks[key]

    def _hook(self, layer_id: int, *, stays: bool):
        return self._tapped(layer_id).register_forward_hook(TapHook(layer_id, stays))

    def _hook_mixers(self, *, stays: bool) -> list:
        """Hooks on the mixers, and on their linear layers, before any of the caller's that change the output."""
        handles = []
        for i, mixer in self.mixers.items():
            if not _has_hook(mixer):
                handles.append(mixer.register_forward_pre_hook(MixerHook(i, stays), with_kwargs=True))
            for part in mixer.modules():
                if type(part) is nn.Linear and not _has_hook(part):
                    handles.append(part.register_forward_hook(LinearHook(i, stays), prepend=True))
        return handles

    def _parts_of_mixers(self) -> Iterator[nn.Module]:
        for mixer in self.mixers.values():
            yield from mixer.modules()

    def _tapped(self, layer_id: int) -> nn.Module:
        return self.embedding if layer_id == EMBEDDING_TAP else self.layers[layer_id]


_HOOKS = (TapHook, MixerHook, LinearHook)


def _has_hook(module: nn.Module) -> bool:
    """Whether a hook of ours that stays is there."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(isinstance(hook, _HOOKS) and hook.stays for hook in hooks)
