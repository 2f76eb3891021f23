"""The target's tokenizer as data: what ``GetTokenizer`` hands to services that hold no model."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.speculation.errors import AerieError, Reason
from services.targets.files import one_line, read_json, read_text

_CONTROL = 3  # token_type of special tokens in GGUF files


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as text.

    Attributes:
        tokenizer_json: In the format of the ``tokenizers`` library.
        chat_template: Jinja source, or None.
        special_tokens: Names the template may use: ``bos_token``, ``eos_token``, ...
        eos_ids: Tokens that end a sequence.
    """

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.tokenizer_json, self.chat_template, self.special_tokens, self.eos_ids])
        return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_from_gguf(metadata: dict[str, Any]) -> TokenizerFiles:
    """Build a byte-level BPE tokenizer from a GGUF file's metadata.

    Raises:
        AerieError: TARGET_UNSUPPORTED for another tokenizer model or pre-tokenizer, or without its tables.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        _refuse(f"GGUF tokenizer {one_line(repr(kind), 40)} with pre-tokenizer {one_line(repr(pre), 40)} is not built")
    tokens, merges, kinds = (
        _table(metadata, key, item) for key, item in (("tokens", str), ("merges", str), ("token_type", int))
    )
    if len(kinds) != len(tokens):
        _refuse(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        _refuse("tokenizer.ggml.tokens repeats a token")
    pairs = [tuple(pair.split(" ", 1)) for pair in merges]
    if broken := next((pair for pair in pairs if len(pair) != 2), None):
        _refuse(f"tokenizer.ggml.merges has {broken[0]!r}, which is no pair")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        _refuse("tokenizer.chat_template is not text")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in names.items()}
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    bos = ids["bos_token"]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
    if not isinstance(adds_bos, bool) or (adds_bos and bos is None):
        _refuse("tokenizer.ggml.add_bos_token is not a yes or no, or the file lacks tokenizer.ggml.bos_token_id")
    try:
        tokenizer = _byte_level_bpe(tokens, pairs, special, _PRE_TOKENIZERS[pre]())
        if adds_bos and bos is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="bos $A", special_tokens=[{"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}]
            )
    except Exception as error:  # the library raises nothing narrower
        _refuse(f"the GGUF file's tokenizer: {one_line(error)}")
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
        eos_ids=() if ids["eos_token"] is None else (ids["eos_token"],),
    )


def _byte_level_bpe(
    tokens: list[str], merges: list[Any], special: list[str], before: Sequence[pre_tokenizers.PreTokenizer]
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _table(metadata: dict[str, Any], key: str, item: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or any(type(value) is not item for value in values):
        _refuse(f"the GGUF file lacks tokenizer.ggml.{key}, or it is not a list of {item.__name__}")
    return values


def _token_id(metadata: dict[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < count):
        _refuse(f"{key} is {one_line(repr(value), 40)}, not one of {count} tokens")
    return value


_PRE_TOKENIZERS = {
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": lambda: [],
}


def tokenizer_from_folder(folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    """Read ``tokenizer.json`` and its companions from a checkpoint folder.

    Raises:
        AerieError: TARGET_UNSUPPORTED without a ``tokenizer.json``, or when it or a companion cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        _refuse(f"{folder} has no tokenizer.json")
    text = read_text(path, Reason.TARGET_UNSUPPORTED)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        _refuse(f"{path} is not a tokenizer: {one_line(error)}")
    settings_file = folder / "tokenizer_config.json"
    settings = _read_json(settings_file)
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if value:
            content = value.get("content") if isinstance(value, dict) else value
            if not isinstance(content, str):
                _refuse(f"{settings_file}: {name} is {one_line(repr(value), 40)}, not a token")
            special[name] = content
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None and "eos_token" in special:
        eos = tokenizer.token_to_id(special["eos_token"])
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    most = config.get("vocab_size", tokenizer.get_vocab_size())
    if any(type(token) is not int or not 0 <= token < most for token in eos_ids):
        _refuse(f"{folder}: eos_token_id is {one_line(repr(eos), 40)}, not one of {most} tokens")
    return TokenizerFiles(text, _folder_template(folder, settings), special, eos_ids)


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """``chat_template.jinja``, else that of the settings: a text, or a list of which one is named default."""
    if os.path.lexists(folder / "chat_template.jinja"):
        return read_text(folder / "chat_template.jinja", Reason.TARGET_UNSUPPORTED)
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template", 0) for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str | None):
        _refuse(f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of named texts")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, Reason.TARGET_UNSUPPORTED) if os.path.lexists(path) else {}


def _refuse(message: str) -> NoReturn:
    raise AerieError(Reason.TARGET_UNSUPPORTED, one_line(message, 500))
