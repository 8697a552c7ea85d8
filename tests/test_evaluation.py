"""Comparisons: the numbers are those of the runs, and a difference is found where it is."""

import pytest
import torch
from tiny import tiny_drafter, tiny_target

from dflash_hf import evaluation


@pytest.fixture(scope="module")
def comparison():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    prompts = [torch.tensor([[5, 9, 11, 3]]), torch.tensor([[7, 7, 7]])]
    return evaluation.compare(target, drafter, prompts, name="tiny", max_new_tokens=12)


def test_every_method_writes_the_same_greedy_text(comparison):
    plain = [run.ids for run in comparison.runs["plain"]]
    for method in evaluation.METHODS:
        assert [run.ids for run in comparison.runs[method]] == plain
    assert comparison.differences == []
    assert all(len(ids) == 12 for ids in plain)


def test_forwards_are_counted_from_outside(comparison):
    assert comparison.totals()["target_forwards"]["plain"] == 2 * 12
    together = comparison.rounds()
    assert together.target_forwards == comparison.totals()["target_forwards"]["dflash"]
    assert (together.new_tokens, together.calls, together.texts) == (24, 2, 2)
    assert [run.forwards for run in comparison.runs["dflash"]] == [
        run.statistics.target_forwards for run in comparison.runs["dflash"]
    ]


def test_summary_agrees_with_the_runs(comparison):
    summary = comparison.summary()
    rounds = [record for run in comparison.runs["dflash"] for record in run.statistics.rounds]
    assert summary["prompts"] == summary["identical"] == 2
    assert summary["new_tokens"]["dflash"] == 24
    assert summary["tau"]["dflash"] == pytest.approx(sum(r.committed for r in rounds) / len(rounds), abs=1e-4)
    assert summary["tau"]["plain"] == 1.0
    lookups = sum(run.forwards for run in comparison.runs["prompt lookup"])
    assert summary["tau"]["prompt lookup"] == pytest.approx((24 - 2) / (lookups - 2), abs=1e-4)
    ms = summary["milliseconds"]
    even = (ms["T_draft"] + ms["T_verify"] + ms["T_rest"]) / ms["T_target"]
    assert summary["break_even_tau"] == pytest.approx(even, rel=0.02)
    assert all(value > 0 for value in ms.values())


def test_totals_without_repetitive_answers_leave_those_prompts_out_for_every_method():
    def fake(ids, forwards):
        return evaluation.Run(ids=ids, seconds=2.0, forwards=forwards, step_seconds=[])

    calm, dull = list(range(10)), [1] * 10
    runs = {"plain": [fake(dull, 10), fake(calm, 10)], "dflash": [fake(calm, 3), fake(dull, 7)]}
    found = evaluation.Comparison("set", runs).totals(repetitive=False)
    assert found["prompts"] == 1 and found["new_tokens"] == {"plain": 10, "dflash": 10}
    assert found["target_forwards"] == {"plain": 10, "dflash": 7} and found["tau"]["dflash"] == 1.5
    assert found["tokens_per_second"] == {"plain": 5.0, "dflash": 5.0}
    nothing = evaluation.Comparison("set", {"plain": [fake(dull, 10)]}).totals(repetitive=False)
    assert nothing["prompts"] == 0 and nothing["tau"] == {}


def test_repeated_share_counts_n_grams_seen_before():
    assert evaluation.repeated_share([1, 2, 3, 4, 5]) == 0.0
    assert evaluation.repeated_share([1, 1, 1, 1, 1]) == 0.5
    assert evaluation.repeated_share([1, 2]) == 0.0


def test_first_difference_names_token_and_gap():
    target = tiny_target("llama")
    prompt = torch.tensor([[5, 9, 11]])
    plain = type(target).generate(target, prompt, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    assert evaluation.first_difference(target, prompt, plain, plain) is None

    other = [*plain[:2], (plain[2] + 1) % 60, plain[3]]
    index, gap = evaluation.first_difference(target, prompt, plain, other)
    logits = target(torch.tensor([[5, 9, 11, *plain[:2]]])).logits[0, -1].detach()
    assert index == 2
    assert gap == pytest.approx(float(logits[plain[2]] - logits[other[2]]), abs=1e-5)


def test_a_missing_tail_is_a_difference_beyond_any_tie():
    target = tiny_target("llama")
    index, gap = evaluation.first_difference(target, torch.tensor([[5]]), [3, 4, 5], [3, 4])
    assert index == 2
    assert gap == float("inf")
