"""A Hugging Face directory with a byte-level tokenizer small enough to build in every test."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from isthmus.gateway.gguf_tokenizer import byte_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", " the", " one", " two", " three", "he", "in", " zeta", " eta", " theta")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny_backend() -> Tokenizer:
    """Special tokens, 256 bytes, and the merges that make ``WORDS``."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocab[spelling[byte]] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        chars = [spelling[byte] for byte in word.encode()]
        left = chars[0]
        for right in chars[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return backend


def write_tiny_model(folder: Path, *, chat_template: str | None = CHATML) -> Path:
    """Tokenizer and configuration files; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = {"architectures": ["LlamaForCausalLM"], "eos_token_id": [2]}
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return folder
