"""Writes the packaged sample model as GGUF files for llama.cpp, with the weights the others have.

``python -m benchmarks.peers.gguf_export DIR`` writes a BF16 and a Q8_0 file. Every weight is
rounded to bf16 first, as in the safetensors directory of ``benchmarks.export_model``; matrices are
then stored in the file's format and vectors in float32, which llama.cpp wants them in. Everything
else (sizes, vocabulary, template) is copied from the sample's own file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, quants

from isthmus.common.model_files import sample_model_path

FORMATS = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
# Written by the writer itself, or different in the new file.
OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")


def rounded_to_bf16(weight: np.ndarray) -> np.ndarray:
    """float32 of the same shape whose values all are bf16's, rounded to nearest even."""
    kind = GGMLQuantizationType.BF16
    rounded: np.ndarray = quants.dequantize(quants.quantize(weight, kind), kind)
    return rounded


def convert(
    data: np.ndarray, kind: GGMLQuantizationType, target: GGMLQuantizationType
) -> tuple[np.ndarray, GGMLQuantizationType]:
    """The bytes of a stored tensor in the new format, and the format it got."""
    weight = rounded_to_bf16(quants.dequantize(data, kind))
    if weight.ndim < 2:
        return weight, GGMLQuantizationType.F32
    return quants.quantize(weight, target), target


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name in OWN_FIELDS or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def export(source: Path, target: Path, name: str) -> Path:
    """Writes ``target`` in the format ``name`` unless it exists."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    kind, file_type = FORMATS[name]
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    copy_fields(reader, writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        data, stored = convert(tensor.data, tensor.tensor_type, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def export_sample(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return export(sample_model_path(), folder / f"sample-{name}.gguf", name)


if __name__ == "__main__":
    for chosen in FORMATS:
        print(export_sample(Path(sys.argv[1]), chosen))
