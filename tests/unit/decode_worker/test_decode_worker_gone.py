"""What proves that the process of a prefill instance has ended."""

from __future__ import annotations

from typing import cast

import pytest

from isthmus.common.addresses import join_address, listen_on
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.decode_worker.prefill_client import PrefillClient
from isthmus.kvtransfer.manager import TransferManager
from tests.support.ipv6 import needs_ipv6


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_an_instance_is_gone_when_nobody_listens_at_its_address(host: str) -> None:
    client = PrefillClient(cast("TransferManager", None), 1_000)
    with listen_on(host) as listener:
        ref = InstanceRef(InstanceId("prefill-0"), 1, join_address(host, listener.getsockname()[1]))
    assert await client.is_gone(ref)
    await client.close()
