"""One instance's latency model as its own steps correct it.

A load report carries sums over finished steps; the difference of two of them is a mean step, which
the linear model must explain (``StepTotals``). Steps that computed a prompt beside decodes count
for prefill with what the decodes cost taken off. The boot fit is the guess; an epoch starts afresh.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.common.cluster import LatencyModel, StepTotals
from isthmus.common.rls import RecursiveFit

BASE_TOKENS = 16.0
"""A prefill step's base, in tokens, where the fit at boot lost it in noise …"""
SEQ_BASES = 0.1
"""… and a sequence of a decode step, in bases: to learn on."""


class LearnedLatency:
    def __init__(self, boot: LatencyModel) -> None:
        self.boot = boot
        self.model = boot
        self._prefill = RecursiveFit.of(
            (boot.prefill_base, boot.prefill_token, boot.prefill_pair),
            (BASE_TOKENS * boot.prefill_token, 0.0, 0.0),
        )
        self._decode = RecursiveFit.of(
            (boot.decode_base, boot.decode_seq, boot.decode_context),
            (0.0, SEQ_BASES * boot.decode_base, 0.0),
        )
        self._large = RecursiveFit.of((boot.large_base, boot.large_seq, boot.large_context))
        self.seen: StepTotals | None = None  # last

    @property
    def num_samples(self) -> int:
        return self._prefill.num_samples + self._decode.num_samples + self._large.num_samples

    def observe(self, totals: StepTotals) -> None:
        """Takes the steps since the last report; the first one is where counting begins."""
        seen, self.seen = self.seen, totals
        if seen is None or totals is seen or totals == seen:
            return
        before = self.num_samples
        num_decodes = totals.decode_steps - seen.decode_steps
        if num_decodes > 0:
            self._take_decode(
                (totals.decode_seqs - seen.decode_seqs) / num_decodes,
                (totals.decode_context - seen.decode_context) / num_decodes,
                (totals.decode_ms - seen.decode_ms) / num_decodes,
            )
        num_prefills = totals.prefill_steps - seen.prefill_steps
        if num_prefills > 0:
            beside_ms = self.model.decode_seq * (totals.beside_seqs - seen.beside_seqs)
            beside_ms += self.model.decode_context * (totals.beside_context - seen.beside_context)
            features = (
                1.0,
                (totals.prefill_tokens - seen.prefill_tokens) / num_prefills,
                (totals.prefill_pairs - seen.prefill_pairs) / num_prefills,
            )
            measured_ms = totals.prefill_ms - seen.prefill_ms - beside_ms
            self._prefill.observe(features, measured_ms / num_prefills)
        if self.num_samples != before:
            self.model = self._current()

    def _take_decode(self, num_seqs: float, context: float, measured_ms: float) -> None:
        is_large = 0 < self.boot.large_batch <= num_seqs
        fit = self._large if is_large else self._decode
        fit.observe((1.0, num_seqs, context), measured_ms)

    def _current(self) -> LatencyModel:
        prefill, decode = self._prefill.coefficients, self._decode.coefficients
        large = self._large.coefficients
        return replace(
            self.boot,
            prefill_base=prefill[0],
            prefill_token=prefill[1],
            prefill_pair=prefill[2],
            decode_base=decode[0],
            decode_seq=decode[1],
            decode_context=decode[2],
            large_base=large[0],
            large_seq=large[1],
            large_context=large[2],
        )
