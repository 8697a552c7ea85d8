"""Wrapped targets, weights elsewhere or in another form, mixed dtypes, drafters that overflow, and what pairs are."""

import accelerate
import pytest
import torch
from oracles import (
    HYBRIDS,
    at_rate,
    counting,
    drafter_for,
    echo_pair,
    never,
    plain,
    predicted_batch_forwards,
    predicted_forwards,
    prompt_of,
    script,
    square_target,
    word_tokenizer,
)
from test_batches import ragged, scripted
from torch import nn

import dflash_hf
from dflash_hf import DFlashDraftModel, drafting, integration, pairing
from dflash_hf.target import Target, device_of


GREEDY = {"max_new_tokens": 20, "do_sample": False}
# Which peft still asks for.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


# ----------------------------------------------------------------------------------------------------------- adapters
@pytest.fixture
def adapted():
    """A target with two adapters that change its text, and the text of the bare target."""
    peft = pytest.importorskip("peft")
    target = square_target()
    bare = plain(target, prompt_of(6), **GREEDY)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(target, config).eval()
    wrapped.add_adapter("other", config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5, generator=generator)
    return wrapped, bare


def without(wrapped, ids: torch.Tensor) -> torch.Tensor:
    return wrapped.generate(input_ids=ids, **GREEDY)


def test_adapters_act_on_text_and_states_alike(adapted):
    wrapped, bare = adapted
    ids, texts = prompt_of(6), [bare]
    drafter = dflash_hf.attach(wrapped, drafter_for(square_target()))
    seen = []
    drafter.fc.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    for adapter in ("default", "other", "default"):
        wrapped.set_adapter(adapter)
        expected = without(wrapped, ids)
        found = wrapped.generate(input_ids=ids, assistant_model=drafter, **GREEDY)
        assert torch.equal(found, expected)
        texts.append(expected)
    assert torch.equal(texts[1], texts[3])
    assert not torch.equal(texts[1], texts[2]) and not torch.equal(texts[1], bare)
    with torch.no_grad():
        states = wrapped(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[1], states[2]], dim=-1)
    prompts = [each for each in seen if each.shape[1] == 6]
    torch.testing.assert_close(prompts[-1], taps)
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.generate(input_ids=ids, assistant_model=drafter, **GREEDY), bare)
    dflash_hf.detach(wrapped)
    assert "generate" not in vars(wrapped.get_base_model())
    assert torch.equal(without(wrapped, ids), texts[1])


def test_a_head_with_an_adapter_is_called_not_copied():
    peft = pytest.importorskip("peft")
    target = square_target()
    wrapped = peft.get_peft_model(
        target, peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    ).eval()
    drafter = drafter_for(target, draft_vocab_size=16)
    expected = without(wrapped, prompt_of(6))
    dflash_hf.attach(wrapped, drafter)
    adapter = Target(wrapped)
    head, hidden = dflash_hf.proposal.ProposalHead(drafter, adapter), torch.randn(1, 2, 64)
    with torch.no_grad():
        assert torch.equal(head.logits(hidden), target.lm_head(hidden)[..., :16])
    assert torch.equal(wrapped.generate(input_ids=prompt_of(6), assistant_model=drafter, **GREEDY), expected)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_add_tokens_are_refused_by_name(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(TypeError, match=kind):
        dflash_hf.attach(peft.get_peft_model(square_target(), config), drafter_for(square_target()))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_add_tokens_are_refused_without_attaching_too(kind):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(square_target(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    method = dflash_hf.custom_generate(drafter_for(square_target()))
    with counting(wrapped.get_base_model()) as calls, pytest.raises(TypeError, match=kind):
        wrapped.generate(input_ids=prompt_of(5), **GREEDY, custom_generate=method)
    assert not calls


def test_rows_with_adapters_of_their_own_are_refused_by_name(adapted):
    wrapped, _ = adapted
    drafter = dflash_hf.attach(wrapped, drafter_for(square_target()))
    ids = prompt_of(6).expand(2, -1)
    with counting(wrapped.get_base_model()) as calls, pytest.raises(ValueError, match="adapter_names"):
        wrapped.generate(input_ids=ids, adapter_names=["default", "other"], assistant_model=drafter, **GREEDY)
    assert not calls
    expected = wrapped.generate(input_ids=ids[:1], adapter_names=["other"], **GREEDY)
    found = wrapped.generate(input_ids=ids[:1], adapter_names=["other"], assistant_model=drafter, **GREEDY)
    assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------- weights in disguise
class Packed(nn.Module):
    """A head or an embedding without any attribute `weight`, as some quantised ones are."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.register_buffer("packed", module.weight.detach().half())
        self.embeds = isinstance(module, nn.Embedding)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = self.packed.float()
        return rows[value] if self.embeds else value @ rows.T


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 20}])
def test_head_and_embedding_need_no_weight(fields):
    target = square_target()
    target.set_input_embeddings(Packed(target.get_input_embeddings()))
    target.set_output_embeddings(Packed(target.get_output_embeddings()))
    expected = plain(target, prompt_of(6), **GREEDY)
    drafter = dflash_hf.attach(target, drafter_for(target, **fields))
    assert torch.equal(target.generate(prompt_of(6), assistant_model=drafter, **GREEDY), expected)
    table = drafter_for(target, input_embeddings="table")
    with pytest.raises(ValueError, match="input_embeddings: 'table', and the target's embedding is quantised"):
        dflash_hf.attach(target, table)


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 20}])
def test_target_of_torchao(fields, rows):
    quantization = pytest.importorskip("torchao.quantization")
    target = square_target()
    quantization.quantize_(target, quantization.Int8WeightOnlyConfig())  # the head too
    inputs = ragged(3, 7)
    expected = plain(target, **inputs, **GREEDY)
    drafter = drafter_for(target, **fields)
    if not fields:
        head = target.get_output_embeddings()
        with torch.no_grad():
            target.dense = head(torch.eye(64)).T
        script_with(drafter, target, expected, inputs, rows)
    found = target.generate(**inputs, **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, expected)
    if not fields:
        assert drafter.last_statistics.target_forwards < 15


def script_with(drafter, target, expected, inputs, rows) -> None:
    """`script` for a head whose matrix is not its weight."""
    dense = nn.Linear(64, 64, bias=False)
    dense.weight = nn.Parameter(target.dense)
    stand_in = square_target()
    stand_in.set_output_embeddings(dense)
    script(drafter, stand_in, expected, at_rate(0.3), offset=(1 - inputs["attention_mask"]).sum(1).tolist(), rows=rows)


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
def test_target_of_bitsandbytes(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    target = square_target()
    for layer in target.model.layers:  # the head stays dense, as transformers has it
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    new = getattr(bitsandbytes.nn, kind)(child.in_features, child.out_features, bias=False)
                    new.load_state_dict({"weight": child.weight.detach()}, strict=False)
                    setattr(parent, name, new.to("cpu"))
    try:
        expected = plain(target, prompt_of(6), **GREEDY)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        pytest.skip(f"bitsandbytes does not run here: {error}")
    drafter = drafter_for(target)
    script(drafter, target, expected, at_rate(0.3))
    found = target.generate(prompt_of(6), **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, expected)


# ---------------------------------------------------------------------------------------------------------- placement
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("whose", ["target", "drafter", "both"])
@pytest.mark.parametrize("family", ["qwen3", *HYBRIDS])
def test_weights_that_are_brought_in_for_each_call(family, whose, where, tmp_path, rows):
    inputs = ragged(3, 7)
    target = square_target(family)
    expected = plain(target, **inputs, **GREEDY)
    drafter = scripted(target, inputs, expected, at_rate(0.3), rows)
    for model, name in ((target, "target"), (drafter, "drafter")):
        if whose in (name, "both"):
            if where == "memory":
                accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            else:
                accelerate.disk_offload(model, tmp_path / name, execution_device=torch.device("cpu"))
            assert {p.device.type for p in model.parameters()} == {"meta"}
    dflash_hf.attach(target, drafter)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **GREEDY), expected)
    predicted = predicted_batch_forwards(7, [27, 27], 4, at_rate(0.3))
    assert drafter.last_statistics.target_forwards == predicted


def test_device_is_where_weights_are_brought_to():
    head = nn.Linear(2, 2)
    assert device_of(head) == torch.device("cpu") and device_of(nn.Identity()) is None
    hook = accelerate.hooks.AlignDevicesHook(execution_device="meta", offload=False)
    accelerate.hooks.add_hook_to_module(head, accelerate.hooks.SequentialHook(accelerate.hooks.ModelHook(), hook))
    assert device_of(nn.Sequential(head)) == torch.device("meta")


def test_rows_of_an_embedding_that_is_not_at_hand_are_refused_by_name():
    target = square_target("gemma2", attention="eager")
    drafter = drafter_for(target, input_embeddings="table")
    dflash_hf.attach(target, drafter)
    accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="input_embeddings: 'table', and the target's embedding is quantised or off"):
        dflash_hf.attach(target, drafter)


def test_target_with_a_device_map(tmp_path):
    expected = plain(square_target(), prompt_of(6), **GREEDY)
    square_target().save_pretrained(tmp_path / "target")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.layers.2": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    target = type(square_target()).from_pretrained(
        tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    target.generation_config.update(eos_token_id=None)
    drafter = drafter_for(square_target())
    drafter.save_pretrained(tmp_path / "drafter")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "drafter", device_map={"": "cpu"})
    script(drafter, square_target(), expected, at_rate(0.3))
    dflash_hf.attach(target, drafter)
    assert torch.equal(target.generate(prompt_of(6), assistant_model=drafter, **GREEDY), expected)
    assert drafter.last_statistics.target_forwards == predicted_forwards(6, 20, 4, at_rate(0.3))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("of_drafter", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_target_and_drafter_of_any_dtypes(of_target, of_drafter, batch):
    target, drafter = echo_pair()  # by a wide margin, so that there are no near-ties
    target.to(of_target), drafter.to(of_drafter)
    prompt = prompt_of(6).expand(batch, -1)
    expected = plain(target, prompt, **GREEDY)
    dflash_hf.attach(target, drafter)
    for options in ({}, {"do_sample": True, "top_k": 1}):
        found = target.generate(prompt, assistant_model=drafter, **{**GREEDY, **options})
        assert torch.equal(found, expected)
        assert drafter.last_statistics.target_forwards == predicted_forwards(6, 20, 4)


# --------------------------------------------------------------------------------------------------------- not finite
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("lengths", [(6,), (3, 6)], ids=str)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}, {"as_dict": True}], ids=str)
def test_draft_that_is_not_finite_ends_the_drafting_with_one_warning(options, lengths, value, rows, monkeypatch):
    target, inputs = square_target(), ragged(*lengths)
    expected = plain(target, **inputs, **GREEDY)
    drafter, warnings = scripted(target, inputs, expected, never, rows), []
    monkeypatch.setattr(drafting.logger, "warning", lambda *args: warnings.append(args[0]))
    # Only after a few rounds, for the whole block of the last row.
    columns = max(lengths)

    def spoiled(module, args, hidden):
        if hidden.shape[1] and len(spoiled.calls) >= 2:
            hidden = hidden.clone()
            hidden[-1] = value
        spoiled.calls.append(1) if hidden.shape[1] else None
        return hidden

    spoiled.calls = []
    drafter.norm.register_forward_hook(spoiled)
    as_dict = options.get("as_dict", False)
    options = {**GREEDY, **{name: v for name, v in options.items() if name != "as_dict"}}
    method = dflash_hf.custom_generate(drafter)
    with counting(target) as calls:
        found = target.generate(**inputs, **options, return_dict_in_generate=as_dict, custom_generate=method)
    assert torch.equal(found.sequences if as_dict else found, expected)
    assert len(warnings) == 1 and "not finite" in warnings[0]
    assert len(spoiled.calls) == 3
    assert {call["input_ids"].shape[1] for call in calls[-3:]} <= {1, columns + 19, columns, 19}
    assert all(record.proposed == 0 for record in drafter.last_statistics.rounds[-len(lengths) :])


def test_first_slot_that_is_not_finite_is_not_forgotten(monkeypatch):
    """Of a draft that is made token by token."""
    target, warnings, forwards = square_target(), [], []
    drafter = drafter_for(target, drafting="autoregressive", sample_from_anchor=True)

    def spoiled(module, args, hidden):
        forwards.append(hidden.shape[1])
        return hidden * float("nan") if forwards.count(1) == 1 and hidden.shape[1] else hidden

    drafter.norm.register_forward_hook(spoiled)
    monkeypatch.setattr(drafting.logger, "warning", lambda *args: warnings.append(args[0]))
    found = target.generate(prompt_of(6), **GREEDY, custom_generate=dflash_hf.custom_generate(drafter))
    assert torch.equal(found, plain(target, prompt_of(6), **GREEDY))
    assert len(warnings) == 1 and forwards.count(1) == 4


@pytest.mark.parametrize("fields", [{}, {"drafting": "autoregressive", "sample_from_anchor": True}], ids=str)
def test_drafter_of_nothing_but_nan(fields, monkeypatch):
    target, warnings = square_target(), []
    drafter = drafter_for(target, **fields)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(float("nan"))
    monkeypatch.setattr(drafting.logger, "warning", lambda *args: warnings.append(args[0]))
    dflash_hf.attach(target, drafter)
    for turn in range(2):
        found = target.generate(prompt_of(6), assistant_model=drafter, **GREEDY)
        assert torch.equal(found, plain(target, prompt_of(6), **GREEDY))
        assert len(warnings) == turn + 1 and drafter.last_statistics.target_forwards <= 20


# -------------------------------------------------------------------------------------------------------------- origin
ORIGIN = {
    "target_name": "org/Big-Model",
    "target_revision": "abc",
    "tokenizer_hash": pairing.tokenizer_hash(word_tokenizer()),
    "template_hash": pairing.json_hash("{{ messages }}"),
}


def named_target(name: str = "org/Big-Model", revision: str | None = "abc"):
    target = square_target()
    target.config._name_or_path, target.config._commit_hash = name, revision
    return target


def tokenizer_with(template: str | None = "{{ messages }}", **special):
    tokenizer = word_tokenizer(**special)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(pairing.logger, "warning", lambda text, *args: messages.append(text % args))
    monkeypatch.setattr(integration.logger, "warning", lambda text, *args: messages.append(text % args))
    return messages


@pytest.mark.parametrize(
    "name",
    [
        "org/Big-Model",
        "/models/big-model",
        "other/Big-Model",
        "/hub/models--org--Big-Model/snapshots/0123",
        "Big-Model",
    ],
)
def test_target_that_the_drafter_was_trained_for(name, warned):
    target = named_target(name)
    dflash_hf.attach(target, drafter_for(target, **ORIGIN), tokenizer=tokenizer_with(), strict=True)
    dflash_hf.attach(target, drafter_for(target), strict=True)  # nothing is known of its training
    assert not warned


@pytest.mark.parametrize(
    ("target", "tokenizer", "field"),
    [
        ({"name": "org/Big-Model-Instruct"}, {}, "target_name: 'org/Big-Model', and the target here is"),
        ({"revision": "def"}, {}, "target_revision: 'abc', and the target's revision here is 'def'"),
        ({}, {"template": None}, "template_hash:"),
        ({}, {"template": "{{ other }}"}, "template_hash:"),
    ],
)
def test_another_origin_warns_and_is_an_error_when_strict(target, tokenizer, field, warned):
    target = named_target(**target)
    drafter, tokenizer = drafter_for(target, **ORIGIN), tokenizer_with(**tokenizer)
    with counting(target) as calls:
        dflash_hf.attach(target, drafter, tokenizer=tokenizer)
        assert len(warned) == 1 and field in warned[0]
        with pytest.raises(ValueError, match=field):
            dflash_hf.attach(target, drafter, tokenizer=tokenizer, strict=True)
    assert not calls


@pytest.mark.parametrize("name", [".", "./", "/"])
def test_folder_without_a_name_is_another_target(name, warned):
    dflash_hf.attach(named_target(name), drafter_for(square_target(), **ORIGIN))
    assert len(warned) == 1 and "target_name" in warned[0]


def test_what_is_not_known_here_is_no_difference_unless_strict(warned):
    target = named_target(revision=None)
    dflash_hf.attach(target, drafter_for(target, **ORIGIN))
    assert not warned
    with pytest.raises(ValueError, match=r"target_revision.*tokenizer_hash.*pass tokenizer=.*template_hash"):
        dflash_hf.attach(target, drafter_for(target, **ORIGIN), strict=True)


def test_another_vocabulary_is_another_tokenizer(warned):
    target, tokenizer = named_target(), tokenizer_with()
    tokenizer.add_tokens(["<new>"])
    dflash_hf.attach(target, drafter_for(target, **ORIGIN), tokenizer=tokenizer)
    assert len(warned) == 1 and "tokenizer_hash" in warned[0] and "template_hash" not in warned[0]


def test_origin_survives_saving(tmp_path):
    drafter = drafter_for(square_target(), **ORIGIN)
    drafter.save_pretrained(tmp_path)
    config = DFlashDraftModel.from_pretrained(tmp_path).config
    assert {field: getattr(config, field) for field in pairing.ORIGIN} == ORIGIN


def test_configuration_that_was_changed_after_loading_is_refused():
    target = square_target()
    drafter = drafter_for(target)
    drafter.config.target_layer_ids = [0]
    with pytest.raises(ValueError, match="target_layer_ids: 1 layers are tapped, and fc fuses 2"):
        dflash_hf.attach(target, drafter)
