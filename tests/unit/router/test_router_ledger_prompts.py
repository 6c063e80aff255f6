"""Which prompts the ledger believes to be there, by what reports speak of."""

from __future__ import annotations

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.router.ledger import Ledger
from isthmus.router.legs import SETTLE_MS
from isthmus.router.reservation import Burden

PREFILL, DECODE = InstanceId("p0"), InstanceId("d0")
PROMPT_MS = 100.0
LATER = 2 * SETTLE_MS


class Bench:
    def __init__(self) -> None:
        self.ledger = Ledger(ttl_ms=600_000)
        self.now_ns = 0

    def reserve(self, name: str, prefill: InstanceId, decode: InstanceId) -> None:
        self.now_ns += NS_PER_MS
        burden = Burden(100, PROMPT_MS, 100, 3)
        self.ledger.reserve(DecisionId(name), prefill, decode, burden, self.now_ns)

    def remote(self, name: str) -> None:
        self.reserve(name, PREFILL, DECODE)

    def local(self, name: str) -> None:
        self.reserve(name, DECODE, DECODE)

    def first_token(self, name: str) -> None:
        self.ledger.first_token(DecisionId(name), self.now_ns)

    def report(
        self,
        num_seqs: int,
        num_prompts: int | None,
        instance: InstanceId = DECODE,
        after_ms: int = LATER,
    ) -> float:
        """Milliseconds of prompts that the ledger then believes in."""
        self.now_ns += after_ms * NS_PER_MS
        self.ledger.seen(instance, num_seqs, self.now_ns, num_prompts)
        self.ledger.check_integrity()
        return self.ledger.pending(instance).prompts_ms


def test_a_decode_leg_whose_end_was_never_told_is_no_prompt_that_is_missing() -> None:
    bench = Bench()
    bench.remote("lost")
    bench.first_token("lost")
    bench.local("alive")
    assert bench.report(num_seqs=1, num_prompts=1) == PROMPT_MS
    # Nor where an instance does not say what its sequences are.
    assert bench.report(num_seqs=1, num_prompts=None) == PROMPT_MS


def test_kv_that_is_long_on_its_way_is_no_prompt_that_is_missing() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.remote(name)
        bench.first_token(name)
    bench.local("alive")
    assert bench.report(num_seqs=1, num_prompts=1) == PROMPT_MS


def test_a_prompt_whose_end_was_never_told_is_not_waited_for() -> None:
    bench = Bench()
    for name in ("decoding", "decoding too"):
        bench.remote(name)
        bench.first_token(name)
    bench.local("lost")
    assert bench.report(num_seqs=2, num_prompts=0) == 0
    bench.local("alive")
    assert bench.report(num_seqs=3, num_prompts=1) == PROMPT_MS
    assert bench.ledger.pending(DECODE).head_since_ns > 0


def test_a_prompt_that_comes_late_counts_from_when_reports_speak_of_it() -> None:
    """It had waited for blocks on its decode instance."""
    bench = Bench()
    bench.remote("late")
    bench.remote("alive")
    assert bench.report(1, 1, PREFILL) == PROMPT_MS
    assert bench.report(2, 2, PREFILL, after_ms=100) == 2 * PROMPT_MS
    bench.first_token("alive")
    assert bench.report(1, 1, PREFILL, after_ms=100) == PROMPT_MS
    bench.first_token("late")
    assert bench.report(0, 0, PREFILL, after_ms=100) == 0


def test_new_prompts_are_no_news_of_one_that_was_forgotten() -> None:
    bench = Bench()
    bench.local("lost")
    assert bench.report(num_seqs=0, num_prompts=0) == 0
    for name in ("first", "second", "third"):
        bench.local(name)
        assert bench.report(num_seqs=1, num_prompts=1, after_ms=SETTLE_MS // 2) == PROMPT_MS
        bench.first_token(name)
        bench.ledger.end(DecisionId(name), bench.now_ns)


def test_a_prompt_that_no_report_can_contain_yet_is_not_missing() -> None:
    bench = Bench()
    bench.local("new")
    assert bench.report(0, 0, after_ms=SETTLE_MS // 2) == PROMPT_MS


def test_a_first_token_of_an_earlier_epoch_is_none_of_the_prompt_that_is_computed_now() -> None:
    bench = Bench()
    bench.remote("old")
    bench.ledger.forget(PREFILL)
    bench.remote("new")
    made_ns = bench.now_ns
    bench.now_ns += NS_PER_MS
    bench.first_token("old")
    assert bench.ledger.pending(PREFILL).head_since_ns == made_ns
    bench.ledger.check_integrity()


def test_a_first_token_is_news_of_the_decode_instance_only_beside_its_report() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.remote(name)
    assert bench.ledger.pending(DECODE).decode_seqs == 2
    bench.ledger.changed.clear()
    bench.first_token("a")  # it was pending, and is
    assert bench.ledger.changed == {PREFILL}
    assert bench.ledger.pending(DECODE).decode_seqs == 2

    bench.report(num_seqs=2, num_prompts=0)
    assert bench.ledger.pending(DECODE).decode_seqs == 1
    bench.ledger.changed.clear()
    bench.first_token("b")  # at the time of the report, which speaks of it
    assert bench.ledger.changed == {PREFILL, DECODE}
    assert bench.ledger.pending(DECODE).decode_seqs == 0
