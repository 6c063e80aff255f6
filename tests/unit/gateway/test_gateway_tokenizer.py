"""Our tokenisation is transformers' tokenisation, for GGUF files and directories alike."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from isthmus.common.errors import ModelFileError
from isthmus.common.model_files import locate_model, sample_model_path
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiny_tokenizer import write_tiny_model

transformers = pytest.importorskip("transformers")

TEXTS = (
    "Hello world",
    "  a  12  345 \n\n x\t\ty  ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "안녕하세요 สวัสดีครับ 😀👩‍👩‍👧 naïve é e\u0301",
    "it's I'LL we've 2024-01-01 3.14159 1,000,000",
    "def f(x):\n    return x  # done\n",
    "<|im_start|> <|im_end|><repo_name> <empty_output>",
    "",
    "\ufeff\u200b\u00a0x\u2028y",
    "a" * 300,
)


def corpus(count: int) -> list[str]:
    rng = random.Random(7)
    alphabet = "abcT 12 \n\t'é안😀<|>_.ก"
    made = ["".join(rng.choices(alphabet, k=rng.randint(1, 50))) for _ in range(count)]
    return [*TEXTS, *made]


@pytest.fixture(scope="module")
def sample() -> TextTokenizer:
    return load_tokenizer(locate_model("sample"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_tokenizer(sample_model_path())


def test_sample_tokens_equal_those_of_transformers(sample: TextTokenizer, reference: Any) -> None:
    for text in corpus(500):
        assert sample.encode(text, add_special_tokens=True) == reference(text)["input_ids"], text


def test_sample_text_equals_that_of_transformers(sample: TextTokenizer, reference: Any) -> None:
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(sample.vocab_size) for _ in range(12)]
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert sample.decode(ids, skip_special_tokens=skip) == expected


def test_sample_knows_its_ends_and_its_template(sample: TextTokenizer) -> None:
    assert sample.vocab_size == 49152
    assert sample.eos_token_ids == (2,)
    assert sample.prefix_token_ids == ()
    assert "<|im_start|>" in (sample.chat_template or "")
    assert sample.special_tokens["eos_token"] == "<|im_end|>"


def test_directory_reads_tokenizer_template_and_ends(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(locate_model(str(write_tiny_model(tmp_path / "tiny"))))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.chat_template is not None
    text = "the one two 안녕 😀"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.decode([1, *ids], skip_special_tokens=False) == "<|im_start|>" + text


def test_directory_adds_bos_when_the_configuration_asks_for_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    config = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(locate_model(str(folder)))
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
def test_gguf_pre_tokenizers_equal_transformers(tmp_path: Path, pre: str) -> None:
    file = write_gguf(tmp_path, "gpt2", pre=pre)
    check_against_transformers(file)


def test_gguf_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    file = write_gguf(tmp_path, "llama")
    tokenizer = check_against_transformers(file)
    assert tokenizer.encode("low", add_special_tokens=True)[0] == 1
    euro = tokenizer.encode("€", add_special_tokens=False)
    assert tokenizer.decode(euro).strip() == "€"
    assert b"\xe2" in [tokenizer.token_bytes[i] for i in euro]


@pytest.mark.parametrize(
    ("kind", "pre", "said"),
    [("gpt2", "martian", "martian"), ("bert", "", "bert")],
)
def test_gguf_of_unknown_kind_is_refused_by_name(
    tmp_path: Path, kind: str, pre: str, said: str
) -> None:
    with pytest.raises(ModelFileError, match=said):
        load_tokenizer(locate_model(str(write_gguf(tmp_path, kind, pre=pre))))


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(locate_model(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("no json")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        load_tokenizer(locate_model(str(tmp_path)))


def transformers_tokenizer(file: Path) -> Any:
    """What AutoTokenizer ends up with, without the minute it takes to read the model's config."""
    backend = transformers.PreTrainedTokenizerFast
    return backend.from_pretrained(str(file.parent), gguf_file=file.name)


def check_against_transformers(file: Path) -> TextTokenizer:
    ours = load_tokenizer(locate_model(str(file)))
    theirs = transformers_tokenizer(file)
    for text in corpus(100):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == expected, text
    return ours


def write_gguf(folder: Path, kind: str, *, pre: str = "") -> Path:
    """A GGUF file with a small tokenizer and no tensors."""
    file = folder / f"{kind}-{pre or 'none'}.gguf"
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    tokens, kinds, scores, merges = sentencepiece_vocab() if kind == "llama" else byte_vocab()
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def byte_vocab() -> tuple[list[str], list[int], list[float], list[str]]:
    folder_vocab = json.loads(_tiny_json())["model"]
    vocab: dict[str, int] = folder_vocab["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [" ".join(m) if isinstance(m, list) else m for m in folder_vocab["merges"]]
    return tokens, [3] * 3 + [1] * (len(tokens) - 3), [], merges


def sentencepiece_vocab() -> tuple[list[str], list[int], list[float], list[str]]:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    pieces = ["▁l", "lo", "▁lo", "ow", "▁low", "er", "▁▁", "12"]
    letters = sorted(set("▁abcT12low er'.<|>_".replace(" ", "")))
    for rank, piece in enumerate([*pieces, *letters]):
        tokens.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    return tokens, kinds, scores, []


def _tiny_json() -> str:
    from tests.support.tiny_tokenizer import build_tiny_backend

    return build_tiny_backend().to_str()
