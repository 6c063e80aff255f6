"""A decode instance without a model, and a registry that names it: nothing is waited for there.

``python -m benchmarks.instant_decode`` serves until its stdin is closed. The first line that it
prints has the addresses of both, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import uvloop

from isthmus.common.registry.base import instance_key
from isthmus.common.registry.embedded import RegistryServer
from isthmus.protos.convert.instances import info_to_pb
from tests.support.fake_decode import FakeDecode, Script


async def serve(cluster: str, model: str, token_ids: list[int]) -> None:
    fake = FakeDecode(
        model=model,
        block_size=16,
        max_model_len=8192,
        report_period_s=1.0,  # as an idle instance does
        script=lambda _: Script(token_ids),
    )
    registry = RegistryServer()
    await fake.start()
    address = await registry.start("127.0.0.1", 0)
    record = info_to_pb(fake.info).SerializeToString()
    await registry.registry.put(instance_key(cluster, fake.instance_id), record)
    print(json.dumps({"registry": address, "decode": fake.address}), flush=True)
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await registry.stop()
        await fake.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--token-ids", type=int, nargs="+", required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.cluster, args.model, args.token_ids))


if __name__ == "__main__":
    main()
