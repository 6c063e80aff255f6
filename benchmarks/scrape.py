"""What a gateway's /metrics say, as numbers by series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Values by the name of a sample and its labels, sorted."""

    values: Mapping[tuple[str, Labels], float]

    @classmethod
    def parsed(cls, text: str) -> Scrape:
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.values.get((name, tuple(sorted(labels.items()))))

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """Of the series of one name that have just one label: by its value."""
        return {
            labels[0][1]: value
            for (found, labels), value in self.values.items()
            if found == name and len(labels) == 1 and labels[0][0] == label
        }


async def scrape(url: str) -> Scrape:
    """Raises httpx.HTTPError."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        answer = await client.get(f"{url}/metrics")
        answer.raise_for_status()
        return Scrape.parsed(answer.text)


def mean_stages(before: Scrape, after: Scrape) -> dict[str, float]:
    """Mean of each of ``isthmus_stage_seconds`` between two looks, in milliseconds."""
    sums = [look.labelled("isthmus_stage_seconds_sum", "stage") for look in (before, after)]
    counts = [look.labelled("isthmus_stage_seconds_count", "stage") for look in (before, after)]
    means = {}
    for stage, count in counts[1].items():
        number = count - counts[0].get(stage, 0.0)
        if number:
            means[stage] = (sums[1][stage] - sums[0].get(stage, 0.0)) / number * 1e3
    return means
