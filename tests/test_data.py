"""Rows of tokens say what the target wrote, wherever the conversations come from, and nothing is lost in silence."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dflash_hf.training import ConversationDataset, collate
from dflash_hf.training.data import by_prefixes, by_tags, first_fit_decreasing, positions
from dflash_hf.training.sources import first_turn, read_conversations, read_jsonl, read_prompts


# Marks are set apart from the content, as the end token of a real template is.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# The same text, with tags.
TAGGED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <end>{% endgeneration %} {% else %}{{ m.content }} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
# As Qwen3's: the thoughts of earlier turns are dropped, the last turn has some, if only empty ones, and without
# thinking the empty ones are part of the prompt.
QWEN_LIKE = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' and loop.last %}<think> {{ m.thoughts or '' }} </think> {% endif %}"
    "{{ m.content }} <eos> <pad> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> "
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}{% endif %}"
)
WORDS = "<pad> <bos> <eos> <user> <assistant> <end> a b c d e f g h i j <system> <think> </think>".split()


@pytest.fixture
def tokenizer():
    """Ten words and the marks of a conversation."""
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture
def dataset(tmp_path, tokenizer):
    """Makes the dataset of some rows (objects, or lines as they are)."""

    def make(rows, max_length=100, template=TEMPLATE, **options) -> ConversationDataset:
        tokenizer.chat_template = template
        return ConversationDataset(write_jsonl(tmp_path / "data.jsonl", rows), tokenizer, max_length, **options)

    return make


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def say(*turns):
    """A conversation: user and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


def exact(prompt: int, response: int, first: int = 6):
    """A row with token ids: `prompt` marks, then `response` ids counted from `first`."""
    return {"prompt_ids": [3] * prompt, "response_ids": list(range(first, first + response))}


def words(ids) -> str:
    return " ".join(WORDS[i] for i in ids)


def supervised_words(row) -> str:
    return words(row["input_ids"][row["supervised"]].tolist())


# ------------------------------------------------------------------------------------------------------------ sources
def test_prompts_are_read_in_each_of_their_spellings(tmp_path):
    system = {"role": "system", "content": "s"}
    rows = [
        {"prompt": "a"},
        {"turns": ["a", "z"]},
        {"turns": [], "prompt": "a"},
        say("a", "b", "c"),
        {"messages": [system, *say("a", "b", "c")["messages"]]},
        {"messages": None, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    path = write_jsonl(tmp_path / "p", rows)
    asked = [[m["content"] for m in messages] for messages in read_conversations(path)]
    assert asked == [["a"], ["a", "z"], ["a"], ["a", "c"], ["s", "a", "c"], ["a"]]
    user = [{"role": "user", "content": "a"}]
    assert read_prompts(path) == [user, user, user, user, [system, *user], user]
    assert first_turn(read_conversations(path)[1]) == user


def test_sharegpt_speakers_become_roles(tmp_path):
    speakers = ["system", "human", "gpt", "user", "assistant", "human"]
    path = write_jsonl(tmp_path / "p", [{"conversations": [{"from": s, "value": s} for s in speakers]}])
    assert read_conversations(path) == [
        [
            {"role": "system", "content": "system"},
            {"role": "user", "content": "human"},
            {"role": "user", "content": "user"},
            {"role": "user", "content": "human"},
        ]
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, "no conversation; `messages`, `conversations`"),
        ({"turns": []}, "no conversation"),
        ({"messages": 5}, "no conversation"),
        ({"prompt": 5}, "a message is int; a text"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": None}]}, "the content of a user message is NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the content of a user message is list"),
        ({"turns": "abc"}, "`turns` is str; a list of texts was expected"),
        ({"turns": [3]}, "a message is int; a text was expected"),
        ({"messages": ["a"]}, "a message needs `role` and `content`"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "a message is from 'bing'; one of human, user"),
        ({"conversations": [{"from": "human", "value": None}]}, "a message is NoneType; a text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, "role 'tool'"),
    ],
)
def test_a_prompt_row_that_is_not_understood_is_named_by_its_line(tmp_path, row, reason):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ValueError, match=f"p.jsonl, line 2: {reason}"):
        read_conversations(path)


def test_malformed_json_is_named_by_its_line(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, "", '{"prompt" "b"}', '{"prompt": "b}'])
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: not JSON \(Expecting ':' delimiter at column 11\)"):
        list(read_jsonl(path))
    with pytest.raises(ValueError, match=r"line 1: not JSON \([^)]*[^t] at column"):
        list(read_jsonl(write_jsonl(path, ['{"prompt": "b}'])))


def test_a_name_that_is_no_file_is_a_dataset_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"prompt": "a"}, {"text": "b"}] if split == "bad" else [{"prompt": "a"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_prompts("me/prompts.v1") == [[{"role": "user", "content": "a"}]]
    read_prompts("me/prompts:test_sft")
    with pytest.raises(ValueError, match="^me/prompts:bad, line 2: no conversation"):
        read_prompts("me/prompts:bad")
    assert asked == [("me/prompts.v1", "train"), ("me/prompts", "test_sft"), ("me/prompts", "bad")]
    for missing in ("data/prompts.jsonl", "./prompts", "prompts", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="No such file"):
            read_prompts(missing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    write_jsonl(tmp_path / "me" / "prompts", [{"prompt": "here"}])
    assert read_prompts("me/prompts")[0][0]["content"] == "here"
    assert len(asked) == 3


def test_a_dataset_that_cannot_be_loaded_is_one_line_of_why(monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("Couldn't reach 'me/prompts' on the Hub\nand much more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(OSError, match="^me/prompts is no file here, .* not loaded: Couldn't reach [^\n]*Hub$"):
        read_prompts("me/prompts")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"`datasets` is needed: pip install 'dflash_hf\[train\]'"):
        read_prompts("me/prompts")


# -------------------------------------------------------------------------------------------------- what is supervised
def test_rows_with_token_ids_are_taken_as_they_are(dataset):
    item = dataset([{**say("a", "b"), "prompt_ids": [3, 9, 5], "response_ids": [7, 8, 9]}])[0]
    assert {name: tensor.tolist() for name, tensor in item.items()} == {
        "input_ids": [3, 9, 5, 7, 8, 9],
        "document": [0] * 6,
        "supervised": [False, False, False, True, True, True],
    }
    assert [tensor.dtype for tensor in item.values()] == [torch.int64, torch.int64, torch.bool]


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_the_target_is_held_to_every_assistant_turn_and_its_end(dataset, template):
    data = dataset([say("a b", "c d"), say("a", "b c", "d e", "f"), say("a", "b", "c")], template=template)
    assert [supervised_words(row) for row in data] == ["c d <end>", "b c <end> f <end>", "b <end>"]
    assert words(data[1]["input_ids"]) == "<user> a <end> <assistant> b c <end> <user> d e <end> <assistant> f <end>"
    assert data.num_supervised == 10


def test_generation_tags_say_the_same_as_the_renderings_of_prefixes(tokenizer):
    tokenizer.chat_template = TAGGED
    for turns in (["a", "b c"], ["a b", "c", "d", "e f g"], ["a", "b c", "d", "e", "f", "g h i"]):
        messages = [{"role": "system", "content": "j"}, *say(*turns)["messages"]]
        assert by_tags(messages, tokenizer) == by_prefixes(messages, tokenizer)


def test_generation_tags_are_used_when_the_template_has_them(dataset):
    inner = TAGGED.replace("<end>{% endgeneration %}", "{%- endgeneration %} <end>")
    for tag in ("{% generation %}", "{%generation -%} "):
        row = dataset([say("a", "b c")], template=inner.replace("{% generation %}", tag))[0]
        assert supervised_words(row) == "b c"


def test_generation_tags_that_enclose_nothing_are_an_error(dataset):
    empty = TAGGED.replace("{{ m.content }} <end>{% endgeneration %}", "{% endgeneration %}")
    with pytest.raises(ValueError, match=r"line 1: the chat template has `{% generation %}` tags, .* no token"):
        dataset([say("a", "b c")], template=empty)


def test_sharegpt_rows_are_training_rows_too(dataset):
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c"}]}, say("a", "b c")]
    data = dataset(rows)
    assert data.texts[0] == data.texts[1]


def test_what_the_template_adds_after_the_end_token_carries_no_loss(dataset):
    row = dataset([say("a", "b c")], template="{% for m in messages %}{{ m['content'] }} <eos> <pad> {% endfor %}")[0]
    assert supervised_words(row) == "b c <eos>"
    assert words(row["input_ids"]).endswith("<eos> <pad>")


def test_without_tags_the_thinking_flag_decides_whose_the_empty_thoughts_are(dataset):
    rows = [say("a", "b c")]
    data = dataset(rows, template=QWEN_LIKE)
    assert supervised_words(data[0]) == "<think> </think> b c <eos>"
    data = dataset(rows, template=QWEN_LIKE, chat_template_kwargs={"enable_thinking": False})
    assert supervised_words(data[0]) == "b c <eos>"
    assert data.chat_template_kwargs == {"enable_thinking": False}
    greeting = "{% if polite %}j {% endif %}" + TEMPLATE
    data = dataset(rows, template=greeting, chat_template_kwargs={"polite": True})
    assert words(data.texts[0]) == "j <user> a <end> <assistant> b c <end>"


def test_the_thinking_flag_reaches_a_template_with_tags(dataset):
    template = TAGGED.replace("{% generation %}", "{% generation %}{% if thinking %}<think> {% endif %}")
    assert supervised_words(dataset([say("a", "b c")], template=template)[0]) == "b c <end>"
    data = dataset([say("a", "b c")], template=template, chat_template_kwargs={"thinking": True})
    assert supervised_words(data[0]) == "<think> b c <end>"


def test_a_flag_that_the_template_does_not_read_is_refused(dataset):
    for template in (TEMPLATE, QWEN_LIKE.replace("enable_thinking", "enable_thinking_mode")):
        with pytest.raises(ValueError, match="enable_thinking=False, but the chat template does not read"):
            dataset([say("a", "b c")], template=template, chat_template_kwargs={"enable_thinking": False})


def test_a_template_that_drops_the_thoughts_of_earlier_turns_gives_each_turn_as_the_target_saw_it(dataset):
    row = say("a", "b c", "d", "e", "f", "g")
    for message, thoughts in zip(row["messages"][1::2], "hij", strict=True):
        message["thoughts"] = thoughts
    data = dataset([say("a", "b"), row, say("c", "d")], template=QWEN_LIKE)
    assert data.lines == [1, 2, 2, 2, 3] and data.num_split == 1
    assert [supervised_words(item) for item in data][1:4] == [
        "<think> h </think> b c <eos>",
        "<think> i </think> e <eos>",
        "<think> j </think> g <eos>",
    ]
    assert words(data.texts[2]) == (
        "<user> a <eos> <pad> <assistant> b c <eos> <pad> <user> d <eos> <pad> "
        "<assistant> <think> i </think> e <eos> <pad>"
    )
    assert "1 conversations whose earlier turns" in data.report()


def test_a_template_whose_prompt_is_no_prefix_is_refused(dataset):
    template = "{% for m in messages %}{{ 'a' if loop.length == 1 else 'b' }} {{ m.content }} {% endfor %}"
    with pytest.raises(ValueError, match="line 1: .*as a prefix of its continuation.*`prompt_ids`"):
        dataset([say("a", "b c")], template=template)


# --------------------------------------------------------------------------------------------------- refused, left out
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "a JSON object was expected, not list"),
        ({}, "no conversation"),
        ({"messages": []}, "no conversation"),
        ({"messages": [{"role": "assistant"}]}, "a message needs"),
        (say("a"), "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a b"}]}, "the conversation begins with the assistant"),
        ({"prompt_ids": 3, "response_ids": [1]}, "`prompt_ids` and `response_ids` must both be lists"),
        ({"prompt_ids": [3], **say("a", "b c")}, "`prompt_ids` and `response_ids` must both be lists"),
        ({"prompt_ids": [3], "response_ids": [1.5]}, "`prompt_ids` and `response_ids` must both be lists"),
        ({"prompt_ids": [3], "response_ids": [True]}, "`prompt_ids` and `response_ids` must both be lists"),
        ({"prompt_ids": [-1], "response_ids": [5, 6]}, "token id -1 is not among 0 to 2147483647. Another tokenizer"),
        ({"prompt_ids": [1], "response_ids": [5, 2**31]}, "token id 2147483648 is not among"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(dataset, bad, reason):
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: {reason}") as error:
        dataset([say("a", "b c"), "", bad])
    assert "\n" not in str(error.value)


def test_an_error_of_the_template_is_named_by_its_line(dataset):
    for template in ("{{ raise_exception('no roles') }}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(ValueError, match="data.jsonl, line 1: "):
            dataset([say("a", "b c")], template=template)


@pytest.mark.parametrize("row", [exact(1, 4, first=13), say("a", "b </think>")])
def test_tokens_beyond_the_vocabulary_of_the_target_are_refused(dataset, row):
    beyond = 16 if "prompt_ids" in row else 18
    rows = [exact(1, 4), row]
    with pytest.raises(
        ValueError, match=f"line 2: token id {beyond} is not among 0 to 15, the vocabulary of 16 tokens"
    ):
        dataset(rows, vocab_size=16)
    assert len(dataset(rows, vocab_size=beyond + 1)) == 2


def test_what_cannot_be_trained_on_is_skipped_and_counted_by_its_reason(dataset):
    rows = [
        exact(1, 1),
        "",
        exact(1, 2),
        {"prompt_ids": [3], "response_ids": []},
        say("a", "  "),
        {"messages": [*say("a")["messages"], {"role": "assistant", "content": None}]},
        say("a", "", "b", "c"),
        exact(10, 2),
        exact(9, 2),
        exact(9, 5),
        say("a b c d e f g h", "i"),
    ]
    data = dataset(rows, max_length=11)
    assert data.lines == [3, 7, 9, 10]
    assert data.skipped == {
        "empty assistant text": 3,
        "truncated away": 2,
        "fewer than 2 tokens of the target": 1,
    }
    assert data.num_cut == 1
    assert "skipped:    3 empty assistant text, 2 truncated away, 1 fewer than 2 tokens of the target" in data.report()


def test_a_turn_that_only_calls_a_tool_says_something(dataset):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "b c"}]}
    row = {"messages": [*say("a")["messages"], call]}
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    assert supervised_words(dataset([row], template=template)[0]) == "b c <end>"


def test_two_tokens_apart_are_no_anchor_and_a_token_to_predict(dataset):
    template = (
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %} <end> {% endfor %}"
    )
    data = dataset([say("a", "b", "c", "d"), say("a", "b c d", "e", "f")], template=template)
    assert data.lines == [2] and data.skipped == {"fewer than 2 tokens of the target": 1}
    assert data.num_supervised == 4
    data = dataset([say("a", "b c"), say("a", "b c d")], template=template, min_supervised=3)
    assert data.lines == [2] and data.skipped == {"fewer than 3 tokens of the target": 1}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the file is empty"),
        ([""], "the file is empty"),
        ([say("a", "")], "'empty assistant text': 1"),
        ([exact(1, 1), exact(2, 1)], "'fewer than 2 tokens of the target': 2"),
        ([exact(100, 3)], "'truncated away': 1.*max_length=100"),
    ],
)
def test_a_file_without_a_row_to_train_on_is_refused(dataset, rows, words):
    with pytest.raises(ValueError, match=f"no row to train on.*{words}.*block_size"):
        dataset(rows)


def test_a_file_in_which_nothing_is_the_targets_is_refused(dataset):
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="no token of any row is marked.*chat template writes nothing.*prompt_ids"):
        dataset([say("a", "b c"), say("a", "")], template=template)


def test_a_file_in_which_everything_is_the_targets_is_refused(dataset):
    template = "{% generation %}{% for m in messages %}{{ m.content }} {% endfor %}{% endgeneration %}"
    with pytest.raises(ValueError, match="every token of every row is marked.*on the prompts too.*prompt_ids"):
        dataset([say("a", "b c")], template=template)
    with pytest.raises(ValueError, match="every token of every row"):
        dataset([exact(0, 3), exact(0, 4)])
    assert len(dataset([exact(0, 3), exact(1, 4)])) == 2


@pytest.mark.parametrize(("min_supervised", "max_length"), [(1, 9), (2, 1), (5, 4)])
def test_lengths_that_leave_no_room_for_a_block_are_refused(dataset, min_supervised, max_length):
    with pytest.raises(ValueError, match=f"min_supervised={min_supervised}, max_length={max_length}: "):
        dataset([exact(1, 4)], max_length=max_length, min_supervised=min_supervised)


@pytest.mark.parametrize("pack", [False, True])
def test_a_long_row_is_cut_at_the_end_and_counted(dataset, pack):
    data = dataset([exact(2, 4), exact(1, 9_000, first=0), exact(2, 2)], max_length=4, pack=pack)
    assert data.texts[0] == [3, 3, 6, 7] and data.texts[1] == [3, 0, 1, 2]
    assert data.num_cut == 2 and "cut:        2 documents at 4 tokens" in data.report()
    assert len(data) == 3 and data[1]["supervised"].tolist() == [False, True, True, True]


def test_the_report_counts_rows_tokens_and_the_share_of_the_target(dataset):
    rows = [exact(6, 2), exact(2, 2), exact(2, 2), exact(1, 1)]
    report = dataset(rows, max_length=8).report().splitlines()
    assert report[0].endswith("data.jsonl")
    assert report[1:5] == [
        "  documents:  3",
        "  rows:       3",
        "  tokens:     16",
        "  supervised: 6 (37.5%), by the target",
    ]
    assert report[-1] == "  skipped:    1 fewer than 2 tokens of the target"
    packed = dataset(rows, max_length=10, pack=True).report()
    assert "  rows:       2, packed to at most 10 tokens (80.0% full)" in packed
    assert dataset(rows[:3]).report().endswith("skipped:    none")


# ------------------------------------------------------------------------------------------------------------- packing
def test_packed_rows_hold_every_text_whole_once_and_apart(dataset):
    rows = [exact(p, r, first=first) for first, (p, r) in enumerate([(1, 3), (4, 5), (2, 2), (1, 9), (3, 4), (1, 2)])]
    plain, data = dataset(rows, max_length=12), dataset(rows, max_length=12, pack=True)
    assert len(data) < len(plain) == 6
    assert list(data.texts) == list(plain.texts) and data.lengths == [4, 9, 4, 10, 7, 3]
    assert data.lengths == [len(text) for text in data.texts]
    found = []
    for item in data:
        assert len(item["input_ids"]) <= 12
        inside = item["document"].unique_consecutive().tolist()
        assert inside == sorted(set(inside))
        for document in inside:
            here = item["document"] == document
            assert item["input_ids"][here].tolist() == data.texts[document]
            assert torch.equal(item["supervised"][here], plain[document]["supervised"])
        found += inside
    assert sorted(found) == list(range(6))
    assert data.num_tokens == sum(data.lengths) == plain.num_tokens
    assert data.num_supervised == sum(int(item["supervised"].sum()) for item in data) == 25


def naive_first_fit_decreasing(lengths, capacity):
    rows = []
    for text in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[text] <= capacity:
                row.append(text)
                break
        else:
            rows.append([text])
    return sorted(sorted(row) for row in rows)


@pytest.mark.parametrize("seed", range(8))
def test_texts_are_packed_first_fit_from_the_longest(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, (5, 13, 41)[seed % 3], (60 if seed else 1,), generator=generator).tolist()
    assert first_fit_decreasing(lengths, 40) == naive_first_fit_decreasing(lengths, 40)


def test_texts_index_like_a_list(dataset):
    texts = dataset([exact(1, 2), exact(1, 3)]).texts
    assert len(texts) == 2 and texts[-1] == [3, 6, 7, 8]
    with pytest.raises(IndexError):
        texts[2]


# ------------------------------------------------------------------------------------------------------------- batches
def test_collate_pads_on_the_right_and_says_where():
    rows = [
        {"input_ids": [5, 6, 7], "document": [4, 4, 4], "supervised": [False, True, True]},
        {
            "input_ids": torch.tensor([8, 9]),
            "document": torch.tensor([0, 2]),
            "supervised": torch.tensor([True, False]),
        },
    ]
    batch = collate(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 9, 0]],
        "document": [[4, 4, 4], [0, 2, -1]],
        "supervised": [[False, True, True], [True, False, False]],
    }
    assert [tensor.dtype for tensor in batch.values()] == [torch.int64, torch.int64, torch.bool]


def test_rows_of_the_dataset_make_a_batch(dataset):
    data = dataset([exact(1, 2), exact(2, 3)])
    batch = collate([data[1], data[0]])
    assert batch["document"].tolist() == [[1] * 5, [0, 0, 0, -1, -1]]
    assert batch["input_ids"][1].tolist() == [*data.texts[0], 0, 0]


def naive_positions(documents):
    found = []
    for row in documents:
        found.append([])
        for i, document in enumerate(row):
            found[-1].append(found[-1][-1] + 1 if i and row[i - 1] == document else 0)
    return found


def test_positions_count_from_the_start_of_each_document():
    documents = torch.tensor([[3, 3, 3, 0, 0, 7, -1, -1], [5] * 8, [2, 4, 4, 4, 4, 4, 4, -1], [-1] * 8])
    assert positions(documents).tolist() == naive_positions(documents.tolist())
    assert positions(documents)[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert positions(documents).dtype == torch.int64
    long = torch.arange(50).repeat_interleave(torch.randint(0, 9, (50,))).view(1, -1)
    assert positions(long).tolist() == naive_positions(long.tolist())


# ----------------------------------------------------------------------------------------------------------- shortlist
def test_the_shortlist_holds_the_most_frequent_words_of_the_target(dataset):
    data = dataset([{"prompt_ids": [3, 3, 3, 3], "response_ids": [9, 9, 9, 7, 7, 4]}])
    assert data.most_frequent(1, 64) == [9]
    assert data.most_frequent(2, 64) == [7, 9]
    assert data.most_frequent(5, 64) == [0, 1, 4, 7, 9]
    assert data.most_frequent(13, 64) == list(range(13))
