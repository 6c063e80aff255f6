"""Text ⇄ token ids at the edge of the system. Nothing behind the gateway knows text.

A ``TextTokenizer`` is immutable after loading and safe to use from several threads (the backend
releases the interpreter lock while it encodes). Besides ids it knows the exact bytes of each token,
which is what a stream needs: a character may be split over tokens, a byte never is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from isthmus.common.errors import InvalidRequestError, ModelFileError
from isthmus.common.gguf_file import read_gguf
from isthmus.common.model_files import ModelFiles, ModelKind
from isthmus.gateway.gguf_tokenizer import build_gguf_tokenizer, byte_alphabet
from isthmus.gateway.longest_token import NO_BOUND, longest_token
from isthmus.gateway.piece_memory import PieceMemory, piece_memory

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    backend: Tokenizer
    vocab_size: int
    token_bytes: tuple[bytes, ...]
    """By token id; empty for ids that the vocabulary leaves out."""
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    longest_token: int = NO_BOUND
    """Most characters of a text that one token stands for; NO_BOUND when nobody knows."""
    prefix_token_ids: tuple[int, ...] = ()
    """Put before a prompt that is encoded with special tokens (BOS), where the backend does not."""
    chat_template: str | None = None
    pieces: PieceMemory | None = None
    """For short texts; None with a backend that works otherwise."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token, eos_token … by the names that chat templates use."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.pieces is not None and not add_special_tokens:
            known = self.pieces.encode(text)
            if known is not None:
                return known
        # The fast form leaves out where in the text each token lies, which nobody asks for.
        (coded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = coded.ids
        return [*self.prefix_token_ids, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole; bytes that are no UTF-8 become U+FFFD.

        The space that some tokenizers put before a first word is kept: the ids may continue a text.
        """
        special = self.special_token_ids if skip_special_tokens else frozenset()
        table = self.token_bytes
        return b"".join(table[i] for i in token_ids if i not in special).decode(errors="replace")

    def decode_finished(self, token_ids: Sequence[int]) -> str:
        """All of the text, special tokens included, but for a character left unfinished."""
        data = b"".join(self.token_bytes[token_id] for token_id in token_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequestError naming the first id outside the vocabulary."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            return
        wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
        message = f"token id {wrong} is outside the vocabulary of {self.vocab_size}"
        raise InvalidRequestError(message, param=param, stage="validate")


def load_tokenizer(files: ModelFiles) -> TextTokenizer:
    """Raises ModelFileError when the tokenizer is missing, unreadable or of an unknown kind."""
    if files.kind is ModelKind.GGUF:
        return _load_gguf(files.path)
    return _load_directory(files.path)


def _load_gguf(path: Path) -> TextTokenizer:
    built = build_gguf_tokenizer(read_gguf(path))
    bos = (built.bos_token_id,) if built.bos_token_id is not None else ()
    names = {"bos_token": built.bos_token_id, "eos_token": next(iter(built.eos_token_ids), None)}
    return _assemble(
        built.backend,
        eos_token_ids=built.eos_token_ids,
        prefix_token_ids=bos if built.adds_bos else (),
        chat_template=built.chat_template,
        special_tokens={
            name: built.backend.id_to_token(token_id) or ""
            for name, token_id in names.items()
            if token_id is not None
        },
    )


def _load_directory(path: Path) -> TextTokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(f"{path} has no tokenizer.json", stage="load")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the backend raises bare Exception for every fault of the file
        raise ModelFileError(f"{file} cannot be read: {error}", stage="load") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(config.get(name))) is not None
    }
    return _assemble(
        backend,
        eos_token_ids=_directory_eos(path, backend, special.get("eos_token")),
        prefix_token_ids=_missing_bos(backend, config, special.get("bos_token")),
        chat_template=_directory_template(path, config),
        special_tokens=special,
    )


def _assemble(
    backend: Tokenizer,
    *,
    eos_token_ids: tuple[int, ...],
    prefix_token_ids: tuple[int, ...],
    chat_template: str | None,
    special_tokens: dict[str, str],
) -> TextTokenizer:
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    spec = json.loads(backend.to_str())
    table = _bytes_of_tokens(spec, vocab, size, added.keys())
    return TextTokenizer(
        backend=backend,
        vocab_size=size,
        token_bytes=table,
        longest_token=longest_token(spec, table),
        pieces=piece_memory(backend, spec),
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        eos_token_ids=eos_token_ids,
        prefix_token_ids=prefix_token_ids,
        chat_template=chat_template,
        special_tokens=special_tokens,
    )


def _bytes_of_tokens(
    spec: dict[str, Any], vocab: dict[str, int], size: int, added: Any
) -> tuple[bytes, ...]:
    decoder = spec["decoder"] or {"type": "none"}
    kinds = {step["type"] for step in [decoder, *decoder.get("decoders", ())]}
    table = [b""] * size
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        for token, index in vocab.items():
            known = index not in added and all(char in alphabet for char in token)
            table[index] = bytes(alphabet[c] for c in token) if known else token.encode()
    elif kinds & {"ByteFallback", "Metaspace"}:
        for token, index in vocab.items():
            match = _BYTE_TOKEN.fullmatch(token)
            table[index] = bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
    else:
        message = f"a tokenizer with the decoder {sorted(kinds)} is not supported"
        raise ModelFileError(f"{message} (supported: ByteLevel, ByteFallback)", stage="load")
    return tuple(table)


def _missing_bos(
    backend: Tokenizer, config: dict[str, Any], bos_token: str | None
) -> tuple[int, ...]:
    """BOS when the configuration asks for it and the backend's own template does not add it."""
    if not config.get("add_bos_token") or bos_token is None:
        return ()
    bos = backend.token_to_id(bos_token)
    if bos is None or backend.encode("", add_special_tokens=True).ids[:1] == [bos]:
        return ()
    return (bos,)


def _directory_eos(path: Path, backend: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if ids:
            break
    own = backend.token_to_id(eos_token) if eos_token else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _directory_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates; the one for chat is called default
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}", stage="load") from error
    return data if isinstance(data, dict) else {}
