"""Generates the protobuf code beside its sources, or says whether what is committed is stale.

protoc sees the folder as ``isthmus/protos`` (through ``typepath``), so the generated modules import
each other by their real names.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "protos" / "v1"
PACKAGE = Path("isthmus/protos/v1")


def generate(out: Path) -> None:
    """Writes the modules of every .proto file under ``out``/isthmus/protos/v1."""
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{ROOT / 'typepath'}",
        f"-I{well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sorted(str(PACKAGE / source.name) for source in TARGET.glob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {file.name: file.read_bytes() for file in (Path(folder) / PACKAGE).iterdir()}
    present = {file.name: file.read_bytes() for file in TARGET.glob("*_pb2*.py*")}
    stale = sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )
    if "--check" in sys.argv:
        if stale:
            sys.exit(f"generated protobuf code is stale ({', '.join(stale)}); run: make proto")
        return
    for name in stale:
        if name in fresh:
            (TARGET / name).write_bytes(fresh[name])
        else:
            (TARGET / name).unlink()
    print(f"{len(stale)} generated files written" if stale else "generated files are up to date")


if __name__ == "__main__":
    main()
