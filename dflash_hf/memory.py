"""
Logits processors and stopping criteria that may remember what they were asked: grammars, tool-call parsers, guidance.

Such an object must be asked what plain decoding asks it, and nothing else: the decoding loop then takes the slots of a
block one after the other, up to the first proposal that is not accepted. Only for drafting may a processor be asked
ahead, and then it must be able to go back: by `snapshot()`, whose result `restore(...)` takes, or by an entry in
`ADAPTERS`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging


logger = logging.get_logger(__name__)

# The last of them remembers nothing, but the caller's function in it need not know texts that plain decoding would
# never write: another row's, or one that goes on behind its end.
_ASKED_AS_PLAIN = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)


def _matchers_of(processor) -> tuple:
    return [matcher.fork() for matcher in processor.matchers], processor.prefilled


def _set_matchers(processor, state: tuple) -> None:
    processor.matchers, processor.prefilled = state


# For classes of other libraries, by module and name: functions that do what `snapshot` and `restore` would do, the
# first of the object, the second of the object and what the first returned.
ADAPTERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "xgrammar.contrib.hf.LogitsProcessor": (_matchers_of, _set_matchers),
    "transformers.generation.logits_process.PrefixConstrainedLogitsProcessor": (lambda _: None, lambda *_: None),
}


def asked_as_plain(things: Iterable[Any], consequence: str) -> list[Any]:
    """
    Those of `things` that must be asked what plain decoding asks them, and no more.

    The classes of transformers need not, but for a few. Anything else must, unless it has an attribute `stateless =
    True`, which says that it judges each row by its own arguments alone, and any text. Of what cannot go back, a
    warning says once that it must, with its `consequence`.
    """
    found = [thing for thing in things if _must(thing)]
    for thing in found:
        if not can_go_back(thing):
            logger.warning_once(
                f"{_name(thing)} may remember what it was asked, so it is asked what plain generate asks it and no "
                f"more: {consequence}. If it judges each row by its arguments alone, set `stateless = True` on it."
            )
    return found


def _must(thing: Any) -> bool:
    known = type(thing).__module__.startswith("transformers.")
    return isinstance(thing, _ASKED_AS_PLAIN) if known else not getattr(thing, "stateless", False)


def can_go_back(thing: Any) -> bool:
    """Whether the state of `thing` can be taken and put back."""
    return _name(thing) in ADAPTERS or (hasattr(thing, "snapshot") and hasattr(thing, "restore"))


@contextmanager
def on_trial(things: Iterable[Any]) -> Iterator[None]:
    """Put `things` back, when the context closes, to where they were when it opened."""
    ways = [_ways(thing) for thing in things]
    states = [snapshot() for snapshot, _ in ways]
    try:
        yield
    finally:
        for (_, restore), state in zip(ways, states, strict=True):
            restore(state)


def _ways(thing: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    if _name(thing) not in ADAPTERS:
        return thing.snapshot, thing.restore
    snapshot, restore = ADAPTERS[_name(thing)]
    return lambda: snapshot(thing), lambda state: restore(thing, state)


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
