"""The feature store gives back what was wholly written, byte for byte, and only for the same target and data."""

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import random_ids, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dflash_hf.target import Target
from dflash_hf.training import features
from dflash_hf.training.features import FeatureStore, Manifest, fill, manifest_for, target_states


LENGTHS = [3, 1, 5, 1, 4, 2]
WIDTH = 6
DTYPES = ["float32", "bfloat16", "float16"]


def manifest(lengths=LENGTHS, **fields) -> Manifest:
    defaults = {
        "target": "tiny",
        "revision": "a1",
        "weights_hash": "b2",
        "layer_ids": (1, 2),
        "soft_labels": False,
        "width": WIDTH,
        "dtype": "float32",
        "tokenizer_hash": "c3",
        "template_hash": "d4",
        "documents": len(lengths),
        "tokens": sum(lengths),
        "data_hash": "e5",
    }
    return Manifest(**{**defaults, **fields})


def open_store(folder, lengths=LENGTHS, *, shard_tokens: int = 6, **fields) -> FeatureStore:
    made = manifest(lengths, **fields)
    token_bytes = made.width * getattr(torch, made.dtype).itemsize
    return FeatureStore(folder, made, lengths, shard_bytes=shard_tokens * token_bytes)


def random_features(document: int, lengths=LENGTHS, dtype=torch.float32) -> torch.Tensor:
    """Any bytes at all that are finite numbers, denormals and both zeros among them."""
    generator = torch.Generator().manual_seed(document)
    raw = torch.randint(0, 256, (lengths[document], WIDTH * dtype.itemsize), generator=generator, dtype=torch.uint8)
    numbers = raw.view(dtype)
    return torch.where(numbers.isfinite(), numbers, torch.tensor(-0.0, dtype=dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite_are_refused_and_stay_missing(tmp_path, value):
    store = FeatureStore(tmp_path / "store", manifest(), LENGTHS)
    features = random_features(2)
    features[-1, -1] = value
    with pytest.raises(ValueError, match="document=2: its features are not finite"):
        store.write(2, features)
    assert not store.has(2)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def expected_bytes(documents: list[int], lengths=LENGTHS) -> bytes:
    """What a shard with these documents must hold."""
    return b"".join(random_features(d, lengths).view(torch.uint8).numpy().tobytes() for d in documents)


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "features").glob("shard-*.bin"))


def in_child(work) -> int:
    """Run `work` in a process of its own; its exit code, negative for a signal."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


# --------------------------------------------------------------------------------------------------- read and write
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_document_comes_back_byte_for_byte(tmp_path, dtype):
    store = open_store(tmp_path, dtype=dtype)
    written = {d: random_features(d, dtype=store.dtype) for d in range(len(LENGTHS))}
    for count, d in enumerate([4, 0, 5, 2, 1, 3]):
        assert store.missing == len(LENGTHS) - count and not store.has(d)
        store.write(d, written[d])
        assert store.has(d)
    assert store.missing == 0
    again = open_store(tmp_path, dtype=dtype)
    for d, expected in written.items():
        assert same_bytes(store.read(d), expected) and same_bytes(again.read(d), expected)


def test_shards_hold_whole_documents_in_order_up_to_their_size(tmp_path):
    store = open_store(tmp_path)
    for d in range(len(LENGTHS)):
        store.write(d, random_features(d))
    # 3 + 1 tokens, then 5 + 1 (six are allowed), then 4 + 2.
    contents = [path.read_bytes() for path in shards(tmp_path)]
    assert contents == [expected_bytes([0, 1]), expected_bytes([2, 3]), expected_bytes([4, 5])]


def test_a_document_longer_than_a_shard_has_one_to_itself(tmp_path):
    lengths = [1, 9, 1, 1]
    store = open_store(tmp_path, lengths, shard_tokens=2)
    for d in range(4):
        store.write(d, random_features(d, lengths))
    assert [path.read_bytes() for path in shards(tmp_path)] == [
        expected_bytes(documents, lengths) for documents in ([0], [1], [2, 3])
    ]


def test_a_shard_smaller_than_a_token_still_holds_a_document(tmp_path):
    store = FeatureStore(tmp_path, manifest(), LENGTHS, shard_bytes=1)
    store.write(2, random_features(2))
    assert len(shards(tmp_path)) == len(LENGTHS) and same_bytes(store.read(2), random_features(2))


def test_a_store_is_opened_with_the_shards_it_was_made_with(tmp_path):
    open_store(tmp_path).write(5, random_features(5))
    store = open_store(tmp_path, shard_tokens=2)
    assert same_bytes(store.read(5), random_features(5)) and len(shards(tmp_path)) == 3


def test_a_transposed_tensor_with_a_gradient_is_written_as_it_reads(tmp_path):
    store = open_store(tmp_path)
    tensor = torch.randn(WIDTH, LENGTHS[0], requires_grad=True).T
    store.write(0, tensor)
    assert torch.equal(store.read(0), tensor)


def test_what_was_read_can_be_changed_and_the_store_stays(tmp_path):
    store = open_store(tmp_path)
    store.write(0, random_features(0))
    store.read(0).zero_()
    assert same_bytes(store.read(0), random_features(0))
    assert same_bytes(open_store(tmp_path).read(0), random_features(0))


def test_a_document_that_is_there_stays_as_it_is(tmp_path):
    store = open_store(tmp_path)
    store.write(0, random_features(0))
    store.write(0, torch.zeros(LENGTHS[0], WIDTH))
    assert same_bytes(store.read(0), random_features(0))


def test_reading_what_is_missing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"document=2: .*no features of it yet"):
        open_store(tmp_path).read(2)


@pytest.mark.parametrize("document", [-1, len(LENGTHS)])
def test_a_document_outside_the_dataset_is_refused(tmp_path, document):
    store = open_store(tmp_path)
    for d in range(len(LENGTHS)):
        store.write(d, random_features(d))
    for ask in (store.has, store.read, lambda d: store.write(d, random_features(0))):
        with pytest.raises(IndexError, match=rf"document={document}: .* 0 to 5"):
            ask(document)


def test_a_document_may_be_an_entry_of_a_tensor(tmp_path):
    store = open_store(tmp_path)
    store.write(torch.tensor(1), random_features(1))
    assert store.has(torch.tensor(1)) and same_bytes(store.read(torch.tensor(1)), random_features(1))


@pytest.mark.parametrize(
    "wrong, named",
    [
        (torch.zeros(3, WIDTH + 1), r"\(3, 7\) in torch.float32.*\(3, 6\) in torch.float32"),
        (torch.zeros(2, WIDTH), r"\(2, 6\) in torch.float32.*\(3, 6\)"),
        (torch.zeros(1, 3, WIDTH), r"\(1, 3, 6\)"),
        (torch.zeros(3, WIDTH).half(), r"in torch.float16.*in torch.float32"),
    ],
)
def test_features_of_another_shape_or_dtype_are_refused(tmp_path, wrong, named):
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match=f"document=0: .*{named}"):
        store.write(0, wrong)
    assert not store.has(0) and not any(any(path.read_bytes()) for path in shards(tmp_path))


def test_a_store_of_an_earlier_run_is_read_as_it_lies_on_the_disk(tmp_path):
    """The layout of version 1, by hand."""
    data = tmp_path / "features"
    data.mkdir()
    content = {**dataclasses.asdict(manifest()), "version": 1, "shard_bytes": 6 * WIDTH * 4}
    (data / "manifest.json").write_text(json.dumps(content))
    for shard in range(3):
        (data / f"shard-{shard:05d}.bin").write_bytes(expected_bytes([2 * shard, 2 * shard + 1]))
    (data / "done.bin").write_bytes(bytes([1, 1, 0, 1, 1, 1]))
    store = open_store(tmp_path)
    assert not store.has(2) and all(same_bytes(store.read(d), random_features(d)) for d in (0, 1, 3, 4, 5))


def test_a_pickled_copy_reads_what_is_written_later(tmp_path):
    store = open_store(tmp_path)
    copies = [pickle.loads(pickle.dumps(store)), copy.deepcopy(store)]
    store.write(3, random_features(3))
    assert all(same_bytes(each.read(3), random_features(3)) for each in copies)


# ------------------------------------------------------------------------------------------- interrupted and at once
def test_a_document_is_marked_after_its_data_reached_the_disk(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    seen = []

    def fsync(descriptor):
        seen.append((store.has(2), shards(tmp_path)[1].read_bytes()[: 5 * WIDTH * 4]))

    monkeypatch.setattr(features.os, "fsync", fsync)
    store.write(2, random_features(2))
    assert seen == [(False, expected_bytes([2]))]


def test_a_process_killed_in_the_middle_of_a_write_loses_that_document_alone(tmp_path):
    store = open_store(tmp_path)

    def work():
        store.write(1, random_features(1))
        features.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        store.write(2, random_features(2))

    assert in_child(work) == -signal.SIGKILL
    again = open_store(tmp_path)
    assert [again.has(d) for d in range(len(LENGTHS))] == [False, True, False, False, False, False]
    again.write(2, random_features(2))
    assert same_bytes(again.read(1), random_features(1)) and same_bytes(again.read(2), random_features(2))


def test_data_without_its_mark_is_not_there(tmp_path):
    store = open_store(tmp_path)
    store.write(3, random_features(3))
    with open(shards(tmp_path)[1], "r+b") as shard:
        shard.write(expected_bytes([2])[:50])
    assert not store.has(2) and store.missing == 5 and same_bytes(store.read(3), random_features(3))


def test_an_error_in_the_middle_of_a_write_leaves_the_store_as_it_was(tmp_path):
    store = open_store(tmp_path, [2, 4000, 2], shard_tokens=8000)
    lengths = store.lengths
    store.write(0, random_features(0, lengths))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The file may not grow beyond this: the write stops half-way, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(OSError):
            store.write(1, random_features(1, lengths))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert any(shards(tmp_path)[0].read_bytes()[48:50_000]), "nothing was written before the error"
    assert [store.has(d) for d in range(3)] == [True, False, False]
    for d in (1, 2):
        store.write(d, random_features(d, lengths))
    assert all(same_bytes(store.read(d), random_features(d, lengths)) for d in range(3))


def test_a_creation_that_was_killed_is_started_again(tmp_path):
    def work():
        features.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        open_store(tmp_path)

    assert in_child(work) == -signal.SIGKILL
    left = tmp_path / ".creating"
    assert sorted(path.name for path in left.iterdir()) == [
        "done.bin",
        "manifest.json",
        *(f"shard-0000{i}.bin" for i in range(3)),
    ]
    (left / "done.bin").write_bytes(b"\x01" * len(LENGTHS))
    store = open_store(tmp_path)
    assert store.missing == len(LENGTHS) and not left.exists()


def test_a_killed_creation_leaves_nothing_that_another_layout_would_use(tmp_path):
    (tmp_path / ".creating").mkdir()
    (tmp_path / ".creating" / "shard-00077.bin").write_bytes(b"old")
    open_store(tmp_path)
    assert len(shards(tmp_path)) == 3


def test_processes_fill_one_store_at_the_same_time(tmp_path):
    lengths = [1 + d % 7 for d in range(60)]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)

    def work(rank: int):
        barrier.wait(30)
        store = open_store(tmp_path, lengths, shard_tokens=20)  # all want to make it
        barrier.wait(30)
        for d in range(rank, len(lengths), 3):
            store.write(d, random_features(d, lengths))
        barrier.wait(30)
        assert store.missing == 0
        assert all(same_bytes(store.read(d), random_features(d, lengths)) for d in range(len(lengths)))

    children = [context.Process(target=work, args=(rank,)) for rank in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert open_store(tmp_path, lengths).missing == 0


def test_a_store_made_while_this_process_waited_is_kept(tmp_path, monkeypatch):
    class Lock:
        """Another process makes and fills the store just before the lock is ours."""

        def __init__(self, path):
            monkeypatch.undo()
            open_store(tmp_path).write(0, random_features(0))

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(features, "WeakFileLock", Lock)
    assert same_bytes(open_store(tmp_path).read(0), random_features(0))


# ------------------------------------------------------------------------------------------------- what is refused
OTHER = {
    "version": 2,
    "target": "other",
    "revision": None,
    "weights_hash": "other",
    "layer_ids": (1, 3),
    "soft_labels": True,
    "width": WIDTH + 1,
    "dtype": "bfloat16",
    "tokenizer_hash": "other",
    "template_hash": "other",
    "documents": len(LENGTHS) - 1,
    "tokens": sum(LENGTHS) + 1,
    "data_hash": "other",
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
def test_another_value_of_any_field_is_refused_by_name(tmp_path, field):
    open_store(tmp_path).write(0, random_features(0))
    value = OTHER[field]
    lengths = {"documents": [4, *LENGTHS[2:]], "tokens": [4, *LENGTHS[1:]]}.get(field, LENGTHS)
    was = getattr(manifest(), field)
    found, wanted = (list(v) if isinstance(v, tuple) else v for v in (was, value))
    with pytest.raises(ValueError) as refused:
        open_store(tmp_path, lengths, **{field: value})
    message = str(refused.value)
    assert f"another {field}: {found!r} there, {wanted!r} here." in message
    assert "another folder, or delete" in message and "\n" not in message
    assert same_bytes(open_store(tmp_path).read(0), random_features(0))


def test_of_two_fields_that_differ_the_first_is_named(tmp_path):
    open_store(tmp_path)
    with pytest.raises(ValueError, match="another tokenizer_hash"):
        open_store(tmp_path, tokenizer_hash="other", data_hash="other")


def test_a_field_that_the_store_does_not_have_is_named(tmp_path):
    open_store(tmp_path)
    path = tmp_path / "features" / "manifest.json"
    content = json.loads(path.read_text())
    del content["soft_labels"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="another soft_labels: None there, False here"):
        open_store(tmp_path)


@pytest.mark.parametrize("content", ["", '{"version": 1, "tar', "[1]", "{}", "\xff"])
def test_a_manifest_that_cannot_be_read_is_refused(tmp_path, content):
    open_store(tmp_path)
    (tmp_path / "features" / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"manifest.json cannot be read \(.*another folder, or delete") as refused:
        open_store(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["shard-00001.bin", "done.bin"])
@pytest.mark.parametrize("size", [None, 3])
def test_a_damaged_store_is_refused(tmp_path, name, size):
    open_store(tmp_path)
    path = tmp_path / "features" / name
    path.unlink() if size is None else os.truncate(path, size)
    with pytest.raises(ValueError, match=rf"damaged: {name} has {size or 0} bytes, not (144|6)\. Use another folder"):
        open_store(tmp_path)


def test_a_store_without_manifest_is_refused(tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="manifest.json cannot be read"):
        open_store(tmp_path)
    assert (tmp_path / "features" / "thesis.txt").read_text() == "mine"


def test_a_folder_that_is_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match="no feature store: it is a folder with model.safetensors. Use an empty"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(ValueError, match="no feature store: it is a file. Use an empty"):
        open_store(tmp_path / "store")


def test_the_manifest_must_count_the_lengths(tmp_path):
    for lengths in (LENGTHS[:-1], [*LENGTHS[:-1], 3], [*LENGTHS[:-1], 1, 1]):
        with pytest.raises(ValueError, match=r"the manifest counts 6 of 16\. Give the lengths"):
            FeatureStore(tmp_path, manifest(), lengths)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_an_empty_document_and_an_empty_dataset_are_refused(tmp_path, lengths):
    with pytest.raises(ValueError, match="at least one token"):
        open_store(tmp_path, lengths)


def test_an_unknown_dtype_and_a_shard_of_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dtype='int8': .*bfloat16, float16, float32"):
        open_store(tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="shard_bytes=0: at least 1"):
        open_store(tmp_path, shard_tokens=0)
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- room on disk
def free_bytes(monkeypatch, free: int) -> list[Path]:
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or SimpleNamespace(free=free))
    return asked


def test_bytes_are_counted_before_anything_is_written(tmp_path, monkeypatch):
    needed = FeatureStore.bytes_needed(LENGTHS, WIDTH, torch.float32)
    assert needed == 16 * 6 * 4
    assert FeatureStore.bytes_needed([2, 3], 7, torch.bfloat16) == 70
    asked = free_bytes(monkeypatch, needed - 1)
    with pytest.raises(OSError, match=r"6 documents need 0\.00 GB, 0\.00 GB are free for .*Use a larger disk") as full:
        open_store(tmp_path / "a" / "b")
    assert "\n" not in str(full.value) and not any(tmp_path.iterdir()) and asked == [tmp_path]
    free_bytes(monkeypatch, needed)
    open_store(tmp_path / "a" / "b")
    assert sum(path.stat().st_size for path in shards(tmp_path / "a" / "b")) == needed


def test_only_what_is_missing_needs_room(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    for d in (0, 2, 4):
        store.write(d, random_features(d))
    free_bytes(monkeypatch, 4 * WIDTH * 4)
    open_store(tmp_path)
    free_bytes(monkeypatch, 4 * WIDTH * 4 - 1)
    with pytest.raises(OSError, match="3 documents need"):
        open_store(tmp_path)
    assert same_bytes(store.read(2), random_features(2))


def test_a_new_store_takes_no_room(tmp_path):
    open_store(tmp_path, [100_000] * 4, shard_tokens=200_000)
    assert sum(path.stat().st_size for path in shards(tmp_path)) == 9_600_000
    assert sum(path.stat().st_blocks * 512 for path in shards(tmp_path)) < 100_000


def test_the_size_is_said_in_one_line(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(features.logger, "info", said.append)
    free_bytes(monkeypatch, 7_000_000_000)
    open_store(tmp_path, [100_000] * 4, dtype="bfloat16", width=1000)
    (tmp_path / "features" / "done.bin").write_bytes(b"\x00\x01\x00\x00")
    open_store(tmp_path, [100_000] * 4, dtype="bfloat16", width=1000)
    place = f"Features in {tmp_path}: "
    assert said == [
        place + "4 of 4 documents to come, 400000 tokens of 2000 bytes, 0.80 GB; 7.00 GB are free.",
        place + "3 of 4 documents to come, 300000 tokens of 2000 bytes, 0.60 GB; 7.00 GB are free.",
    ]


# --------------------------------------------------------------------------------------------- what the target says
@torch.no_grad()
def naive_states(model, ids: list[int]) -> torch.Tensor:
    """Outputs of layers 2 and 0 and the state after the final norm, `(S, 3 H)`, as transformers reports them."""
    output = model(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([output.hidden_states[3], output.hidden_states[1], output.hidden_states[-1]], dim=-1)[0]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_packed_and_padded_texts_have_the_states_of_each_alone(family):
    model = tiny_target(family)
    texts = [random_ids(n, seed=n).tolist() for n in (3, 11, 1, 6)]
    ids = torch.tensor([[*texts[0], *texts[1], *texts[2], 0], [*texts[3], *[0] * 10]])
    document = torch.tensor([[0] * 3 + [1] * 11 + [2] + [-1], [3] * 6 + [-1] * 10])
    states = target_states(Target(model), [2, 0], ids, document, soft_labels=True)
    for d, text in enumerate(texts):
        torch.testing.assert_close(states[document == d], naive_states(model, text), atol=1e-5, rtol=1e-5)
    without = target_states(Target(model), [2, 0], ids, document, soft_labels=False)
    assert torch.equal(without, states[..., :64]) and not states.requires_grad


def test_states_are_in_the_precision_of_the_target_also_where_training_is_not(model):
    ids = random_ids(1, 5)
    arguments = (Target(model), [2], ids, torch.zeros_like(ids))
    with torch.autocast("cpu", torch.bfloat16):
        states = target_states(*arguments, soft_labels=True)
    assert torch.equal(states, target_states(*arguments, soft_labels=True))


@pytest.mark.parametrize("soft_labels", [False, True])
def test_filling_computes_what_is_missing(model, tmp_path, soft_labels):
    made = manifest_of(model, soft_labels=soft_labels, layers=(2, 0))
    store = FeatureStore(tmp_path, made, [3, 1, 2])
    store.write(1, torch.full((1, made.width), 7.0))
    steps = fill(store, Target(model), TEXTS)
    assert next(steps) == 0 and store.missing == 1
    steps.close()  # an interrupted filling
    assert list(fill(store, Target(model), TEXTS)) == [2] and store.missing == 0
    assert torch.equal(store.read(1), torch.full((1, made.width), 7.0))
    for d in (0, 2):
        expected = naive_states(model, TEXTS[d])[:, : made.width]
        torch.testing.assert_close(store.read(d), expected, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------- the manifest
TEXTS = [[5, 6, 7], torch.tensor([8]), [9, 10]]


def tiny_tokenizer(words: int = 10, template: str | dict | None = "{{ messages }}") -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0", chat_template=template)


@pytest.fixture
def model():
    return tiny_target()


def manifest_of(model, tokenizer=None, texts=TEXTS, soft_labels=False, layers=(1, 2)) -> Manifest:
    config = tiny_drafter(model, target_layer_ids=list(layers)).config
    dataset = SimpleNamespace(texts=texts, lengths=[len(ids) for ids in texts])
    return manifest_for(Target(model), config, tokenizer or tiny_tokenizer(), dataset, soft_labels)


def differing(a: Manifest, b: Manifest) -> set[str]:
    return {field.name for field in dataclasses.fields(Manifest) if getattr(a, field.name) != getattr(b, field.name)}


def test_the_manifest_of_the_same_things_is_equal(model, tmp_path):
    made = manifest_of(model)
    assert made == manifest_of(tiny_target(), tiny_tokenizer(), [torch.as_tensor(ids) for ids in TEXTS])
    assert (made.layer_ids, made.width, made.dtype, made.documents, made.tokens) == ((1, 2), 64, "float32", 3, 6)
    FeatureStore(tmp_path, made, [3, 1, 2]).write(2, torch.ones(2, 64))


def test_the_manifest_of_a_saved_target_names_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    made = manifest_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert differing(made, manifest_of(model)) == {"target"} and made.target == str(tmp_path)


def test_the_commit_of_a_target_from_the_hub_is_in_the_manifest(model):
    before = manifest_of(model)
    assert before.revision is None
    model.config._commit_hash = "abc"
    assert manifest_of(model).revision == "abc"


def test_taps_and_soft_labels_are_in_the_manifest(model):
    made = manifest_of(model)
    assert differing(made, manifest_of(model, layers=(1, 3))) == {"layer_ids"}
    assert differing(made, manifest_of(model, layers=(0, 1, 2))) == {"layer_ids", "width"}
    assert differing(made, manifest_of(model, soft_labels=True)) == {"soft_labels", "width"}
    assert manifest_of(model, soft_labels=True).width == 96


def test_a_model_that_was_tuned_or_cast_has_another_weights_hash(model):
    made = manifest_of(model)
    assert differing(made, manifest_of(copy.deepcopy(model).bfloat16())) == {"weights_hash", "dtype"}
    for name, parameter in model.named_parameters():
        was = parameter.data
        parameter.data = was * 1.001
        assert features._weights_hash(model) != made.weights_hash, name
        parameter.data = was
    assert manifest_of(model) == made


def test_another_rotary_base_has_another_weights_hash(model):
    made = manifest_of(model)
    other = tiny_target(rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert differing(made, manifest_of(other)) == {"weights_hash"}


def test_every_column_of_a_large_weight_is_sampled():
    layer = torch.nn.Linear(64, 4096, bias=False)
    before = features._weights_hash(layer)
    for column in range(64):
        tuned = copy.deepcopy(layer)
        tuned.weight.data[:, column] += 1
        assert features._weights_hash(tuned) != before


def test_tokenizer_and_template_are_in_the_manifest(model):
    made = manifest_of(model)
    assert differing(made, manifest_of(model, tiny_tokenizer(words=11))) == {"tokenizer_hash"}
    for template in ("{{ other }}", None, {"default": "{{ messages }}"}):
        assert differing(made, manifest_of(model, tiny_tokenizer(template=template))) == {"template_hash"}


def test_using_a_tokenizer_does_not_change_the_manifest(model):
    tokenizer = tiny_tokenizer()
    before = manifest_of(model, tokenizer)
    tokenizer(["w1", "w1 w2 w3"], padding=True, truncation=True, max_length=2)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["padding"] is not None
    assert manifest_of(model, tokenizer) == before


def test_a_tokenizer_in_python_is_known_by_its_vocabulary(model):
    def made(vocabulary):
        return manifest_of(model, SimpleNamespace(get_vocab=lambda: vocabulary, chat_template=None))

    assert made({"a": 1, "b": 2}) == made({"b": 2, "a": 1})
    assert differing(made({"a": 1}), made({"a": 2})) == {"tokenizer_hash"}


@pytest.mark.parametrize("texts", [[[5, 6, 7], [8], [9, 11]], [[8], [5, 6, 7], [9, 10]], [[5, 6], [7, 8], [9, 10]]])
def test_other_tokens_another_order_and_other_ends_are_other_data(model, texts):
    assert differing(manifest_of(model), manifest_of(model, texts=texts)) == {"data_hash"}
