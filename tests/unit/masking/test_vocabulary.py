"""The bytes of tokens are those of the text that the tokens add."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from data.golden_tokens import load
from helpers.families import family_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcp_grpo.errors import SettingsError
from mcp_grpo.masking.vocabulary import Vocabulary


MERGES = (("Ã", "©"), ("Ġ", "a"), ("Ċ", "Ċ"), ("a", "b"))
ADDED = ("<tool_call>", "two words", "<｜tool▁sep｜>", "   ")
PIECES = ["▁", "▁a", "a", "b", "▁▁", "é", ".", "▁the", "\n", "<0x", "0A>", ">"]


def with_added(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(literal, special=False, normalized=False) for literal in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level() -> PreTrainedTokenizerFast:
    return with_added(family_tokenizer("qwen3", MERGES).backend_tokenizer)


def sentencepiece(decoder: Any, has_bytes: bool = True) -> PreTrainedTokenizerFast:
    tokens = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256) if has_bytes)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=has_bytes))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoder
    return with_added(backend)


def replaced(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


TOKENIZERS = {
    "byte-level": byte_level(),
    "gemma": sentencepiece(replaced()),
    "llama 2": sentencepiece(replaced(decoders.Strip(" ", 1, 0))),
    "metaspace": sentencepiece(decoders.Metaspace(), has_bytes=False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_joined_bytes_are_the_text_that_tokens_add_to_what_stands_before_them(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=8))
    # Not at the beginning of a text, where a leading space may be dropped.
    before = [tokenizer.convert_tokens_to_ids("a")]
    added = b"".join(Vocabulary(tokenizer).pieces(ids))
    try:
        text = added.decode()
    except UnicodeDecodeError:
        return  # half a character has bytes, but no text
    assert tokenizer.decode(before + ids) == "a" + text


@given(text=st.text())
def test_joined_bytes_are_the_text_that_was_encoded(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(Vocabulary(tokenizer).pieces(ids)) == text.encode()


def test_half_a_character_has_its_bytes() -> None:
    for kind in ("byte-level", "gemma"):
        tokenizer = TOKENIZERS[kind]
        ids = tokenizer("東", add_special_tokens=False)["input_ids"]
        assert Vocabulary(tokenizer).pieces(ids) == [bytes([byte]) for byte in "東".encode()]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_added_token_has_the_bytes_of_what_it_decodes_to(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.added.keys() >= {"<eos>", *ADDED}
    assert vocabulary.bytes_of(vocabulary.added["<tool_call>"]) == b"<tool_call>"
    assert vocabulary.bytes_of(vocabulary.added["two words"]) == b"two words"
    assert vocabulary.added["<eos>"] in vocabulary.special_ids
    assert vocabulary.added["<tool_call>"] not in vocabulary.special_ids


@pytest.mark.parametrize("name", load())
def test_real_tokens_have_the_bytes_they_were_cut_to(name: str) -> None:
    stored = load()[name]
    vocabulary = Vocabulary(stored.tokenizer())
    assert {i: vocabulary.bytes_of(i) for i in stored.tokens} == stored.pieces


def test_an_id_of_no_token_has_no_bytes() -> None:
    # Models with a padded vocabulary can sample one; it decodes to nothing.
    tokenizer = TOKENIZERS["byte-level"]
    assert Vocabulary(tokenizer).bytes_of(len(tokenizer) + 5) == b""
    assert tokenizer.decode([len(tokenizer) + 5]) == ""


def test_a_large_batch_takes_little_time() -> None:
    vocabulary = Vocabulary(TOKENIZERS["byte-level"])
    ids = list(range(250)) * 8
    start = time.process_time()
    for _ in range(512):
        vocabulary.pieces(ids)
    assert time.process_time() - start < 1  # 0.05 s on a core of its own


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Strip("a", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        None,
    ],
    ids=str,
)
def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused(decoder: Any) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "##b": 1}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(SettingsError, match="are unknown"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_tokenizer_in_plain_python_is_refused() -> None:
    plain: Any = SimpleNamespace(added_tokens_decoder={})
    with pytest.raises(SettingsError, match="SimpleNamespace decodes with code of its own"):
        Vocabulary(plain)
