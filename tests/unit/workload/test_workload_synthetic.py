"""Made-up workloads: the rate, the burstiness and the lengths are those asked for."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.common.errors import ConfigError
from isthmus.workload import Arrivals, Mix, Share, arrival_times, parse_lengths, synthesise

CONSTANT = parse_lengths("100")


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_asked_mean_and_variation(cv: float) -> None:
    times = arrival_times(Arrivals(rate=5.0, cv=cv), 40_000, np.random.default_rng(1))
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)


@pytest.mark.parametrize(
    ("text", "median", "lowest", "highest"),
    [
        ("128", 128, 128, 128),
        ("64-512", 288, 64, 512),
        ("lognormal:512:0.8", 512, 1, 4000),
        ("exponential:200", 139, 1, 4000),
    ],
)
def test_lengths_are_drawn_as_written(text: str, median: int, lowest: int, highest: int) -> None:
    drawn = parse_lengths(text, limit=4000).draw(20_000, np.random.default_rng(2))
    assert np.median(drawn) == pytest.approx(median, rel=0.05)
    assert drawn.min() >= lowest
    assert drawn.max() <= highest


@pytest.mark.parametrize(
    "text", ["", "0", "9-3", "-4", "normal:3:4", "lognormal:5", "exponential:-1", "a:b"]
)
def test_other_lengths_are_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="lognormal:MEDIAN:SIGMA"):
        parse_lengths(text)


def test_another_rate_changes_nothing_but_the_times() -> None:
    mix = Mix((Share(1.0, parse_lengths("8-99"), parse_lengths("4-9"), num_prefixes=3),))
    slow, fast = (synthesise(mix, Arrivals(rate), 50, seed=7) for rate in (1.0, 4.0))
    assert [call.due_s / 4 for call in slow] == pytest.approx([call.due_s for call in fast])
    assert [call.num_prompt_tokens for call in slow] == [call.num_prompt_tokens for call in fast]
    assert [call.blocks for call in slow] == [call.blocks for call in fast]


def test_shares_come_in_proportion_and_share_no_prefix_with_another() -> None:
    chat = Share(3.0, CONSTANT, CONSTANT, "interactive", "a", num_prefixes=2, prefix_blocks=2)
    jobs = Share(1.0, CONSTANT, CONSTANT, "batch", "b", num_prefixes=2)
    calls = synthesise(Mix((chat, jobs)), Arrivals(1.0), 4000, seed=3)
    of_chat = [call for call in calls if call.slo_class == "interactive"]
    assert len(of_chat) / len(calls) == pytest.approx(0.75, abs=0.03)
    assert {call.tenant for call in of_chat} == {"a"}
    assert len({call.blocks for call in of_chat}) == 2
    blocks = {block for call in of_chat for block in call.blocks}
    assert not blocks & {block for call in calls if call.tenant == "b" for block in call.blocks}
