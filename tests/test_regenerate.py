"""The target's answers are those of plain generate, a row for each turn, in any batch and however often killed."""

import itertools
import json

import pytest
import torch
from oracles import word_tokenizer
from tiny import random_ids, tiny_target

from dflash_hf.training import regenerate as module
from dflash_hf.training.regenerate import Regeneration, regenerate


NEW = 24
END = 2
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<3> {% elif m.role == 'assistant' %}<4> {% else %}<5> {% endif %}"
    "{{ m.content }} <2> {% endfor %}{% if add_generation_prompt %}<4> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(eos_token="<2>", pad_token="abcdef", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def target():
    """Ends its answers at different lengths: the token that does is the one of its greedy texts that spreads best."""
    target = tiny_target(seed=5)
    texts = [
        target.generate(row.unsqueeze(0), max_new_tokens=NEW, do_sample=False)[0, row.numel() :].tolist()
        for row in random_ids(12, 6)
    ]

    def spread(token):
        return len({text.index(token) for text in texts if token in text[2:] and token not in text[:2]})

    with torch.no_grad():
        best = max(range(5, 64), key=spread)
        for weight in {id(w): w for w in (target.lm_head.weight, target.model.embed_tokens.weight)}.values():
            weight[[END, best]] = weight[[best, END]]
    target.generation_config.eos_token_id = END
    return target


@pytest.fixture(autouse=True)
def short_legs(monkeypatch):
    """So that rows drop out of their batch."""
    monkeypatch.setattr(module, "_LEG", 5)


def words(ids) -> str:
    return " ".join(f"<{i}>" for i in ids)


def prompt_file(path, count: int = 9):
    """Prompts of different lengths, each with a field of its own."""
    rows = [
        {"prompt": words(random_ids(3 + 2 * (i % 4), seed=i).tolist()), "source": f"book {i}", "number": i}
        for i in range(count)
    ]
    return write(path, rows)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_turn(path) -> dict:
    rows = read(path)
    turns = {(row["index"], row["turn"]): row for row in rows}
    assert len(turns) == len(rows), "no turn is answered twice"
    return turns


def alone(target, ids: list[int], new: int = NEW) -> list[int]:
    """What plain greedy generate says after `ids`."""
    return target.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()


def settings(**fields) -> Regeneration:
    return Regeneration(**{"max_new_tokens": NEW, "batch_size": 4, **fields})


# ----------------------------------------------------------------------------------------------------------- answers
def test_answers_are_those_of_plain_generate_one_by_one(tmp_path, target, tokenizer):
    prompts, output = prompt_file(tmp_path / "prompts.jsonl"), tmp_path / "out" / "answers.jsonl"
    counts = regenerate(target, tokenizer, prompts, output, settings())
    assert counts["answered"] == 9
    rows = by_turn(output)
    assert set(rows) == {(i, 0) for i in range(9)}
    for i, asked in enumerate(read(prompts)):
        row = rows[i, 0]
        ids = tokenizer(f"<3> {asked['prompt']} <2> <4>").input_ids
        assert row["prompt_ids"] == ids
        assert row["response_ids"] == alone(target, ids)
        assert row["finish"] == ("stop" if row["response_ids"][-1] == END else "length")
        said = [token for token in row["response_ids"] if token not in (0, END)]  # neither padding nor the end
        assert row["messages"] == [
            {"role": "user", "content": asked["prompt"]},
            {"role": "assistant", "content": words(said)},
        ]
        assert (row["source"], row["number"]) == (f"book {i}", i) and "prompt" not in row
    lengths = {len(row["response_ids"]) for row in rows.values() if row["finish"] == "stop"}
    assert len(lengths) >= 3, "answers of different lengths, in different legs"
    assert {row["finish"] for row in rows.values()} == {"stop", "length"}
    assert all(len(row["response_ids"]) == NEW for row in rows.values() if row["finish"] == "length")


def test_rows_that_are_done_leave_their_batch(tmp_path, target, tokenizer, monkeypatch):
    sizes, generate = [], type(target).generate
    monkeypatch.setattr(
        type(target), "generate", lambda self, ids, **kw: (sizes.append(len(ids)), generate(self, ids, **kw))[1]
    )
    prompts, output = prompt_file(tmp_path / "prompts.jsonl"), tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, prompts, output, settings(batch_size=9))
    lengths = [len(row["response_ids"]) for row in read(output)]
    assert sizes == [sum(n > leg for n in lengths) for leg in range(0, max(lengths), 5)]
    assert sizes[0] == 9 > sizes[-1]


def test_a_recurrent_target_answers_in_one_leg(tmp_path, target, tokenizer, monkeypatch):
    prompts, outputs = prompt_file(tmp_path / "prompts.jsonl"), [tmp_path / "a", tmp_path / "b"]
    regenerate(target, tokenizer, prompts, outputs[0], settings())
    monkeypatch.setattr(type(target), "_is_stateful", True)
    monkeypatch.setattr(type(target), "_reorder_cache", None, raising=False)
    calls, generate = [], type(target).generate
    monkeypatch.setattr(
        type(target), "generate", lambda self, ids, **kw: (calls.append(kw), generate(self, ids, **kw))[1]
    )
    regenerate(target, tokenizer, prompts, outputs[1], settings())
    assert len(calls) == 3 and {call["max_new_tokens"] for call in calls} == {NEW}
    assert by_turn(outputs[0]) == by_turn(outputs[1])


def test_turns_are_answered_in_order_given_the_targets_own_earlier_answers(tmp_path, target, tokenizer):
    system = {"role": "system", "content": "<9> <9>"}
    conversation = [
        {"role": "user", "content": "<11> <12>"},
        {"role": "assistant", "content": "<60> <60> <60>"},
        {"role": "user", "content": "<13>"},
        {"role": "assistant", "content": "<61>"},
        {"role": "user", "content": "<14> <15>"},
    ]
    rows = [{"turns": ["<21>", "<22> <23>"]}, {"messages": [system, *conversation], "k": 1}, {"prompt": "<31>"}]
    output = tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, write(tmp_path / "p.jsonl", rows), output, settings(max_new_tokens=6))
    answers = by_turn(output)
    assert set(answers) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)}
    said = [system]
    for turn, message in enumerate(conversation[::2]):
        row = answers[1, turn]
        said.append(message)
        assert row["messages"][:-1] == said and row["k"] == 1
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert row["prompt_ids"] == ids and row["response_ids"] == alone(target, ids, 6)
        said = row["messages"]


def test_progress_counts_turns_and_tokens(tmp_path, target, tokenizer):
    rows = [{"turns": ["<21>", "<22>"]}, {"prompt": "<31>"}, {"prompt": "<32>"}]
    calls, output = [], tmp_path / "answers.jsonl"
    prompts = write(tmp_path / "p.jsonl", rows)
    run = lambda: regenerate(  # noqa: E731
        target, tokenizer, prompts, output, settings(batch_size=2), on_batch=lambda *numbers: calls.append(numbers)
    )
    run()
    assert [(done, total) for done, total, _ in calls] == [(0, 4), (2, 4), (3, 4), (4, 4)]
    assert sum(tokens for *_, tokens in calls) == sum(len(row["response_ids"]) for row in read(output))
    calls.clear()
    assert run()["there already"] == 4
    assert calls == [(4, 4, 0)]


# ------------------------------------------------------------------------------------------------------------ resuming
class Killed(BaseException):
    pass


def kill_after(monkeypatch, batches: int) -> None:
    """The run ends while it works on the batch after so many."""
    answer, calls = module.answer, itertools.count()

    def failing(*args):
        if next(calls) == batches:
            raise Killed
        return answer(*args)

    monkeypatch.setattr(module, "answer", failing)


@pytest.mark.parametrize(("sampled", "cut"), [(False, 0), (False, 1), (False, 400), (True, 40)])
def test_a_killed_run_goes_on_without_losing_or_doubling_a_row(tmp_path, target, tokenizer, monkeypatch, sampled, cut):
    prompts = prompt_file(tmp_path / "prompts.jsonl", 6)
    with open(prompts, "a") as file:
        file.write(json.dumps({"turns": ["<21> é <22>", "<23>"]}) + "\n")
    how = settings(batch_size=2, max_new_tokens=8, do_sample=sampled, seed=3)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, prompts, whole, how)
    assert len(read(whole)) == 8
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        with pytest.raises(Killed):
            regenerate(target, tokenizer, prompts, output, how)
    written = output.read_bytes()
    assert written.count(b"\n") == 4
    output.write_bytes(written[: len(written) - cut])  # what a kill in the middle of the writing leaves
    left = written[: len(written) - cut].count(b"\n")
    counts = regenerate(target, tokenizer, prompts, output, how)
    assert (counts["there already"], counts["answered"]) == (left, 8 - left)
    assert by_turn(output) == by_turn(whole)
    counts = regenerate(target, tokenizer, prompts, output, how)
    assert (counts["there already"], counts["answered"]) == (8, 0)


def test_the_batch_size_may_change_between_runs(tmp_path, target, tokenizer, monkeypatch):
    prompts, output, whole = prompt_file(tmp_path / "p.jsonl"), tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    regenerate(target, tokenizer, prompts, whole, settings())
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            regenerate(target, tokenizer, prompts, output, settings(batch_size=4))
    regenerate(target, tokenizer, prompts, output, settings(batch_size=3))
    assert by_turn(output) == by_turn(whole)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens=8, this run has 9"),
        ({"do_sample": True}, "do_sample=False, this run has True"),
        ({"seed": 1}, "seed=0, this run has 1"),
        ({"shard": (0, 2)}, r"shard=\[0, 1\], this run has \[0, 2\]"),
    ],
)
def test_answers_of_other_settings_are_refused_by_name(tmp_path, target, tokenizer, fields, words):
    prompts, output = prompt_file(tmp_path / "p.jsonl", 2), tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, prompts, output, settings(max_new_tokens=8))
    before = output.read_bytes()
    with pytest.raises(ValueError, match=f"was written with {words}"):
        regenerate(target, tokenizer, prompts, output, settings(**{"max_new_tokens": 8, **fields}))
    assert output.read_bytes() == before


def test_a_thinking_flag_must_be_read_by_the_template_and_stays_in_one_file(tmp_path, target, tokenizer):
    prompts, output = prompt_file(tmp_path / "p.jsonl", 2), tmp_path / "answers.jsonl"
    how = settings(max_new_tokens=4, enable_thinking=False)
    with pytest.raises(ValueError, match="enable_thinking=False, but the chat template does not read"):
        regenerate(target, tokenizer, prompts, output, how)
    assert not output.exists()
    thinks = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<9> {% endif %}"
    other = word_tokenizer(eos_token="<2>", pad_token="abcdef", chat_template=thinks)
    regenerate(target, other, prompts, output, how)
    assert all(row["prompt_ids"][-1] == 9 for row in by_turn(output).values())
    with pytest.raises(ValueError, match="was written with enable_thinking=False, this run has None"):
        regenerate(target, other, prompts, output, settings(max_new_tokens=4))


def test_answers_to_other_prompts_or_by_another_dtype_or_template_are_refused(tmp_path, target, tokenizer):
    prompts, output = prompt_file(tmp_path / "p.jsonl", 2), tmp_path / "answers.jsonl"
    how = settings(max_new_tokens=4)
    regenerate(target, tokenizer, prompts, output, how)
    other = word_tokenizer(eos_token="<2>", pad_token="abcdef", chat_template=TEMPLATE + " ")
    with pytest.raises(ValueError, match="template_sha256"):
        regenerate(target, other, prompts, output, how)
    with pytest.raises(ValueError, match="dtype='float32', this run has 'bfloat16'"):
        regenerate(tiny_target().to(torch.bfloat16), tokenizer, prompts, output, how)
    with open(prompts, "a") as file:
        file.write('{"prompt": "<5>"}\n')
    with pytest.raises(ValueError, match="prompts"):
        regenerate(target, tokenizer, prompts, output, how)
    (tmp_path / "answers.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"answers\.jsonl exists, but answers\.jsonl\.settings\.json"):
        regenerate(target, tokenizer, prompts, output, how)


# -------------------------------------------------------------------------------------------------- what is left out
def test_empty_and_too_long_prompts_are_counted_and_the_others_answered(tmp_path, tokenizer):
    target = tiny_target(max_position_embeddings=20)
    rows = [
        {"prompt": ""},
        {"prompt": "<5> <6>"},
        {"prompt": words(range(5, 30))},
        {"turns": []},
        {"turns": ["<7>", words(range(5, 12)), "<8>"]},
        {"prompt": "  "},
    ]
    output = tmp_path / "answers.jsonl"
    counts = regenerate(target, tokenizer, write(tmp_path / "p.jsonl", rows), output, settings(max_new_tokens=8))
    assert set(by_turn(output)) == {(1, 0), (4, 0)}
    assert counts["empty prompt"] == 3 and counts["answered"] == 2
    assert counts["too long for the target's context"] == 2


def test_a_row_of_another_form_is_named_by_its_line(tmp_path, target, tokenizer):
    path = write(tmp_path / "p.jsonl", [{"prompt": "<5>"}, {"question": "<6>"}])
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: it has none of messages, conversations, turns, prompt"):
        regenerate(target, tokenizer, path, tmp_path / "answers.jsonl", settings())


def test_a_file_without_a_prompt_is_refused(tmp_path, target, tokenizer):
    for i, (rows, words) in enumerate([([], "the file is empty"), ([{"prompt": ""}], "'empty prompt': 1")]):
        path = write(tmp_path / f"p{i}.jsonl", rows)
        with pytest.raises(ValueError, match=rf"p{i}\.jsonl: no prompt to answer.*{words}"):
            regenerate(target, tokenizer, path, tmp_path / "answers.jsonl", settings())
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_malformed_prompt_is_named_by_file_and_line(tmp_path, target, tokenizer):
    for row, words in [
        ('{"prompt": ', "line 3: not JSON"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "line 3: role 'tool'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 3: no user turn"),
    ]:
        path = write(tmp_path / "p.jsonl", [{"prompt": "<5>"}, "", row])
        with pytest.raises(ValueError, match=rf"p\.jsonl, {words}"):
            regenerate(target, tokenizer, path, tmp_path / "answers.jsonl", settings())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens=1: at least 2"),
        ({"batch_size": 0}, "batch_size=0: at least 1"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0: above 0"),
        ({"top_p": 0.0}, "top_p=0.0: above 0"),
        ({"top_k": -1}, "top_k=-1: at least 0"),
        ({"shard": (2, 2)}, r"shard=\(2, 2\)"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        settings(**fields)


# --------------------------------------------------------------------------------------------------- sampling, shards
def test_sampled_answers_are_reproducible_and_the_seed_decides(tmp_path, target, tokenizer):
    prompts = prompt_file(tmp_path / "p.jsonl")
    texts = []
    for i, seed in enumerate((1, 1, 2)):
        torch.manual_seed(i)  # the global generator has no say
        how = settings(do_sample=True, temperature=0.8, top_p=0.9, top_k=20, seed=seed)
        regenerate(target, tokenizer, prompts, tmp_path / f"{i}.jsonl", how)
        texts.append(by_turn(tmp_path / f"{i}.jsonl"))
    assert texts[0] == texts[1] != texts[2]


def test_the_settings_of_the_sampling_reach_the_target_and_replace_its_own(tmp_path, target, tokenizer, monkeypatch):
    monkeypatch.setattr(target.generation_config, "top_k", 3)
    calls, generate = [], type(target).generate
    monkeypatch.setattr(
        type(target), "generate", lambda self, ids, **kw: (calls.append(kw), generate(self, ids, **kw))[1]
    )
    prompts = prompt_file(tmp_path / "p.jsonl", 1)
    how = settings(do_sample=True, temperature=0.5, top_p=0.7, max_new_tokens=4)
    regenerate(target, tokenizer, prompts, tmp_path / "a.jsonl", how)
    options = {name: calls[0][name] for name in ("do_sample", "temperature", "top_p", "top_k")}
    assert options == {"do_sample": True, "temperature": 0.5, "top_p": 0.7, "top_k": 0}


def test_shards_share_the_prompts_and_together_give_the_whole(tmp_path, target, tokenizer):
    prompts = prompt_file(tmp_path / "p.jsonl")
    regenerate(target, tokenizer, prompts, tmp_path / "whole.jsonl", settings())
    parts = []
    for i in range(3):
        regenerate(target, tokenizer, prompts, tmp_path / f"{i}.jsonl", settings(shard=(i, 3)))
        parts.append(by_turn(tmp_path / f"{i}.jsonl"))
        assert {index % 3 for index, _ in parts[-1]} == {i}
    assert sum(map(len, parts)) == 9
    assert parts[0] | parts[1] | parts[2] == by_turn(tmp_path / "whole.jsonl")


def test_answers_are_rows_to_train_on(tmp_path, target, tokenizer):
    from dflash_hf.training import ConversationDataset

    output = tmp_path / "answers.jsonl"
    regenerate(target, tokenizer, prompt_file(tmp_path / "p.jsonl"), output, settings())
    dataset = ConversationDataset(output, tokenizer, 100)
    for line, row in enumerate(read(output)):
        if len(row["response_ids"]) < 2:
            continue
        item = dataset[dataset.lines.index(line + 1)]
        assert item["input_ids"].tolist() == row["prompt_ids"] + row["response_ids"]
        assert item["supervised"].tolist() == [False] * len(row["prompt_ids"]) + [True] * len(row["response_ids"])
