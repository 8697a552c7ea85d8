"""Each line of the table of options: identical to plain decoding in the predicted number of forwards, or refused."""

import pytest
from option_table import FAMILIES, OPTIONS, RATES, REFUSED, check, refusal


# All pairs are in the slow run, and in the table itself.
FAST = [("qwen3", 1), ("mistral", 4)]
PAIRS = [
    pytest.param(family, batch, marks=() if (family, batch) in FAST else pytest.mark.slow)
    for family in FAMILIES
    for batch in (1, 4)
]
SLOW = [pytest.param(rate, marks=() if rate == "70 %" else pytest.mark.slow) for rate in RATES]


@pytest.mark.parametrize("rate", SLOW)
@pytest.mark.parametrize(("family", "batch"), PAIRS)
@pytest.mark.parametrize("name", OPTIONS)
def test_option_gives_what_it_gives_without_the_drafter(name, family, batch, rate, rows):
    check(name, family, batch, rate, rows)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_option_that_is_not_honoured_is_refused_by_name(name, batch):
    refusal(name, batch)
