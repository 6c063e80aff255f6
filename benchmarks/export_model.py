"""Dequantises the packaged sample model once to a bf16 safetensors directory that every peer reads.

``python -m benchmarks.export_model DIR``; needs transformers (the dev extra).
"""

from __future__ import annotations

import sys
from pathlib import Path

from isthmus.common.model_files import sample_model_path


def export(target: Path) -> Path:
    if (target / "config.json").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = sample_model_path()
    options = {"gguf_file": source.name, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers marks a GGUF model as quantised even after dequantising it.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


if __name__ == "__main__":
    print(export(Path(sys.argv[1])))
