"""The target's tokenizer as data: what ``GetTokenizer`` hands to services that hold no model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.speculation.errors import AerieError, Reason

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
    try:
        return _byte_level_bpe(metadata)
    except KeyError as missing:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"the GGUF file lacks {missing}") from None


def _byte_level_bpe(metadata: dict[str, Any]) -> TokenizerFiles:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not built")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_PRE_TOKENIZERS[pre](), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = int(metadata["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[int(i)] for name, i in ids.items() if i is not None},
        eos_ids=() if ids["eos_token"] is None else (int(ids["eos_token"]),),
    )


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
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{path} is not a tokenizer: {error}") from None
    settings = _read_json(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text()
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if value:
            special[name] = value["content"] if isinstance(value, dict) else value
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None and "eos_token" in special:
        eos = tokenizer.token_to_id(special["eos_token"])
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TokenizerFiles(path.read_text(), template, special, eos_ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise AerieError(Reason.TARGET_UNSUPPORTED, f"{path} is not JSON: {error}") from None
    return content
