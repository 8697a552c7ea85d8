"""Muon beside AdamW is the two by hand, the average is its recurrence, NaN stops, and all of it resumes exactly."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_drafter, tiny_target
from torch import nn
from transformers import Trainer, TrainingArguments

from dflash_hf.training.optimisation import FiniteGuard, WeightAverage, muon_with_adamw


SIZE = 6


class Toy(nn.Module):
    """A projection, two layers with norms and biases, and a buffer of ids: the kinds of tensor that a drafter has."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc = nn.Linear(SIZE, SIZE, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE + 3), nn.Tanh(), nn.Linear(SIZE + 3, SIZE))
            for _ in range(2)
        )
        self.register_buffer("draft_token_ids", torch.tensor([3, 5, 2**40]))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Losses `(B,)` of inputs `(B, SIZE)`."""
        hidden = self.fc(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return (hidden - x.roll(1, dims=-1)).square().mean(-1)


def batch(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def train_by_hand(model: Toy, *optimizers, seeds) -> None:
    for seed in seeds:
        model.zero_grad()
        model(batch(seed)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def make_optimizer(model: nn.Module, lr: float = 1e-2):
    return muon_with_adamw(model, lr, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)


# -------------------------------------------------------------------------------------------------------------- Muon
def test_one_optimizer_equals_the_two_of_torch_run_by_hand():
    model, by_hand = Toy(), Toy()
    parameters = dict(by_hand.named_parameters())
    matrices = [parameters.pop(f"layers.{layer}.{linear}.weight") for layer in (0, 1) for linear in (1, 3)]
    adamw = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}
    fc = parameters.pop("fc.weight")
    train_by_hand(
        by_hand,
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([fc], weight_decay=0.1, **adamw),
        torch.optim.AdamW(parameters.values(), weight_decay=0.0, **adamw),
        seeds=range(5),
    )
    train_by_hand(model, make_optimizer(model), seeds=range(5))
    assert_same_weights(model, by_hand)


def test_every_trainable_parameter_of_a_drafter_is_in_exactly_one_group():
    drafter = tiny_drafter(tiny_target(), attention_bias=True)
    frozen = {"norm.weight", "layers.0.mlp.up_proj.weight"}
    for name in frozen:
        drafter.get_parameter(name).requires_grad_(False)
    names = {parameter: name for name, parameter in drafter.named_parameters()}
    groups = muon_with_adamw(drafter, 1e-3, weight_decay=0.1).param_groups
    found = [[names[p] for p in group["params"]] for group in groups]
    assert sorted(sum(found, [])) == sorted(set(names.values()) - frozen)
    assert all(name.endswith("proj.weight") for name in found[0]) and len(found[0]) == 2 * 7 - 1
    assert found[1] == ["fc.weight"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_frozen_matrices_stay_as_they_are():
    model = Toy()
    model.layers[0].requires_grad_(False)
    before = copy.deepcopy(model)
    train_by_hand(model, make_optimizer(model), seeds=range(2))
    assert_same_weights(model.layers[0], before.layers[0])
    assert not torch.equal(model.layers[1][1].weight, before.layers[1][1].weight)


def test_a_matrix_moves_as_far_as_adamw_would_move_it():
    # What lets one learning rate serve both: the root mean square of an AdamW update is about 0.2 of the rate.
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(64, 256, bias=False)])
    weight = model.layers[0].weight
    before = weight.detach().clone()
    weight.grad = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    muon_with_adamw(model, 1e-3).step()
    moved = (weight.detach() - before).square().mean().sqrt().item()
    assert 0.15e-3 < moved < 0.25e-3


def test_the_schedule_scales_both():
    model, scaled = Toy(), Toy()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if step == 0 else 0.0)
    other = make_optimizer(scaled, 0.5e-2)
    train_by_hand(model, optimizer, seeds=[0])
    train_by_hand(scaled, other, seeds=[0])
    assert_same_weights(model, scaled)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * 3
    before = copy.deepcopy(model)
    train_by_hand(model, optimizer, seeds=[1])
    assert_same_weights(model, before)


def test_a_state_dict_continues_bit_exactly(tmp_path):
    model = Toy()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train_by_hand(model, optimizer, seeds=range(3))
    schedule.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = copy.deepcopy(model)
    other = muon_with_adamw(resumed, 0.3)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert [group["lr"] for group in other.param_groups] == [0.5e-2] * 3
    train_by_hand(model, optimizer, seeds=range(3, 6))
    train_by_hand(resumed, other, seeds=range(3, 6))
    assert_same_weights(model, resumed)
    # A schedule that is made after loading reaches both, too.
    torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.0)
    train_by_hand(resumed, other, seeds=[6])
    assert_same_weights(model, resumed)


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    model, by_hand = Toy(), Toy()
    calls = []

    def closure():
        calls.append(1)
        model.zero_grad()
        loss = model(batch(0)).mean()
        loss.backward()
        return loss

    expected = by_hand(batch(0)).mean()
    assert torch.equal(make_optimizer(model).step(closure), expected) and calls == [1]
    train_by_hand(by_hand, make_optimizer(by_hand), seeds=[0])
    assert_same_weights(model, by_hand)


def test_flattened_layers_are_refused():
    model = Toy()
    for layer in model.layers:
        for module in (layer[1], layer[3]):
            module.weight = nn.Parameter(module.weight.detach().flatten())
    with pytest.raises(ValueError, match="no trainable parameter in `layers` is 2-D: FSDP 1 and DeepSpeed flatten"):
        muon_with_adamw(model, 1e-3)


def train_sharded(rank: int, port: int) -> None:
    """One of two processes: five steps with whole and with sharded weights, the state saved and loaded between."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    whole, sharded = Toy(), Toy()
    optimizer, names = make_optimizer(sharded), {p: name for name, p in sharded.named_parameters()}
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    parameters = dict(sharded.named_parameters())
    for group in optimizer.param_groups:  # as Accelerate does
        group["params"] = [parameters[names[p]] for p in group["params"]]
    train_by_hand(whole, make_optimizer(whole), seeds=range(5))
    train_by_hand(sharded, optimizer, seeds=range(3))
    set_optimizer_state_dict(sharded, optimizer, get_optimizer_state_dict(sharded, optimizer))
    train_by_hand(sharded, optimizer, seeds=range(3, 5))
    before = dict(Toy().named_parameters())
    for name, parameter in whole.named_parameters():
        # Muon orthogonalises in bfloat16; the order of its sums differs.
        error = (parameters[name].full_tensor() - parameter).norm() / (before[name] - parameter).norm()
        assert error < 0.1, f"{name}: {error}"
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_matrices_move_as_whole_ones():
    port = 29500 + os.getpid() % 1000
    torch.multiprocessing.start_processes(train_sharded, args=(port,), nprocs=2, start_method="fork")


# ------------------------------------------------------------------------------------------------ average of weights
def test_the_average_is_its_recurrence():
    model, decay = Toy(), 0.3
    average = WeightAverage(model, decay)
    naive = {name: p.detach().double() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(5):
        train_by_hand(model, optimizer, seeds=[t])
        average.update()
        d = [1 / 10, 2 / 11, 3 / 12, 0.3, 0.3][t]
        naive = {name: d * naive[name] + (1 - d) * p.detach().double() for name, p in model.named_parameters()}
    assert average.averages.keys() == naive.keys()
    for name, expected in naive.items():
        torch.testing.assert_close(average.averages[name].double(), expected, atol=1e-6, rtol=1e-6)


def test_the_average_of_weights_in_half_precision_is_kept_in_float32():
    model = Toy().bfloat16()
    average = WeightAverage(model, 0.999)
    first = model.fc.weight.detach().clone()
    with torch.no_grad():
        model.fc.weight.add_(1.0)
    second = model.fc.weight.detach().clone()
    average.update()
    kept = average.averages["fc.weight"]
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept, 0.1 * first.float() + 0.9 * second.float())
    with average.applied():
        assert torch.equal(model.fc.weight, kept.bfloat16())
    assert torch.equal(model.fc.weight, second)


def test_applied_puts_the_average_in_and_always_takes_it_out():
    model = Toy()
    own = copy.deepcopy(model)
    average = WeightAverage(model, 0.9)
    for tensor in average.averages.values():
        tensor.fill_(0.25)
    with average.applied():
        assert all((p == 0.25).all() for p in model.parameters())
        assert torch.equal(model.draft_token_ids, own.draft_token_ids)
    assert_same_weights(model, own)
    with pytest.raises(KeyboardInterrupt), average.applied():
        raise KeyboardInterrupt
    assert_same_weights(model, own)


def test_a_failure_while_the_average_is_put_in_leaves_the_model_its_own_weights():
    model = Toy()
    own = copy.deepcopy(model)
    average = WeightAverage(model, 0.9)
    average.averages["fc.weight"].fill_(0.25)
    average.averages["layers.1.3.bias"] = torch.zeros(SIZE + 1)
    with pytest.raises(RuntimeError), average.applied():
        raise AssertionError("must not get here")
    assert_same_weights(model, own)


def test_saving_and_loading_the_average_continues_bit_exactly(tmp_path):
    model, decay = Toy(), 0.999
    average = WeightAverage(model, decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(3):
        train_by_hand(model, optimizer, seeds=[t])
        average.update()
    average.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ema.safetensors"]
    assert load_file(tmp_path / "ema.safetensors").keys() == dict(model.named_parameters()).keys()
    other = copy.deepcopy(model)
    resumed = WeightAverage(other, decay)
    resumed.load(tmp_path)
    assert resumed.updates == 3
    for t in range(3, 5):
        train_by_hand(model, optimizer, seeds=[t])
        other.load_state_dict(model.state_dict())
        average.update()
        resumed.update()
    assert all(torch.equal(average.averages[name], tensor) for name, tensor in resumed.averages.items())


def test_a_checkpoint_without_the_average_or_with_another_is_refused(tmp_path):
    average = WeightAverage(Toy(), 0.9)
    with pytest.raises(ValueError, match=r"ema_decay=0.9: .* holds no ema.safetensors"):
        average.load(tmp_path)
    other = Toy()
    other.fc = nn.Linear(SIZE, 2, bias=False)
    WeightAverage(other, 0.9).save(tmp_path)
    with pytest.raises(ValueError, match=r"fc.weight is \[2, 6\], in the model it is \[6, 6\]"):
        average.load(tmp_path)
    del other.fc
    WeightAverage(other, 0.9).save(tmp_path)
    with pytest.raises(ValueError, match=r"fc.weight is missing, in the model it is \[6, 6\]"):
        average.load(tmp_path)
    other = Toy()
    other.head = nn.Linear(SIZE, 2, bias=False)
    WeightAverage(other, 0.9).save(tmp_path)
    with pytest.raises(ValueError, match=r"head.weight is \[2, 6\], in the model it is missing"):
        average.load(tmp_path)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 2.0])
def test_a_decay_that_averages_nothing_is_refused(decay):
    with pytest.raises(ValueError, match=f"ema_decay={decay}"):
        WeightAverage(Toy(), decay)


def test_the_shortlist_of_a_drafter_is_not_averaged():
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=8)
    average = WeightAverage(drafter, 0.9)
    assert average.averages.keys() == dict(drafter.named_parameters()).keys()
    assert "draft_token_ids" in drafter.state_dict()


# ------------------------------------------------------------------------------------------------------ in a Trainer
class ToyTrainer(Trainer):
    """A trainer that uses the three as `DFlashTrainer` does."""

    def __init__(self, folder, rows, *, ema_decay=0.5, lines=range(100), **fields):
        args = TrainingArguments(
            str(folder),
            **{
                "max_steps": 4,
                "save_steps": 2,
                "per_device_train_batch_size": 4,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "cosine",
                "weight_decay": 0.1,
                "use_cpu": True,
                "remove_unused_columns": False,
                "logging_nan_inf_filter": False,
                "logging_steps": 1,
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                "report_to": "none",
                **fields,
            },
        )
        super().__init__(Toy(), args, train_dataset=rows)
        self.average = WeightAverage(self.model, ema_decay)
        self.guard = FiniteGuard(lines)
        self.add_callback(self.average)
        self.add_callback(self.guard)

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            args = self.args
            self.optimizer = muon_with_adamw(
                self.model if model is None else model,
                args.learning_rate,
                weight_decay=args.weight_decay,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses = model(inputs["x"])
        self.guard.watch(losses, inputs["document"])
        return losses.mean()

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.average.save(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.average.load(checkpoint)


def toy_rows(count: int = 12) -> list[dict]:
    return [{"x": x, "document": torch.tensor([i, i, -1])} for i, x in enumerate(batch(7, count))]


def test_a_resumed_run_of_trainer_equals_the_straight_one(tmp_path):
    straight = ToyTrainer(tmp_path / "straight", toy_rows())
    straight.train()
    resumed = ToyTrainer(tmp_path / "resumed", toy_rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert straight.state.global_step == resumed.state.global_step == 4
    assert straight.average.updates == resumed.average.updates == 4
    assert_same_weights(straight.model, resumed.model)
    for name, tensor in straight.average.averages.items():
        assert torch.equal(tensor, resumed.average.averages[name]), name
    assert not torch.equal(straight.average.averages["fc.weight"], straight.model.fc.weight)


def test_trainer_gives_its_learning_rate_to_both(tmp_path):
    # The schedule of Trainer and the optimizer in Accelerate's wrapper, against torch's own by hand.
    trainer = ToyTrainer(tmp_path, toy_rows(4), max_grad_norm=0.0, save_strategy="no", max_steps=3)
    trainer.train()
    by_hand = Toy()
    optimizer = muon_with_adamw(by_hand, 1e-2, weight_decay=0.1)
    rows = torch.stack([row["x"] for row in toy_rows(4)])
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 3)).item())
        by_hand.zero_grad()
        by_hand(rows).mean().backward()
        optimizer.step()
    for a, b in zip(trainer.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)  # the rows come in another order


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_not_finite_stops_with_step_and_line_before_the_step(tmp_path, accumulation):
    rows = toy_rows(8)
    rows[5]["x"] = rows[5]["x"] * float("nan")
    lines = [10 * i + 1 for i in range(8)]
    fields = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    trainer = ToyTrainer(tmp_path, rows, lines=lines, save_strategy="no", max_steps=2, **fields)
    with pytest.raises(FloatingPointError, match=r"the loss is nan on line 51 \(1 of 4 rows") as error:
        trainer.train()
    step = trainer.state.global_step + 1
    assert str(error.value).startswith(f"step {step}: ")
    assert trainer.average.updates == step - 1
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def check(guard: FiniteGuard, *, gradient: float = 1.0, scaler=None, global_step: int = 6) -> None:
    model = Toy()
    model.fc.weight.grad = torch.full_like(model.fc.weight, gradient)
    state, optimizer = SimpleNamespace(global_step=global_step), SimpleNamespace(scaler=scaler)
    guard.on_pre_optimizer_step(None, state, None, model=model, optimizer=optimizer)


def test_all_lines_of_a_packed_row_are_named():
    guard = FiniteGuard([4, 5, 8, 9, 12])
    guard.watch(torch.tensor([1.0, 2.0]), torch.tensor([[0, 0, 0, -1], [3, 3, 3, 3]]))
    guard.watch(torch.tensor([1.0, float("inf")]), torch.tensor([[1, 1, 1, 1], [4, 2, 2, -1]]))
    with pytest.raises(FloatingPointError, match=r"step 7: the loss is inf on lines 8, 12 \(packed into one row\)"):
        check(guard)


def test_each_step_is_checked_for_itself():
    guard = FiniteGuard([4, 5])
    for losses in (torch.tensor([1.0]), torch.tensor([2.0])):
        guard.watch(losses, torch.tensor([[0]]))
        check(guard)
    guard.watch(torch.tensor([float("nan")]), torch.tensor([[1]]))
    with pytest.raises(FloatingPointError, match=r"line 5 \(1 of 1 rows"):
        check(guard)


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_lost(gradient):
    guard = FiniteGuard([4, 5, 8])
    guard.watch(torch.tensor([1.0, 2.0]), torch.tensor([[2, 2], [1, -1]]))
    with pytest.raises(FloatingPointError, match="step 7: the gradient is not finite.* on line 8; line 5"):
        check(guard, gradient=gradient)


def test_a_gradient_scaler_may_skip_steps():
    guard = FiniteGuard([4])
    guard.watch(torch.tensor([1.0]), torch.tensor([[0]]))
    check(guard, gradient=float("inf"), scaler=object())
