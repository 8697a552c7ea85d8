"""Several processes train the drafter that one process trains from the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_hf import DFlashDraftModel


SCRIPT = Path(__file__).with_name("train_tiny.py")
# What starts several processes is the option for several GPUs, on a CPU as well.
LAUNCH = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no"]


def run(output: Path, *arguments: str, launch: tuple[str, ...] = ()) -> tuple[dict, list[dict]]:
    """Weights and log of a run of the script."""
    command = [sys.executable, *launch, str(SCRIPT), str(output), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    log = json.loads((output / "log.json").read_text())["log_history"]
    return load_file(output / "weights.safetensors"), log


def processes(count: int, *options: str) -> tuple[str, ...]:
    return (*LAUNCH, "--num_processes", str(count), *options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), "2", "1")


def series(log: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in log if name in entry]


def check_equal(one: tuple[dict, list], other: tuple[dict, list]) -> None:
    (weights, log), (other_weights, other_log) = one, other
    for name in ("loss", "accuracy", "accepted", "grad_norm", "eval_loss", "eval_tau"):
        assert series(log, name) and series(log, name) == pytest.approx(series(other_log, name), abs=2e-4), name
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, other_weights[name], atol=2e-4, rtol=0, msg=name)


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_the_same_batches(alone, tmp_path):
    check_equal(alone, run(tmp_path, "1", "1", launch=processes(2, "--multi_gpu")))


@pytest.mark.slow
def test_sharded_weights_train_resume_and_decode_without_waiting_for_each_other(alone, tmp_path):
    fsdp = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    layer = ("--fsdp_transformer_layer_cls_to_wrap", "DFlashDecoderLayer")
    state = ("--fsdp_state_dict_type", "SHARDED_STATE_DICT")
    launch = processes(2, *fsdp, *layer, *state)
    check_equal(alone, run(tmp_path / "straight", "1", "1", launch=launch))
    checkpoint = tmp_path / "straight" / "checkpoint-3"
    loaded = DFlashDraftModel.from_pretrained(checkpoint, dtype="auto")
    assert loaded.dtype == torch.float32, "a checkpoint of shards is a drafter, too"
    check_equal(alone, run(tmp_path / "resumed", "1", "1", str(checkpoint), launch=launch))
