"""What was measured, as JSON and as a table for people, and which targets it meets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.gpu.limits import CardLimits


@dataclass(frozen=True, slots=True)
class Figure:
    """One piece of work. ``limit_s`` is what the card needs at least; ``others_s`` are libraries
    that do the same, None where one does not run here (``note`` says why)."""

    name: str
    seconds: float
    limit_s: float
    others_s: dict[str, float | None] = field(default_factory=dict)
    note: str = ""

    @property
    def share(self) -> float:
        """Of the limit: 1 = as fast as the card allows."""
        return self.limit_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """``figure``'s share of its limit is to be at least ``share``."""

    figure: str
    share: float
    text: str

    def verdict(self, figures: Sequence[Figure]) -> tuple[bool | None, str]:
        """Whether it is met, None when it was not measured; and a line that says so."""
        found = next((f for f in figures if f.name == self.figure), None)
        if found is None:
            return None, f"not measured: {self.text}"
        is_met = found.share >= self.share
        word = "met" if is_met else "MISSED"
        return is_met, f"{word}: {self.text}: {found.share:.1%} of the limit"


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or wrong, whatever the speed."""

    name: str
    is_passed: bool
    detail: str = ""

    @property
    def verdict(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{'passed' if self.is_passed else 'FAILED'}: {self.name}{detail}"


@dataclass(frozen=True, slots=True)
class Report:
    card: str
    versions: str
    limits: CardLimits
    checks: list[Check]
    figures: list[Figure]
    targets: Sequence[Target]

    @property
    def is_passed(self) -> bool:
        """Every check passed and no target was missed; one that was not measured is missed."""
        verdicts = [target.verdict(self.figures)[0] for target in self.targets]
        return all(check.is_passed for check in self.checks) and all(verdicts)

    def to_json(self) -> str:
        content = asdict(self) | {
            "is_passed": self.is_passed,
            "shares": {figure.name: figure.share for figure in self.figures},
            "targets": [target.verdict(self.figures)[1] for target in self.targets],
        }
        return json.dumps(content, indent=2)

    def to_markdown(self) -> str:
        others = list(dict.fromkeys(name for f in self.figures for name in f.others_s))
        lines = [
            f"# {self.card}",
            "",
            f"{self.versions}; copying {self.limits.bytes_per_s / 1e9:.0f} GB/s, bf16 products "
            f"{self.limits.flops_per_s / 1e12:.0f} TFLOP/s, both measured.",
            "",
            *(f"- {target.verdict(self.figures)[1]}" for target in self.targets),
            *(f"- {check.verdict}" for check in self.checks),
            "",
            f"| work | µs | limit, µs | share |{''.join(f' {name}, µs |' for name in others)} |",
            f"| --- | --- | --- | --- |{' --- |' * len(others)} --- |",
        ]
        for figure in self.figures:
            cells = [
                figure.name,
                _micros(figure.seconds),
                _micros(figure.limit_s),
                f"{figure.share:.0%}",
                *(_micros(figure.others_s.get(name)) for name in others),
                figure.note,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def _micros(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e6:,.1f}"
