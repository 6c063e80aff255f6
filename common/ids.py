"""Names of things that travel between processes. Distinct types so that they cannot be mixed up."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
InstanceId = NewType("InstanceId", str)
DecisionId = NewType("DecisionId", str)
TransferId = NewType("TransferId", bytes)  # 16 random bytes
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)  # of ``HASH_BYTES``, chained over the sequence
HASH_BYTES = 16
HashChain = tuple[BlockHash, ...]  # a prompt's full blocks, from the first
Epoch = NewType("Epoch", int)


def new_request_id() -> RequestId:
    """A fresh request id; OpenAI-style prefixes are added by the gateway."""
    return RequestId(secrets.token_hex(12))


def new_decision_id() -> DecisionId:
    return DecisionId(secrets.token_hex(8))


def new_transfer_id() -> TransferId:
    return TransferId(secrets.token_bytes(16))
