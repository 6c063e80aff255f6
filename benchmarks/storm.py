"""Two thousand requests that behave badly over workers, writes and connections that do, too.

``python -m benchmarks.storm`` starts two prefill and two decode instances of a tiny model. 40 % of
the clients leave, at every stage; workers get SIGKILL and SIGSTOP ten times; 1 % of the KV writes
fail and 2 % arrive with a flipped byte; proxies cut and garble the control connections. Then every
request must be accounted for and must have ended in time, every token must be the one that an
undisturbed engine gives, no flipped chunk may have been taken for good, every pool must be at rest
and clean, and the cluster must serve without help. Exits with 1 when one of it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

OUT = Path(__file__).resolve().parent / "out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--signals", type=int, default=10, help="SIGKILLs and SIGSTOPs, in turn")
    parser.add_argument("--cuts", type=int, default=20, help="of control connections, half garbled")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--keep", type=Path, help="folder for logs; default: a temporary one")
    args = parser.parse_args()
    # Here, not above: workers are forked with this module as their main one, and need none of it.
    from benchmarks.storm_run import StormShape, run

    shape = StormShape(num_requests=args.requests, concurrency=args.concurrency, seed=args.seed)
    with TemporaryDirectory(prefix="isthmus-storm-", ignore_cleanup_errors=True) as scratch:
        folder = args.keep or Path(scratch)
        report = asyncio.run(run(shape, args.signals, args.cuts, folder))
    OUT.mkdir(exist_ok=True)
    text = json.dumps(asdict(report), indent=1)
    (OUT / "storm.json").write_text(text)
    print(text)
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
