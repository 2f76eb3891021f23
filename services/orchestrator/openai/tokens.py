"""What single tokens are: their bytes and a string for each, also of those that are part of a character."""

import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TokenBytes:
    """Bytes of single tokens.

    Args:
        tokenizer: Of the target: byte-level, or one whose decoder knows (SentencePiece's, with ``<0xE2>`` for bytes).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "

    def of(self, token: int) -> bytes | None:
        """The token's bytes, a special token's as it is written; None for an id that names no token."""
        if token in self._added:
            return self._added[token].encode()
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return None
        if self._byte_level and all(character in _ALPHABET for character in name):
            return bytes(_ALPHABET[character] for character in name)
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        # After itself: decoders take the space off a text's first token.
        alone, twice = self.tokenizer.decode([token]), self.tokenizer.decode([token, token])
        return twice[len(alone) :].encode()

    def text(self, token: int) -> str:
        r"""The token as a string; bytes that are no whole character as ``\xe2``, as OpenAI has it."""
        return (self.of(token) or b"").decode("utf-8", "backslashreplace")
