"""Imports point strictly down the list of rooms."""

import ast
from pathlib import Path

import pytest

import dflash_hf


ROOT = Path(dflash_hf.__file__).parent
PACKAGE = "__init__"  # the package itself, above every room
LEVELS = [
    {"configuration_dflash", "compat"},
    {"checkpoints", "heads", "masking", "verification", "objective", "metrics"},
    {"attention", "cache", "memory", "modeling_dflash", "options", "outputs", "pairing"}
    | {"conversion", "drafting", "prompt", "proposal", "recurrent", "state", "target"},
    {"decoding"},
    {"integration"},
    {"evaluation", "reference", "training"},
    {"cli"},
    {"__main__"},
    {PACKAGE},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
SHARED_LEVEL = 2  # the one level whose rooms may import each other, as long as no circle comes of it


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module below the package: its first component."""
    return parts[0] if parts and (parts[0] in LEVEL or (ROOT / parts[0]).exists()) else PACKAGE


def module_parts(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1]


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a module imports, at its top or anywhere inside."""
    package = path.relative_to(ROOT).parent.parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = ("dflash_hf", *package[: len(package) - node.level + 1], *base)
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "dflash_hf":
                below = name[1:]
                if len(below) == 1 and not any((ROOT / below[0]).with_suffix(end).exists() for end in (".py", "")):
                    below = ()  # a name of the package, not a module
                rooms.add(room_of(below))
    return rooms


MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path):
    room = module_parts(path)[0]
    assert room in LEVEL, f"{room} is no known room; give it a level in this test"
    for other in sorted(imported_rooms(path) - {room}):
        assert other in LEVEL, f"{path.name} imports {other}, which is no known room"
        allowed = LEVEL[other] < LEVEL[room] or LEVEL[other] == LEVEL[room] == SHARED_LEVEL
        assert allowed, f"{room} (level {LEVEL[room]}) imports {other} (level {LEVEL[other]})"


def test_no_circle_of_imports_inside_the_shared_level():
    edges = {room: set() for room in LEVELS[SHARED_LEVEL]}
    for path in MODULES:
        room = module_parts(path)[0]
        if room in edges:
            edges[room] |= imported_rooms(path) & set(edges) - {room}
    while edges:
        free = [room for room, needs in edges.items() if not needs & set(edges)]
        assert free, f"a circle among {sorted(edges)}"
        for room in free:
            del edges[room]
