"""Prompts of a wanted length, as token ids or as words, that begin alike exactly when told so.

Nothing is stored: a block's content is a function of its id and of the run's seed, so a million
calls cost no memory and two runs with one seed send the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.common.errors import ConfigError
from isthmus.workload import Call

# Common short words: about one token each in the tokenizers of today.
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "kid",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
]
_LOWEST_ID = 100  # ids below are special tokens and bytes in most vocabularies


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """``vocab`` > 0 makes lists of token ids below it; 0 makes text of about as many tokens.

    ``block_tokens``: what one id of ``Call.blocks`` stands for. Another ``run`` makes others,
    so that what a server has cached of one run is of no use in the next. Raises ConfigError for a
    vocabulary of special tokens alone."""

    seed: int
    vocab: int = 0
    block_tokens: int = 512
    run: int = 0

    def __post_init__(self) -> None:
        if 0 < self.vocab <= _LOWEST_ID:
            raise ConfigError(
                f"a vocabulary of {self.vocab}: only ids from {_LOWEST_ID} on are sent",
                stage="workload",
            )

    def prompt(self, call: Call) -> list[int] | str:
        items: list[int] = []
        for block in call.blocks:
            items += self._run(f"block {block}", self.block_tokens)
        missing = call.num_prompt_tokens - len(items)
        items += self._run(f"call {call.index}", max(0, missing))
        items = items[: call.num_prompt_tokens]
        return items if self.vocab else " ".join(_words(items))

    def _run(self, name: str, size: int) -> list[int]:
        source = random.Random(f"{self.seed}{f' run {self.run}' if self.run else ''} {name}")
        lowest, highest = (_LOWEST_ID, self.vocab - 1) if self.vocab else (0, len(_WORDS) - 1)
        return [source.randint(lowest, highest) for _ in range(size)]


def _words(indices: Sequence[int]) -> list[str]:
    return [_WORDS[index] for index in indices]
