"""The batch ops of sampling against the engine's sampler, which takes one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.types import SamplingParams
from isthmus.engine.sampler import describe_token
from isthmus.kernels import reference
from isthmus.kernels.tolerances import assert_close
from isthmus.kernels.types import Penalties, SamplingRows
from tests.support.sampling_rows import SamplingCase, sampling_cases


@settings(max_examples=150, deadline=None)
@given(case=sampling_cases(most_tokens=600))
def test_draws_are_those_of_the_engines_sampler(case: SamplingCase) -> None:
    ids, is_usable = reference.draw_tokens(torch.from_numpy(case.logits), case.rows())
    assert is_usable.all()
    for row, token_id in enumerate(ids.tolist()):
        assert token_id in case.right_tokens(row)
