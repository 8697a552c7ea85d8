"""What is drawn is what was logged, and the picture of a mask is the mask."""

import importlib
import os
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import matplotlib
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from dflash_hf.training import plots
from dflash_hf.training.plots import (
    HIDDEN,
    LEAK,
    SEES_BLOCK,
    SEES_CONTEXT,
    cell_kinds,
    curves_figure,
    draw_mask,
    mask_figure,
    mask_of_row,
    plot_curves,
    plot_series,
    series_figure,
)


def entry(step, loss, accuracy, slots, accepted):
    slots = {f"accuracy_{k}": value for k, value in enumerate(slots, start=1)}
    return {"step": step, "loss": loss, "accuracy": accuracy, **slots, "accepted": accepted}


# As `Trainer` writes it: training entries, evaluations between them, a summary at the end.
LOG = [
    entry(10, 7.5, 0.1, (0.2, 0.1, 0.05), 0.2),
    entry(20, 6.0, 0.2, (0.4, 0.2, 0.1), 0.5),
    {"step": 20, "eval_tau": 1.25, "epoch": 0.5},
    entry(30, 5.5, 0.3, (0.5, 0.3, 0.2), 1.5),
    {"step": 40, "eval_tau": 1.75, "epoch": 1.0},
    {"step": 40, "train_loss": 6.3, "train_runtime": 12.0},
]
LABELS = {  # of each series: in the legend, on its axis
    "loss": ("loss", "loss"),
    "accuracy": ("all slots", "slot accuracy"),
    "accuracy_1": ("slot 1", "slot accuracy"),
    "accuracy_2": ("slot 2", "slot accuracy"),
    "accuracy_3": ("slot 3", "slot accuracy"),
    "accepted": ("right prefix", "right prefix (tokens)"),
    "eval_tau": ("τ", "τ (tokens per\ntarget forward)"),
}
SERIES = {"before": [(512, 4.0), (1024, 3.5), (2048, 2.5)], "after": [(512, 4.25), (2048, 4.0)]}


def log_of(*names):
    return [{key: value for key, value in entry.items() if key in ("step", *names)} for entry in LOG]


def lines(figure):
    """`{label: (line, its axes)}` of a figure."""
    return {line.get_label(): (line, axes) for axes in figure.axes for line in axes.lines}


def points(line):
    return [tuple(point) for point in line.get_xydata()]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_show_every_point_of_the_log():
    drawn = lines(curves_figure(LOG))
    assert set(drawn) == {label for label, _ in LABELS.values()}
    for name, (label, axis) in LABELS.items():
        line, axes = drawn[label]
        assert points(line) == [(entry["step"], entry[name]) for entry in LOG if name in entry]
        assert axes.get_ylabel() == axis


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (["loss"], ["loss"]),
        (["loss", "eval_tau"], ["loss", LABELS["eval_tau"][1]]),
        (["accuracy"], ["slot accuracy"]),
        (["accuracy_1", "accuracy_2"], ["slot accuracy"]),
        (["accepted"], ["right prefix (tokens)"]),
        (["accuracy_1", "accepted"], ["slot accuracy", "right prefix (tokens)"]),
        (["loss", "accuracy", "accepted"], ["loss", "slot accuracy", "right prefix (tokens)"]),
        (["eval_tau"], [LABELS["eval_tau"][1]]),
    ],
)
def test_a_missing_series_leaves_its_panel_out(names, axes):
    figure = curves_figure(log_of(*names))
    assert [a.get_ylabel() for a in figure.axes] == axes
    assert set(lines(figure)) == {LABELS[name][0] for name in names}
    panels = len({a.get_subplotspec().num1 for a in figure.axes})
    assert figure.get_size_inches().tolist() == pytest.approx([6.4, 0.5 + 1.7 * panels])
    bottom = max(figure.axes, key=lambda a: a.get_subplotspec().num1)
    assert bottom.get_xlabel() == "training step"


def test_panels_share_their_steps_and_start_at_the_least_value():
    figure = curves_figure(LOG)
    limits = {axes.get_xlim() for axes in figure.axes}
    assert len(limits) == 1 and limits.pop()[1] >= 40
    bottom = {axes.get_ylabel(): axes.get_ylim()[0] for axes in figure.axes}
    assert bottom["slot accuracy"] == bottom["right prefix (tokens)"] == 0
    assert bottom[LABELS["eval_tau"][1]] == 1


def test_accuracy_is_written_in_percent_between_one_set_of_rules():
    figure = curves_figure(LOG)
    figure.draw_without_rendering()
    axes = {axes.get_ylabel(): axes for axes in figure.axes}
    assert "20%" in [label.get_text() for label in axes["slot accuracy"].get_yticklabels()]
    ruled = {name for name, a in axes.items() if any(line.get_visible() for line in a.get_ygridlines())}
    assert ruled == set(axes) - {"right prefix (tokens)"}
    assert not any(line.get_visible() for a in figure.axes for line in a.get_xgridlines())


def test_a_tau_of_one_is_not_clipped_and_steps_are_whole():
    figure = curves_figure([{"step": 1, "eval_tau": 1.0}, {"step": 2, "eval_tau": 1.5}])
    assert not lines(figure)["τ"][0].get_clip_on()
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_single_slots_are_thin_lines_that_fade_from_first_to_last():
    drawn = {label: line for label, (line, _) in lines(curves_figure(LOG)).items()}
    slots = [drawn[f"slot {k}"] for k in (1, 2, 3)]
    assert all(slot.get_linewidth() < drawn["all slots"].get_linewidth() for slot in slots)
    red = [to_rgba(line.get_color())[0] for line in (drawn["all slots"], *slots)]
    assert red == sorted(red) and len(set(red)) == 4 and red[-1] < 0.9


@pytest.mark.parametrize(
    ("names", "legend"),
    [
        (list(LABELS), ["all slots", "slot 1", "slot 3", "right prefix"]),
        (["accuracy", "accuracy_1"], ["all slots", "slot 1"]),
        (["accuracy", "accepted"], ["all slots", "right prefix"]),
    ],
)
def test_the_legend_names_first_and_last_slot(names, legend):
    axes = next(a for a in curves_figure(log_of(*names)).axes if a.get_ylabel() == "slot accuracy")
    assert legend_of(axes) == legend


def test_a_line_alone_needs_no_legend():
    assert all(axes.get_legend() is None for axes in curves_figure(log_of("loss", "accepted")).axes)
    assert series_figure({"τ": [(1, 2.0)]}, x="epoch", y="τ").axes[0].get_legend() is None


def test_one_entry_is_seen_as_a_point():
    line, _ = lines(curves_figure(log_of("loss")[:1]))["loss"]
    assert line.get_marker() == "o"
    line, _ = lines(curves_figure(log_of("loss")))["loss"]
    assert line.get_marker() == ""


@pytest.mark.parametrize("log", [[], [{"step": 40, "train_runtime": 12.0}]])
def test_a_log_without_series_is_refused(log):
    with pytest.raises(ValueError, match=rf"log_history with {len(log)} entries has no loss.*logging_steps"):
        curves_figure(log)


def test_series_show_every_point_under_their_names():
    figure = series_figure(SERIES, x="context length (tokens)", y="τ (tokens per target forward)")
    (axes,) = figure.axes
    assert {label: points(line) for label, (line, _) in lines(figure).items()} == SERIES
    assert axes.get_xlabel() == "context length (tokens)" and axes.get_ylabel() == "τ (tokens per target forward)"
    assert legend_of(axes) == ["before", "after"]


def test_curves_differ_in_colour_style_and_marker():
    figure = series_figure({str(k): [(1, k), (2, k)] for k in range(7)}, x="epoch", y="τ")
    drawn = figure.axes[0].lines
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == 7
    assert all(a.get_linestyle() != b.get_linestyle() for a, b in pairwise(drawn))


def test_epochs_have_no_ticks_between_them():
    ticks = series_figure({"τ": [(1, 2.0), (3, 2.5)]}, x="epoch", y="τ").axes[0].get_xticks()
    assert len(ticks) > 1 and all(float(tick).is_integer() for tick in ticks)
    ticks = series_figure({"τ": [(0.5, 2.0), (2.0, 2.5)]}, x="epoch", y="τ").axes[0].get_xticks()
    assert not all(float(tick).is_integer() for tick in ticks)


@pytest.mark.parametrize("series", [{}, {"full": [(1, 1.0)], "void": []}])
def test_a_curve_without_points_is_refused(series):
    with pytest.raises(ValueError, match=r"no points to draw" if not series else r"\['void'\]: no points to draw"):
        series_figure(series, x="epoch", y="τ")


ANCHORS, K, S = [2, 5, 6], 4, 9
ITEM = {"document": torch.tensor([3] * 4 + [4] * 5)}
TOKENS = ["<|im_start|>", " The", "\n", "  ", "$x$", "a\tb", " extraordinarily", "é", "."]
MASKS = [(None, False), (None, True), (3, False), (3, True)]


def naive_mask(window, causal):
    rows = []
    for n, anchor in enumerate(ANCHORS):
        for i in range(K):
            query = anchor + i

            def near(key, query=query):
                return window is None or abs(query - key) < window

            same = ITEM["document"].tolist()
            row = [k < anchor and same[k] == same[anchor] and near(k) for k in range(S)]
            for m, other in enumerate(ANCHORS):
                row += [m == n and near(other + j) and (j <= i or not causal) for j in range(K)]
            rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_mask_of_row_is_the_rule_of_training(window, causal):
    mask = mask_of_row(ITEM, ANCHORS, K, window, causal)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, naive_mask(window, causal))


def test_padding_is_not_seen():
    item = {"document": torch.tensor([-1, 0, 0, 0])}
    assert mask_of_row(item, [3], 2, None, False)[:, :4].tolist() == [[False, True, True, False]] * 2
    assert not mask_of_row({"document": torch.full((4,), -1)}, [3], 2, None, False)[:, :4].any()


@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_every_cell_says_what_its_slot_sees(window, causal):
    mask = naive_mask(window, causal)
    kinds = cell_kinds(mask, ANCHORS, K, S)
    for q in range(len(ANCHORS) * K):
        for k in range(S + len(ANCHORS) * K):
            seen = SEES_CONTEXT if k < S else SEES_BLOCK
            assert kinds[q, k] == (seen if mask[q, k] else HIDDEN)


def test_a_mask_that_sees_all_shows_what_it_must_not():
    kinds = cell_kinds(torch.ones(len(ANCHORS) * K, S + len(ANCHORS) * K, dtype=torch.bool), ANCHORS, K, S)
    for q, row in enumerate(kinds.tolist()):
        anchor = ANCHORS[q // K]
        blocks = [SEES_BLOCK if k // K == q // K else LEAK for k in range(len(ANCHORS) * K)]
        assert row == [SEES_CONTEXT] * anchor + [LEAK] * (S - anchor) + blocks


def drawn_mask(mask, tokens=TOKENS):
    figure = mask_figure(mask, ANCHORS, K, S, tokens)
    axes = figure.axes[0]
    return figure, axes, axes.collections[0]


def test_the_picture_is_the_mask():
    mask = naive_mask(3, True)
    mask[1, 7] = True  # a leak
    _, axes, mesh = drawn_mask(mask)
    assert torch.equal(torch.tensor(mesh.get_array()) != HIDDEN, mask)
    assert torch.equal(torch.tensor(mesh.get_array()), cell_kinds(mask, ANCHORS, K, S))
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    assert left < right and top < bottom, "the first slot is at the top, the first token at the left"
    corners = mesh.get_coordinates()
    assert corners[0, 0].tolist() == [left, top] and corners[-1, -1].tolist() == [right, bottom]
    assert (corners[:, 1:, 0] > corners[:, :-1, 0]).all() and (corners[1:, :, 1] > corners[:-1, :, 1]).all()


def test_slots_are_squares_and_nothing_is_written_beyond_the_figure():
    figure, axes, mesh = drawn_mask(naive_mask(None, False))
    figure.draw_without_rendering()
    right, down = mesh.get_coordinates()[1, S + 1] - mesh.get_coordinates()[0, S]
    assert right == pytest.approx(down) and axes.get_aspect() == 1
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert 0 <= box.x0 and 0 <= box.y0 and box.x1 <= width and box.y1 <= height


@pytest.mark.parametrize("leak", [False, True])
def test_the_legend_explains_the_colours_that_are_drawn(leak):
    mask = naive_mask(None, False)
    mask[0, 5] = leak
    figure, _, mesh = drawn_mask(mask)
    (legend,) = figure.legends
    colours = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    meaning = {HIDDEN: "hidden", SEES_CONTEXT: "sees context", SEES_BLOCK: "sees own block"}
    meaning |= {LEAK: "sees, but must not"} if leak else {}
    assert set(colours) == {*meaning.values(), "anchor in the context"}
    for kind, name in meaning.items():
        assert colours[name] == mesh.cmap(mesh.norm(kind))
    assert len(set(colours.values())) == len(colours)


def test_anchor_columns_are_outlined_and_context_is_divided_from_blocks():
    _, axes, mesh = drawn_mask(naive_mask(None, False))
    corners = mesh.get_coordinates()
    assert len(axes.patches) == len(ANCHORS)
    for n, (anchor, outline) in enumerate(zip(ANCHORS, axes.patches, strict=True)):
        assert not outline.get_fill()
        (left, top), (right, bottom) = outline.get_bbox().get_points()
        assert [left, top] == pytest.approx(corners[n * K, anchor].tolist())
        assert [right, bottom] == pytest.approx(corners[(n + 1) * K, anchor + 1].tolist())
    *between, divider = axes.lines
    assert [line.get_ydata()[0] for line in between] == corners[[K, 2 * K], 0, 1].tolist()
    assert divider.get_xdata()[0] == corners[0, S, 0]


def test_rows_and_columns_are_named_at_their_middle():
    figure, axes, mesh = drawn_mask(naive_mask(None, False))
    corners = mesh.get_coordinates()
    rows = [(label.get_text(), label.get_position()[1]) for label in axes.get_yticklabels()]
    assert [name for name, _ in rows] == ["2  ⏎", "5  a⇥b", "6  extraordina…"]
    assert [y for _, y in rows] == pytest.approx([(n + 0.5) * corners[K, 0, 1] for n in range(3)])
    columns = [(label.get_text(), label.get_position()[0]) for label in axes.get_xticklabels()]
    names = ["<|im_start|>", "The", "⏎", "␣␣", "$x$", "a⇥b", "extraordina…", "é", "."]
    assert [name for name, _ in columns] == [*names, "2", "5", "6"]
    edges = corners[0, :, 0]
    middles = [(edges[k] + edges[k + 1]) / 2 for k in range(S)]
    blocks = [(edges[S + n * K] + edges[S + (n + 1) * K]) / 2 for n in range(3)]
    assert [x for _, x in columns] == pytest.approx(middles + blocks)
    assert not any(label.get_parse_math() for label in axes.get_xticklabels() + axes.get_yticklabels())
    headers = [(text.get_text(), text.xy[0]) for text in axes.texts]
    assert headers == [
        ("context tokens", pytest.approx(edges[S] / 2)),
        ("slots of the blocks", pytest.approx((edges[S] + edges[-1]) / 2)),
    ]
    figure.draw_without_rendering()
    (above,) = axes.child_axes
    assert [(t.get_text(), t.get_position()[0]) for t in above.get_xticklabels()] == [("0", middles[0])]


def test_without_tokens_anchors_are_named_by_their_index():
    _, axes, _ = drawn_mask(naive_mask(None, False), tokens=None)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "5", "6"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "5", "6"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 5}, r"mask of shape \(12, 21\): 3 anchors, block_size=5 .* need \(15, 24\)"),
        ({"context_length": 8}, r"context_length=8 need \(12, 20\)"),
        ({"anchors": [2, 5, 9]}, r"anchors=\[9\]: an anchor is one of the 9 context tokens"),
        ({"anchors": [2, 5, -1]}, r"anchors=\[-1\]"),
        ({"anchors": [], "mask": torch.ones(0, 9, dtype=torch.bool)}, r"anchors=\[\]"),
        ({"tokens": TOKENS[1:]}, r"8 tokens for context_length=9"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    fitting = {"mask": naive_mask(None, False), "anchors": ANCHORS, "block_size": K, "context_length": S}
    with pytest.raises(ValueError, match=message):
        mask_figure(**{**fitting, "tokens": None, **changed})


DRAW = {
    "curves": lambda path: plot_curves(log_of("loss"), path),
    "series": lambda path: plot_series(SERIES, path, x="epoch", y="τ"),
    "mask": lambda path: draw_mask(naive_mask(None, False), ANCHORS, K, S, TOKENS, path),
}
SIZE = {"curves": (6.4, 2.2), "series": (6.4, 3.4), "mask": (6.4, 12 * 0.14 + 1.8)}  # inches


@pytest.mark.parametrize("kind", DRAW)
def test_png_has_the_size_of_the_figure(kind, tmp_path):
    path = tmp_path / "picture.png"
    DRAW[kind](path)
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == tuple(int(plots.DPI * inches) for inches in SIZE[kind])
        assert len(image.getcolors(1 << 24)) > 10
    assert os.listdir(tmp_path) == ["picture.png"]


@pytest.mark.parametrize("kind", DRAW)
def test_svg_has_the_size_of_the_figure(kind, tmp_path):
    path = tmp_path / "picture.svg"
    DRAW[kind](str(path))
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    size = [float(root.attrib[side].removesuffix("pt")) / 72 for side in ("width", "height")]
    assert size == pytest.approx(SIZE[kind])


@pytest.mark.parametrize("name", ["picture", "picture.jpg"])
def test_another_kind_of_file_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"picture.*written as \.png or \.svg"):
        DRAW["curves"](tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_picture_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    path.write_text("old")

    def half(figure, name):
        with open(name, "w") as file:
            file.write("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        DRAW["curves"](path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["picture.png"]


@pytest.mark.parametrize("kind", DRAW)
def test_without_matplotlib_one_line_names_the_extra(kind, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(plots)  # the module itself does not need it
    with pytest.raises(ImportError, match=r"^Plots need matplotlib.*`train`: pip install 'dflash_hf\[train\]'$"):
        DRAW[kind](tmp_path / "picture.png")


def test_drawing_uses_no_global_state(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    before = matplotlib.rcParams.copy()
    for draw in DRAW.values():
        draw(tmp_path / "picture.png")
    assert matplotlib.rcParams.copy() == before
