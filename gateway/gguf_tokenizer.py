"""A tokenizer rebuilt from the metadata of a GGUF file.

The file holds vocabulary, merges and special tokens under llama.cpp's names; what it calls ``pre``
selects the split that the merges were learned with. ``smollm`` and ``gpt-2`` use GPT-2's split, as
transformers does for the same file, so that both see the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from isthmus.common.errors import ModelFileError
from isthmus.common.gguf_file import GgufFile, GgufValue

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# None = GPT-2's own split, which ByteLevel brings along.
_SPLITS: dict[str, str | None] = {
    "": None,
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "llama-bpe": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    backend: Tokenizer
    adds_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def build_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Raises ModelFileError when the file has no tokenizer or one of a kind we do not know."""
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    if kind == "gpt2":
        backend = _byte_level(meta, tokens)
    elif kind == "llama":
        backend = _sentencepiece(meta, tokens)
    else:
        message = f"{file.path} holds a tokenizer of kind {kind!r}; supported: gpt2, llama"
        raise ModelFileError(message, stage="load")
    _add_special_tokens(backend, meta, tokens)
    template = meta.get("tokenizer.chat_template")
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    bos = meta.get("tokenizer.ggml.bos_token_id")
    return GgufTokenizer(
        backend=backend,
        adds_bos=bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        chat_template=template if isinstance(template, str) else None,
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each of the 256 bytes → the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def _byte_level(meta: Mapping[str, GgufValue], tokens: Sequence[str]) -> Tokenizer:
    pre = str(meta.get("tokenizer.ggml.pre", ""))
    if pre not in _SPLITS:
        known = ", ".join(sorted(name for name in _SPLITS if name))
        message = f"pre-tokenizer {pre!r} is not supported; supported: {known}"
        raise ModelFileError(message, stage="load")
    pairs = [merge.split(" ") for merge in _strings(meta, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, right in pairs]
    backend = Tokenizer(BPE(vocab=_byte_vocabulary(tokens), merges=merges, fuse_unk=False))
    split = _SPLITS[pre]
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Tokens that use other characters than the byte alphabet are respelled in it."""
    alphabet = byte_alphabet()
    spelling = {byte: char for char, byte in alphabet.items()}
    return {
        token
        if alphabet.keys() >= set(token)
        else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }


def _sentencepiece(meta: Mapping[str, GgufValue], tokens: Sequence[str]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in meta:
        pairs = [merge.split(" ") for merge in _strings(meta, "tokenizer.ggml.merges")]
        merges = [(left, right) for left, right in pairs]
    else:
        scores = cast("list[float]", meta.get("tokenizer.ggml.scores") or [])
        if len(scores) != len(tokens):
            raise ModelFileError("the tokenizer has neither merges nor scores", stage="load")
        merges = _merges_from_scores(vocab, dict(zip(tokens, scores, strict=True)))
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if has_prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    vocab: Mapping[str, int], scores: Mapping[str, float]
) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies, best score first as its BPE goes."""
    found: list[tuple[str, str, float]] = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((left, right, score) for left, right in pairs)
    found.sort(key=lambda item: (item[2], len(item[0]), len(item[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def _add_special_tokens(
    backend: Tokenizer, meta: Mapping[str, GgufValue], tokens: Sequence[str]
) -> None:
    """Control tokens stay whole and are hidden from text; user-defined ones stay whole only.

    A control token outside the byte alphabet is respelled in a byte-level vocabulary, so adding it
    would make a new id beyond the model's last: it is left out.
    """
    kinds = cast("list[int]", meta.get("tokenizer.ggml.token_type") or [])
    present = backend.get_vocab(with_added_tokens=False)
    pairs = [pair for pair in zip(tokens, kinds, strict=False) if pair[0] in present]
    special = [AddedToken(t, normalized=False, special=True) for t, k in pairs if k == _CONTROL]
    whole = [AddedToken(t, normalized=False, special=False) for t, k in pairs if k == _USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(whole)


def _strings(meta: Mapping[str, GgufValue], key: str) -> list[str]:
    value = meta.get(key)
    if not isinstance(value, list) or not value:
        raise ModelFileError(f"the GGUF file has no {key}", stage="load")
    return cast("list[str]", value)
