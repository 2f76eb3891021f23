"""Bytes of single tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.orchestrator.openai.tokens import TokenBytes
from tests.tiny import BOS, tiny_tokenizer

TEXTS = ["the and that", "né € 😀 ß\n\t x", "\x00\x7f\xa0\xad"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_make_the_text(text):
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(text).ids
    known = TokenBytes(tokenizer)
    assert b"".join(known.of(token) for token in tokens) == text.encode()


def test_every_byte_has_its_token():
    tokenizer = tiny_tokenizer()
    known = TokenBytes(tokenizer)
    alphabet = [tokenizer.token_to_id(letter) for letter in pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(known.of(token) for token in alphabet) == [bytes([byte]) for byte in range(256)]


def test_strings_of_tokens():
    tokenizer = tiny_tokenizer()
    known = TokenBytes(tokenizer)
    half, rest = tokenizer.encode("é").ids
    assert (known.text(half), known.text(rest)) == (r"\xc3", r"\xa9")
    special = tokenizer.token_to_id(BOS)
    assert (known.of(special), known.text(special)) == (BOS.encode(), BOS)
    assert (known.of(5000), known.text(5000)) == (None, "")


def test_an_added_token_is_what_it_says_even_in_letters_of_the_alphabet():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["Ġé"])
    token = tokenizer.token_to_id("Ġé")
    assert TokenBytes(tokenizer).of(token) == "Ġé".encode()


def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes():
    vocabulary = {"<unk>": 0, "▁the": 1, "▁": 2, "e": 3, "<0xE2>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = TokenBytes(tokenizer)
    assert [known.of(token) for token in (1, 2, 3, 4)] == [b" the", b" ", b"e", b"\xe2"]
