"""Where a drafter starts: copies of the target's last layers train far faster at small budgets than random ones."""

import copy

import torch
from torch import nn

from ..modeling_dflash import DFlashDraftModel
from ..target import Target


@torch.no_grad()
def initialise_from_target(drafter: DFlashDraftModel, target: Target, sample_ids: torch.Tensor) -> None:
    """
    Start `drafter` from its target, in place.

    The layers are copies of the target's last layers and the final norm is the target's. `fc` passes on the last tap,
    with noise of half its size from all taps; since the norms of the taps differ by an order of magnitude, its columns
    are divided by the size of their tap. `hidden_norm` is the mean of the copied layers' input norms.

    Args:
        sample_ids (`torch.Tensor` of shape `(B, S)`, int64): a few rows of text, to measure the taps.

    Raises:
        `ValueError`: when a layer of the target has other tensors or shapes than a layer of the drafter; the message
            names the first one.
    """
    copied = target.layers[-len(drafter.layers) :]
    for layer, source in zip(drafter.layers, copied, strict=True):
        theirs = source.state_dict()
        for name, tensor in layer.state_dict().items():
            found = list(theirs[name].shape) if name in theirs else "missing"
            if found != list(tensor.shape):
                raise ValueError(
                    f"init='target': {name} of the target's layer is {found}, the drafter needs {list(tensor.shape)}. "
                    "Give the drafter the target's geometry (and qk_norm=False if the target has no q_norm), or use "
                    "init='random'."
                )
        extra = sorted(set(theirs) - set(layer.state_dict()))
        if extra:
            raise ValueError(
                f"init='target': the target's layer has {extra[0]}, the drafter has not; use init='random'."
            )
        layer.load_state_dict({name: tensor.to(layer.mlp.up_proj.weight) for name, tensor in theirs.items()})
        _check_same_computation(layer, source)
    drafter.norm.weight.copy_(target.decoder.norm.weight)
    drafter.hidden_norm.weight.copy_(torch.stack([s.input_layernorm.weight.float() for s in copied]).mean(0))

    layer_ids = drafter.config.target_layer_ids
    with target.capture(layer_ids) as taps:
        target.decoder(input_ids=sample_ids.to(target.model.device), use_cache=False)
    size = taps.concatenate(layer_ids).float().unflatten(-1, (len(layer_ids), -1)).pow(2).mean((0, 1, 3)).sqrt()  # [M]
    hidden = drafter.config.hidden_size
    weight = torch.randn(hidden, len(layer_ids), hidden) * 0.5 / (len(layer_ids) * hidden) ** 0.5
    weight[:, -1] += torch.eye(hidden)
    drafter.fc.weight.copy_((weight / size.cpu().view(1, -1, 1)).flatten(1))


def _check_same_computation(layer: nn.Module, source: nn.Module) -> None:
    """Raise `ValueError` when equal tensors mean something else in the target: another activation, a norm of 1 + w."""
    probe = torch.randn(4, layer.mlp.up_proj.in_features, dtype=torch.float32)
    for name in ("input_layernorm", "mlp"):
        ours, theirs = (copy.deepcopy(getattr(each, name)).float().cpu()(probe) for each in (layer, source))
        if not torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max())):
            raise ValueError(
                f"init='target': {name} of the target's layer computes something else from the same weights; use "
                "init='random'."
            )
