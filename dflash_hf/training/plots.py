"""Pictures of a training: its curves, named series side by side, and the mask of one row. Needs the extra `train`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import masking


if TYPE_CHECKING:  # matplotlib is optional: at run time it is imported where a picture is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 150  # pixels per inch of a PNG
_WIDTH = 6.4  # inches
_FORMATS = (".png", ".svg")

# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order whose neighbours also differ in
# lightness; styles and markers carry the difference when printed in grey.
_COLOURS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK = "#333333"
_RULE = "#CCCCCC"
_SMALL, _TINY = 8, 7  # points
_LEGEND = {"frameon": False, "fontsize": _TINY, "labelcolor": _INK}

# What a cell of `draw_mask` says.
HIDDEN, SEES_CONTEXT, SEES_BLOCK, LEAK = range(4)
_CELLS = {
    HIDDEN: ("#F4F4F4", "hidden"),
    SEES_CONTEXT: ("#8CBBE0", "sees context"),
    SEES_BLOCK: ("#C2500A", "sees own block"),
    LEAK: ("#000000", "sees, but must not"),
}


def plot_curves(log_history: list[dict], path: str | Path) -> None:
    """
    Draw the course of a training over its steps: loss, slot accuracy with the mean right prefix, τ at evaluations.

    A series that the log lacks leaves its panel out.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`. Used are `step` with `loss`, `accuracy`,
            `accuracy_1` to `accuracy_{K-1}` (one for each predicted slot), `accepted` (tokens) and `eval_tau`.
        path (`str` or `Path`): the file to write, `.png` or `.svg`.

    Raises:
        `ValueError`: for another kind of file, or a log with none of these series.
        `ImportError`: without matplotlib.
    """
    _save(curves_figure(log_history), path)


def plot_series(
    series: dict[str, list[tuple[float, float]]],
    path: str | Path,
    *,
    x: str,
    y: str,
) -> None:
    """
    Draw several named curves in one panel, say τ after each epoch with and without a decay of the loss.

    Args:
        series (`dict[str, list[tuple[float, float]]]`): points `(x, y)` of each curve, in order of x.
        path (`str` or `Path`): the file to write, `.png` or `.svg`.
        x, y (`str`): what the axes are, with the unit.

    Raises:
        `ValueError`: for another kind of file, or a curve without points.
        `ImportError`: without matplotlib.
    """
    _save(series_figure(series, x=x, y=y), path)


def draw_mask(
    mask: torch.Tensor,
    anchors: list[int],
    block_size: int,
    context_length: int,
    tokens: list[str] | None,
    path: str | Path,
) -> None:
    """
    Draw the training mask of one row: a line for each slot, a column for each context token and each slot.

    The column of a block's anchor in the context is outlined: the block must not see it there. A slot that sees
    another block, or the context from its anchor on, is drawn in black. Legible up to about 12 blocks and 80 tokens;
    cut longer rows before.

    Args:
        mask (`torch.Tensor` of shape `(N * K, S + N * K)`, bool): as of [`mask_of_row`].
        anchors (`list[int]`): index of each block's anchor in the row, N of them.
        block_size (`int`): K.
        context_length (`int`): S.
        tokens (`list[str]`, *optional*): text of each of the S tokens; without it the columns are numbered.
        path (`str` or `Path`): the file to write, `.png` or `.svg`.

    Raises:
        `ValueError`: for another kind of file, or when these sizes do not fit together.
        `ImportError`: without matplotlib.
    """
    _save(mask_figure(mask, anchors, block_size, context_length, tokens), path)


def mask_of_row(
    item: dict[str, torch.Tensor], anchors: list[int], block_size: int, window: int | None, causal: bool
) -> torch.Tensor:
    """
    The mask under which the blocks at `anchors` of one dataset row are trained.

    Args:
        item (`dict[str, torch.Tensor]`): a row of the dataset; of it `document` of shape `(S,)`, int64, is used.

    Returns:
        `torch.Tensor` of shape `(N * K, S + N * K)`, bool.
    """
    document = item["document"].unsqueeze(0)  # [1, S]
    return masking.training_mask(
        torch.tensor([anchors]), block_size, document >= 0, document=document, window=window, causal=causal
    )[0]


def curves_figure(log_history: list[dict]) -> "Figure":
    """What [`plot_curves`] draws, not yet written."""
    slots = {}
    while points := _points(log_history, f"accuracy_{len(slots) + 1}"):
        slots[len(slots) + 1] = points
    loss, accuracy, accepted, tau = (
        _points(log_history, name) for name in ("loss", "accuracy", "accepted", "eval_tau")
    )
    panels = []
    if loss:
        panels.append(lambda axes: _loss_panel(axes, loss))
    if accuracy or slots or accepted:
        panels.append(lambda axes: _accuracy_panel(axes, accuracy, slots, accepted))
    if tau:
        panels.append(lambda axes: _tau_panel(axes, tau))
    if not panels:
        raise ValueError(
            f"log_history with {len(log_history)} entries has no loss, accuracy, accepted or eval_tau to plot: "
            "give trainer.state.log_history of a training that logged at least once (logging_steps)."
        )
    figure = _new_figure(_WIDTH, 0.5 + 1.7 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, draw in zip(grid, panels, strict=True):
        draw(axes)
        _tidy(axes)
    grid[-1].set_xlabel("training step", fontsize=_SMALL, color=_INK)
    _whole_ticks(grid[-1], loss + accuracy + accepted + tau)
    figure.align_ylabels(grid)
    return figure


def series_figure(series: dict[str, list[tuple[float, float]]], *, x: str, y: str) -> "Figure":
    """What [`plot_series`] draws, not yet written."""
    empty = [name for name, points in series.items() if not points]
    if empty or not series:
        raise ValueError(f"series={empty}: no points to draw; give at least one curve, and each at least one point.")
    figure = _new_figure(_WIDTH, 3.4)
    axes = figure.subplots()
    for number, (name, points) in enumerate(series.items()):
        _line(
            axes,
            points,
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_STYLES[number % len(_STYLES)],
            marker=_MARKERS[number % len(_MARKERS)],
        )
    axes.set_xlabel(x, fontsize=_SMALL, color=_INK)
    _label(axes, y)
    _tidy(axes)
    _whole_ticks(axes, [point for points in series.values() for point in points])
    if len(series) > 1:
        axes.legend(**_LEGEND, handlelength=3)
    return figure


def mask_figure(
    mask: torch.Tensor, anchors: list[int], block_size: int, context_length: int, tokens: list[str] | None
) -> "Figure":
    """What [`draw_mask`] draws, not yet written."""
    _check_mask(mask, anchors, block_size, context_length, tokens)
    slots = len(anchors) * block_size
    # Inches. A column of the context is wide enough for a token written upwards, a line of a block can be thinner.
    column = min(max(7.0 / context_length, 0.115), 0.2)
    cell = min(max(4.0 / slots, 0.05), 0.14)
    x = [column * i for i in range(context_length)] + [column * context_length + cell * i for i in range(slots + 1)]
    y = [cell * i for i in range(slots + 1)]

    figure = _new_figure(max(x[-1] + 1.4, _WIDTH), y[-1] + 1.8)
    axes = figure.subplots()
    _draw_cells(axes, x, y, cell_kinds(mask, anchors, block_size, context_length))
    _draw_rules(axes, x, y, anchors, block_size, context_length)
    _name_columns(axes, x, anchors, block_size, context_length, tokens)
    names = [str(a) if tokens is None else f"{a}  {_shown(tokens[a])}" for a in anchors]
    middles = [(y[n * block_size] + y[(n + 1) * block_size]) / 2 for n in range(len(anchors))]
    axes.set_yticks(middles, names, fontsize=_TINY, color=_INK, parse_math=False)
    _label(axes, "anchor of each block")
    axes.set(xlim=(0, x[-1]), ylim=(y[-1], 0), aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def cell_kinds(mask: torch.Tensor, anchors: list[int], block_size: int, context_length: int) -> torch.Tensor:
    """What each cell of a `(Q, KV)` mask says: `HIDDEN`, `SEES_CONTEXT`, `SEES_BLOCK` or `LEAK`, int64."""
    block = torch.arange(len(anchors)).repeat_interleave(block_size)  # [Q]
    before = torch.arange(context_length) < torch.tensor(anchors)[block].unsqueeze(-1)  # [Q, S]
    own = block.unsqueeze(-1) == block  # [Q, Q]
    allowed = torch.cat([before * SEES_CONTEXT, own * SEES_BLOCK], dim=1)  # [Q, KV]
    return torch.where(mask.cpu(), torch.where(allowed == HIDDEN, LEAK, allowed), HIDDEN)


def _new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that belongs to no window and no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plots need matplotlib, which comes with the extra `train`: pip install 'dflash_hf[train]'"
        ) from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def _save(figure: "Figure", path: str | Path) -> None:
    """Write the picture under a temporary name, then rename it to `path`."""
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"path={str(path)!r}: a picture is written as {' or '.join(_FORMATS)}; name the file so.")
    temporary = path.with_name(f".{path.stem}.writing{path.suffix}")
    try:
        figure.savefig(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _points(log_history: list[dict], name: str) -> list[tuple[int, float]]:
    """`(step, value)` of one logged series."""
    return [(entry["step"], entry[name]) for entry in log_history if name in entry]


def _line(axes: "Axes", points: Sequence[tuple[float, float]], *, linewidth: float = 1.1, **style) -> None:
    """One thin curve."""
    marker = "o" if len(points) == 1 else ""  # a line through one point is not seen
    axes.plot(
        *zip(*points, strict=True),
        **{"linewidth": linewidth, "marker": marker, "markersize": 3.5, "markeredgewidth": 0, **style},
    )


def _loss_panel(axes: "Axes", loss: list) -> None:
    _line(axes, loss, label="loss", color=_COLOURS[0])
    _label(axes, "loss")


def _accuracy_panel(axes: "Axes", accuracy: list, slots: dict[int, list], accepted: list) -> None:
    """Accuracy on the left axis, and the right prefix, which is in tokens, on the right one."""
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import PercentFormatter

    for slot, points in slots.items():
        # From the colour of the mean towards white, so that the order of the slots is seen.
        fade = 0.15 + 0.6 * (slot - 1) / max(len(slots) - 1, 1)
        colour = [part + (1 - part) * fade for part in to_rgb(_COLOURS[0])]
        _line(axes, points, linewidth=0.6, label=f"slot {slot}", color=colour)
    named = [axes.lines[0], axes.lines[-1]] if len(slots) > 1 else list(axes.lines)
    if accuracy:
        _line(axes, accuracy, label="all slots", color=_COLOURS[0])
        named.insert(0, axes.lines[-1])
    if named:
        _label(axes, "slot accuracy", _COLOURS[0])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
    if accepted:
        right = axes
        if named:
            right = axes.twinx()
            _tidy(right)
            right.grid(False)  # the rules of the left axis are enough
        _line(right, accepted, label="right prefix", color=_COLOURS[1], linestyle="--")
        _label(right, "right prefix (tokens)", _COLOURS[1])
        right.set_ylim(bottom=0)
        named.append(right.lines[-1])
    if len(named) > 1:
        axes.legend(handles=named, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0, **_LEGEND)


def _tau_panel(axes: "Axes", tau: list) -> None:
    # Without clipping, so that a τ of 1, where the axis starts, keeps its marker.
    _line(axes, tau, label="τ", color=_COLOURS[2], marker="o", clip_on=False)
    _label(axes, "τ (tokens per\ntarget forward)")
    axes.set_ylim(bottom=1)


def _label(axes: "Axes", text: str, colour: str = _INK) -> None:
    axes.set_ylabel(text, fontsize=_SMALL, color=colour)


def _tidy(axes: "Axes") -> None:
    """Leave of the frame what is read: two thin axes and faint horizontal rules."""
    axes.spines[:].set_linewidth(0.6)
    axes.spines[:].set_color(_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_TINY, width=0.6, length=3, color=_INK, labelcolor=_INK)
    axes.grid(axis="y", linewidth=0.4, color=_RULE)
    axes.set_axisbelow(True)


def _whole_ticks(axes: "Axes", points: list[tuple[float, float]]) -> None:
    """No tick at half a step or epoch."""
    from matplotlib.ticker import MaxNLocator

    if all(float(x).is_integer() for x, _ in points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _check_mask(mask: torch.Tensor, anchors: list[int], block_size: int, length: int, tokens: list | None) -> None:
    slots = len(anchors) * block_size
    if tuple(mask.shape) != (slots, length + slots):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)}: {len(anchors)} anchors, block_size={block_size} and "
            f"context_length={length} need {(slots, length + slots)}; use mask_of_row."
        )
    if not anchors:
        raise ValueError("anchors=[]: a mask without blocks has no row to draw; give at least one anchor.")
    outside = [anchor for anchor in anchors if not 0 <= anchor < length]
    if outside:
        raise ValueError(f"anchors={outside}: an anchor is one of the {length} context tokens; cut the anchors too.")
    if tokens is not None and len(tokens) != length:
        raise ValueError(f"{len(tokens)} tokens for context_length={length}: give one text for each context token.")


def _draw_cells(axes: "Axes", x: list[float], y: list[float], kinds: torch.Tensor) -> None:
    """The cells and, above them, what their colours say."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap([colour for colour, _ in _CELLS.values()])
    axes.pcolormesh(
        x, y, kinds.numpy(), cmap=colours, vmin=HIDDEN, vmax=LEAK, edgecolors=(1, 1, 1, 0.4), linewidth=0.25
    )
    present = [kind for kind in _CELLS if kind != LEAK or LEAK in kinds]
    handles = [
        Patch(facecolor=_CELLS[kind][0], edgecolor=_RULE, linewidth=0.4, label=_CELLS[kind][1]) for kind in present
    ]
    handles.append(Patch(facecolor="none", edgecolor=_INK, linewidth=0.8, label="anchor in the context"))
    shape = {"handlelength": 1, "handleheight": 1}
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **shape, **_LEGEND)


def _draw_rules(
    axes: "Axes", x: list[float], y: list[float], anchors: list[int], block_size: int, context_length: int
) -> None:
    """Outlines of the anchors, lines between blocks, and the divider of context and blocks."""
    from matplotlib.patches import Rectangle

    for n, anchor in enumerate(anchors):
        top, bottom = y[n * block_size], y[(n + 1) * block_size]
        width, height = x[anchor + 1] - x[anchor], bottom - top
        axes.add_patch(Rectangle((x[anchor], top), width, height, fill=False, edgecolor=_INK, linewidth=0.8, zorder=3))
        if n:
            axes.axhline(top, linewidth=0.4, color="#999999")
    axes.axvline(x[context_length], linewidth=1.2, color=_INK)


def _name_columns(
    axes: "Axes", x: list[float], anchors: list[int], block_size: int, context_length: int, tokens: list[str] | None
) -> None:
    """Tokens and blocks below, numbers and the two parts above."""
    middles = [(left + right) / 2 for left, right in zip(x, x[1:], strict=False)][:context_length]
    starts = [context_length + n * block_size for n in range(len(anchors))]
    ticks = [(x[start] + x[start + block_size]) / 2 for start in starts]
    names = [str(anchor) for anchor in anchors]
    if tokens is not None:
        ticks, names = middles + ticks, [_shown(token) for token in tokens] + names
    axes.set_xticks(ticks, names, fontsize=_TINY, color=_INK, rotation=90, parse_math=False)
    tenth = range(0, context_length, 10)
    above = axes.secondary_xaxis("top")
    above.set_xticks([middles[i] for i in tenth], [str(i) for i in tenth], fontsize=_TINY, color=_INK)
    above.tick_params(length=0)
    above.spines[:].set_visible(False)
    style = {"xytext": (0, 16), "textcoords": "offset points", "ha": "center", "fontsize": _SMALL, "color": _INK}
    for left, right, name in ((0, context_length, "context tokens"), (context_length, -1, "slots of the blocks")):
        axes.annotate(name, ((x[left] + x[right]) / 2, 0), **style)


def _shown(token: str, longest: int = 12) -> str:
    """A token as it can be written under a column: without the space before a word, white space alone visible."""
    token = token.replace("\n", "⏎").replace("\t", "⇥")
    token = token.strip(" ") or "␣" * len(token)
    return token if len(token) <= longest else token[: longest - 1] + "…"
