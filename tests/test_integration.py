"""`attach`, `detach`, `custom_generate`: who decodes when, what is left behind, which pairs are refused."""

import copy
import pickle
import re
import threading

import pytest
import torch
from oracles import (
    ECHO,
    at_positions,
    at_rate,
    counting,
    drafter_for,
    echo_pair,
    hooks_of,
    plain,
    predicted_forwards,
    prompt_of,
    script,
    square_target,
    word_tokenizer,
)
from tiny import tiny_drafter, tiny_target
from transformers import pipeline

import dflash_hf
from dflash_hf.decoding import Decoding
from dflash_hf.proposal import ProposalHead
from dflash_hf.target import Target


OPTIONS = {"max_new_tokens": 17, "do_sample": False}


@pytest.fixture
def ours(monkeypatch):
    """Counts the calls that this library decodes."""
    calls, prefill = [], Decoding.prefill

    def note(self, *args):
        calls.append(self.drafter)
        prefill(self, *args)

    monkeypatch.setattr(Decoding, "prefill", note)
    return calls


def pair(block=4, rate=0.3, **fields):
    """A target, a drafter with a known error rate, a prompt and the text that the target writes."""
    target = square_target()
    ids = prompt_of(5)
    full = plain(target, ids, **OPTIONS)
    drafter = drafter_for(target, block, **fields)
    script(drafter, target, full, at_rate(rate))
    return target, drafter, ids, full


# --------------------------------------------------------------------------------------------------- attach, detach
def test_attach_and_detach_leave_nothing_behind():
    target, drafter, _, _ = pair()
    attributes, hooks = set(vars(target)), hooks_of(target)
    assert dflash_hf.attach(target, drafter) is drafter
    assert set(vars(target)) - attributes == {"generate"}
    assert sum(hooks_of(target).values()) == sum(hooks.values()) + 2
    dflash_hf.detach(target)
    assert set(vars(target)) == attributes
    assert hooks_of(target) == hooks
    dflash_hf.detach(target)


def test_detach_leaves_hooks_of_others():
    target, drafter, ids, _ = pair()
    calls = []
    target.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    dflash_hf.attach(target, drafter)
    dflash_hf.detach(target)
    target(ids)
    assert calls == [1]


def test_attach_twice_hooks_once():
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    hooks = hooks_of(target)
    dflash_hf.attach(target, drafter)
    assert hooks_of(target) == hooks
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()


def test_attached_target_without_assistant_generates_as_before(ours):
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    with counting(target) as calls:
        assert target.generate(ids, **OPTIONS).tolist() == full.tolist()
    assert len(calls) == 17
    assert ours == []


def test_attached_target_decodes_with_its_drafter(ours):
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    with counting(target) as calls:
        assert target.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()
    assert len(calls) == predicted_forwards(5, 17, 4, at_rate(0.3)) < 17
    assert ours == [drafter]


def test_positional_arguments_pass_through(ours):
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    config = copy.deepcopy(target.generation_config)
    config.max_new_tokens = 17
    assert target.generate(ids, config, assistant_model=drafter).tolist() == full.tolist()
    assert target.generate(inputs=ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()
    assert target.generate(input_ids=ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()
    assert len(ours) == 3


def test_another_drafter_than_the_attached_one_is_used(ours):
    target, drafter, ids, full = pair()
    other = drafter_for(target, 8, target_layer_ids=[1, 2], seed=5)
    script(other, target, full)
    dflash_hf.attach(target, drafter)
    hooks = hooks_of(target)
    assert target.generate(ids, assistant_model=other, **OPTIONS).tolist() == full.tolist()
    assert ours == [other]
    assert other.last_statistics.target_forwards == predicted_forwards(5, 17, 8)
    assert drafter.last_statistics is None
    assert hooks_of(target) == hooks


def test_ordinary_assistant_stays_with_transformers(ours):
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    assistant = square_target(num_hidden_layers=1, seed=3)
    with counting(assistant) as calls:
        assert target.generate(ids, assistant_model=assistant, **OPTIONS).tolist() == full.tolist()
    assert len(calls) > 0
    assert ours == []


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 16}], ids=["whole vocabulary", "shortlist"])
def test_native_loop_gives_the_same_text(ours, fields):
    target = square_target()
    drafter = drafter_for(target, 4, **fields)
    native = {"assistant_model": drafter, "speculation_type": "dflash"}
    ids = prompt_of(5)
    expected = plain(target, ids, **OPTIONS).tolist()
    assert target.generate(ids, **native, **OPTIONS).tolist() == expected
    dflash_hf.attach(target, drafter)
    assert target.generate(ids, **native, **OPTIONS).tolist() == expected
    assert ours == []
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == expected
    assert ours == [drafter]


def test_native_loop_needs_as_many_forwards():
    target, drafter = echo_pair(8)
    counts = []
    for options in ({"speculation_type": "dflash"}, {}):
        dflash_hf.attach(target, drafter)
        with counting(target) as calls:
            target.generate(prompt_of(3), assistant_model=drafter, **OPTIONS, **options)
        counts.append(len(calls))
    assert counts == [3, 3]


def test_custom_generate_on_an_attached_target_is_the_callers(ours):
    target, drafter, ids, full = pair()
    dflash_hf.attach(target, drafter)
    called = []

    def method(model, input_ids, **kwargs):
        called.append(input_ids)
        return input_ids

    assert target.generate(ids, assistant_model=drafter, custom_generate=method, **OPTIONS).tolist() == ids.tolist()
    assert len(called) == 1 and ours == []


def test_custom_generate_without_attach_leaves_no_hook(ours):
    target, drafter, ids, full = pair()
    hooks, attributes = hooks_of(target), set(vars(target))
    method = dflash_hf.custom_generate(drafter)
    assert target.generate(ids, custom_generate=method, **OPTIONS).tolist() == full.tolist()
    assert hooks_of(target) == hooks and set(vars(target)) == attributes
    assert ours == [drafter]


def test_attach_by_path_loads_in_the_dtype_of_the_target(tmp_path):
    target, drafter = echo_pair(8)
    target.bfloat16()
    drafter.save_pretrained(tmp_path)
    loaded = dflash_hf.attach(target, tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert not loaded.training
    assert target.generate(prompt_of(3), assistant_model=loaded, **OPTIONS)[0, 3:].tolist() == [ECHO] * 17
    assert loaded.last_statistics.target_forwards == 3


def test_attach_keeps_its_options(ours):
    target, drafter = echo_pair(8)
    dflash_hf.attach(target, drafter, verifier="match", num_assistant_tokens=2)
    target.generate(prompt_of(3), assistant_model=drafter, **OPTIONS)
    assert {record.proposed for record in drafter.last_statistics.rounds[:-1]} == {2}
    with pytest.raises(ValueError, match="block, rejection, match"):
        dflash_hf.attach(target, drafter, verifier="magic")


def test_drafter_comes_out_of_training_mode():
    target, drafter, _, _ = pair()
    drafter.train()
    dflash_hf.attach(target, drafter)
    assert not drafter.training


# --------------------------------------------------------------------------------------------------- not attached
def test_drafter_without_attach_says_to_attach():
    target, drafter, ids, _ = pair()
    with counting(target) as calls, pytest.raises(ValueError, match=r"dflash_hf\.attach\(target, drafter\)"):
        target.generate(ids, assistant_model=drafter, **OPTIONS)
    assert len(calls) <= 1
    dflash_hf.attach(target, drafter)
    dflash_hf.detach(target)
    with pytest.raises(ValueError, match="attach"):
        target.generate(ids, assistant_model=drafter, **OPTIONS)


def test_pipeline_without_attach_says_to_attach():
    target, drafter = echo_pair(8)
    writer = pipeline("text-generation", model=target, tokenizer=word_tokenizer(), assistant_model=drafter)
    with pytest.raises(ValueError, match="attach"):
        writer("<5> <9>", max_new_tokens=6)


# --------------------------------------------------------------------------------------------------------- pipeline
@pytest.mark.parametrize("eos", [None, 2])
def test_pipeline_writes_the_same_text(ours, eos):
    target, drafter = echo_pair(8)
    target.config.eos_token_id = target.generation_config.eos_token_id = eos
    assert drafter.config.eos_token_id is None
    dflash_hf.attach(target, drafter)
    tokenizer = word_tokenizer()
    options = {"do_sample": False, "max_new_tokens": 12}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)("<5> <9>", **options)
    assert ours == []
    writer = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert writer("<5> <9>", **options) == expected
    assert re.findall(r"\d+", expected[0]["generated_text"]) == ["5", "9"] + ["7"] * 12
    assert ours == [drafter]
    assert drafter.last_statistics.target_forwards == 3


def test_pipeline_with_a_batch_size_writes_the_same_texts(ours):
    target, drafter = echo_pair(8)
    dflash_hf.attach(target, drafter)
    tokenizer = word_tokenizer(pad_token="abcdef", padding_side="left")
    options = {"do_sample": False, "max_new_tokens": 12, "batch_size": 3}
    texts = ["<5> <9>", "<4>", "<8> <11> <13> <2>", "<6> <3> <12>"]
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)(texts, **options)
    assert ours == []
    writer = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert writer(texts, **options) == expected
    assert len(ours) == 2, "three texts, then one"


# ------------------------------------------------------------------------------------------------------ wrong pairs
def attach_and_generate(target, drafter):
    """Both ways in check the pair before any forward; the error of the second."""
    with counting(target) as calls:
        with pytest.raises(ValueError) as first:
            dflash_hf.attach(target, drafter)
        with pytest.raises(ValueError) as second:
            target.generate(prompt_of(3), custom_generate=dflash_hf.custom_generate(drafter), max_new_tokens=2)
    assert len(calls) == 0
    assert str(first.value) == str(second.value)
    assert "generate" not in vars(target)
    return str(second.value)


def test_wrong_hidden_size_is_refused_with_both_sizes():
    drafter = tiny_drafter(tiny_target(), hidden_size=48)
    message = attach_and_generate(tiny_target(), drafter)
    assert "hidden_size" in message and "48" in message and "32" in message


@pytest.mark.parametrize("fields", [{"target_layer_ids": [1, 4]}, {"target_layer_ids": [0], "num_target_layers": 6}])
def test_layer_beyond_the_target_is_refused(fields):
    drafter = tiny_drafter(tiny_target(), **{"num_target_layers": None, **fields})
    message = attach_and_generate(tiny_target(), drafter)
    assert "layers" in message and ("taps layer 4" in message or "expects 6, the target has 4" in message)


def test_mask_token_beyond_the_embedding_is_refused():
    drafter = tiny_drafter(tiny_target(), mask_token_id=64)
    assert "mask_token_id: 64" in attach_and_generate(tiny_target(), drafter)


def test_shortlist_beyond_the_embedding_is_refused():
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=2)
    drafter.draft_token_ids.copy_(torch.tensor([3, 64]))
    assert "draft_token_ids" in attach_and_generate(tiny_target(), drafter)


@pytest.mark.parametrize("vocab_size", [72, 60])
def test_vocabulary_size_of_the_drafter_does_not_matter(vocab_size):
    target = square_target()
    ids = prompt_of(5)
    full = plain(target, ids, **OPTIONS)
    drafter = drafter_for(target, 4, vocab_size=vocab_size, mask_token_id=59)
    script(drafter, target, full)
    method = dflash_hf.custom_generate(drafter)
    assert target.generate(ids, custom_generate=method, **OPTIONS).tolist() == full.tolist()
    dflash_hf.attach(target, drafter)
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()
    assert drafter.last_statistics.target_forwards == predicted_forwards(5, 17, 4)


def test_model_that_is_no_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    ).eval()
    with pytest.raises(TypeError, match="decoder"):
        dflash_hf.attach(model, drafter_for(square_target()))


# ------------------------------------------------------------------------------------------------------- shortlist
@pytest.mark.parametrize("sampling", [False, True])
def test_drafter_with_a_shortlist_proposes_listed_tokens_only(monkeypatch, sampling):
    target = square_target()
    drafter = drafter_for(target, 8, draft_vocab_size=16)
    listed = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16]
    drafter.draft_token_ids.copy_(listed)
    proposed, draft = [], Decoding.draft

    def note(self, width):
        proposals, q = draft(self, width)
        proposed.extend(proposals[0].tolist())
        if sampling:
            torch.testing.assert_close(q.sum(-1), torch.ones(1, width))
            assert q[..., [i for i in range(64) if i not in listed.tolist()]].sum() == 0
        return proposals, q

    monkeypatch.setattr(Decoding, "draft", note)
    ids, method = prompt_of(5), dflash_hf.custom_generate(drafter)
    options = {"max_new_tokens": 17, "do_sample": sampling, "top_k": 0}
    text = target.generate(ids, custom_generate=method, **options)
    assert set(proposed) <= set(listed.tolist())
    assert len(set(proposed)) > 3
    if not sampling:
        assert text.tolist() == plain(target, ids, **options).tolist()


def test_shortlist_takes_the_best_listed_token():
    target = square_target()
    target.lm_head.bias = torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(2)))
    whole, short = drafter_for(target, 8), drafter_for(target, 8, draft_vocab_size=16)
    listed = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16]
    short.draft_token_ids.copy_(listed)
    hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1))
    expected = target.lm_head(hidden)[..., listed]
    head = ProposalHead(short, Target(target))
    torch.testing.assert_close(head.logits(hidden), expected)
    assert head.greedy(head.logits(hidden)).tolist() == listed[expected.argmax(-1)].tolist()
    full = ProposalHead(whole, Target(target))
    torch.testing.assert_close(full.logits(hidden), target.lm_head(hidden))


# ------------------------------------------------------------------------------------------------------------ copies
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_an_attached_target_stands_alone(ours, copier):
    target = square_target()
    drafter = dflash_hf.attach(target, drafter_for(target))
    ids = prompt_of(5)
    full = plain(target, ids, **OPTIONS)
    twin = copier(target)
    assert twin.generate.args[0] is twin
    dflash_hf.detach(target)
    assert twin.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == full.tolist()
    assert ours == [drafter]
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert target.generate(ids, **OPTIONS).tolist() == full.tolist()
    assert twin.generate(ids, assistant_model=drafter, **OPTIONS).tolist() != full.tolist()
    dflash_hf.detach(twin)
    assert hooks_of(twin) == hooks_of(target)


def test_drafter_can_be_copied_after_a_call():
    target, drafter = echo_pair(8)
    dflash_hf.attach(target, drafter)
    target.generate(prompt_of(3), assistant_model=drafter, **OPTIONS)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(drafter)))
    target.generate(prompt_of(3), assistant_model=twin, **OPTIONS)
    assert twin.last_statistics.target_forwards == 3


def test_calls_in_threads_do_not_mix():
    target = square_target()
    drafter = dflash_hf.attach(target, drafter_for(target))
    prompts = [prompt_of(n, seed=n) for n in (3, 9, 14)]
    expected = [plain(target, ids, **OPTIONS).tolist() for ids in prompts]
    results = {}

    def work(i):
        results[i] = target.generate(prompts[i], assistant_model=drafter, **OPTIONS).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(3)] == expected


def test_calls_in_threads_on_a_target_that_is_not_attached():
    target, drafter = square_target(), drafter_for(square_target())
    prompts = [prompt_of(n, seed=n) for n in (3, 9, 14)]
    expected = [plain(target, ids, **OPTIONS).tolist() for ids in prompts]
    method, results = dflash_hf.custom_generate(drafter), {}

    def work(i):
        for _ in range(4):
            results.setdefault(i, []).append(target.generate(prompts[i], custom_generate=method, **OPTIONS).tolist())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(3)] == [[text] * 4 for text in expected]
    assert hooks_of(target) == {}


def test_detaching_leaves_calls_that_are_running_alone():
    target, drafter = square_target(), drafter_for(square_target())
    text = plain(target, prompt_of(5), **OPTIONS)
    drafter.norm.register_forward_hook(lambda *_: dflash_hf.detach(target))  # as another thread might
    method = dflash_hf.custom_generate(drafter)
    assert target.generate(prompt_of(5), custom_generate=method, **OPTIONS).tolist() == text.tolist()


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_target_compiled_in_one_graph(dynamo):
    target = square_target(num_hidden_layers=2)
    ids, options = prompt_of(3), {"max_new_tokens": 12, "do_sample": False}
    full = plain(target, ids, **options)
    drafter = drafter_for(target, target_layer_ids=[0, 1])
    script(drafter, target, full, at_positions(6))
    dflash_hf.attach(target, drafter)
    seen = []
    drafter.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True, fullgraph=True)
    assert target.generate(ids, assistant_model=drafter, **options).tolist() == full.tolist()
    assert drafter.last_statistics.target_forwards == predicted_forwards(3, 12, 4, at_positions(6))
    del target.forward
    together = torch.cat(seen, dim=1)
    expected = tapped(target, full, [0, 1])[:, : together.shape[1]]
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)


def tapped(target, ids, layers) -> torch.Tensor:
    """Outputs of the layers, the last one's before the final norm."""
    states = {}
    hooks = [
        target.model.layers[i].register_forward_hook(lambda m, args, output, i=i: states.update({i: output}))
        for i in layers
    ]
    with torch.no_grad():
        target(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([states[i] for i in layers], dim=-1)


def test_compiled_target_that_is_attached_can_be_trained(dynamo):
    target = square_target(num_hidden_layers=1)
    dflash_hf.attach(target, drafter_for(target, target_layer_ids=[0]))
    target(prompt_of(4)).logits.sum().backward()
    expected = target.model.layers[0].mlp.down_proj.weight.grad.clone()
    target.zero_grad()
    torch.compile(target.forward, backend="eager", fullgraph=True)(prompt_of(4)).logits.sum().backward()
    torch.testing.assert_close(target.model.layers[0].mlp.down_proj.weight.grad, expected)
