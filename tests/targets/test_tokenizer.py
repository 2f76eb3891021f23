import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.speculation.errors import AerieError, Reason
from services.targets.loader import load_target
from services.targets.target import Target
from services.targets.tokenizer import tokenizer_from_folder, tokenizer_from_gguf
from tests.targets.tiny_gguf import llama_metadata
from tests.tiny import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer, write_tiny_llama

TRICKY = [
    "",
    " ",
    "  two  spaces   three    ",
    "\n\n\ttab\r\n mixed \u00a0 nbsp \u3000 wide",
    "1234567890 3.14159 1e-9 ٣٤ ²",
    "naïve café — “quotes” … ½ ﬁ",
    "日本語とhanzi漢字 한국어 עברית العربية हिन्दी",
    "emoji 🎉👩‍👩‍👧‍👦🏳️‍🌈 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "combining e\u0301 vs \u00e9, zero\u200bwidth\u200djoiner",
    "def f(x):\n    return {'a': x**2, \"b\": [1,2]}  # it's",
    "<|im_start|>user\nhi<|im_end|>",
    "<| not special |> <im_end> |im_end|",
    "\x00\x01\x7f control",
]


def from_metadata(**changes) -> dict:
    metadata = {**llama_metadata(1, 0), **{key.replace("__", "."): value for key, value in changes.items()}}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("text", TRICKY)
def test_gguf_tokenizer_equals_the_one_it_was_written_from(text: str):
    built = Tokenizer.from_str(tokenizer_from_gguf(from_metadata()).tokenizer_json)
    ids = built.encode(text).ids
    assert ids == tiny_tokenizer().encode(text).ids
    assert built.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_under_smollm_s_rule():
    built = Tokenizer.from_str(tokenizer_from_gguf(from_metadata(tokenizer__ggml__pre="smollm")).tokenizer_json)
    pieces = [piece for piece, _ in built.pre_tokenizer.pre_tokenize_str("in 2024, 17th")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "7", "th"]


def test_gguf_special_tokens_and_template_are_kept():
    files = tokenizer_from_gguf(from_metadata(tokenizer__chat_template="{{ messages }}"))
    assert files.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert files.chat_template == "{{ messages }}"
    assert files.eos_ids == (299,)
    assert tokenizer_from_gguf(from_metadata()).chat_template is None


def test_gguf_without_eos_ends_nothing():
    files = tokenizer_from_gguf(from_metadata(tokenizer__ggml__eos_token_id=None))
    assert files.eos_ids == ()
    assert "eos_token" not in files.special_tokens


@pytest.mark.parametrize("add", [True, False])
def test_gguf_that_asks_for_bos_gets_it(add: bool):
    built = Tokenizer.from_str(tokenizer_from_gguf(from_metadata(tokenizer__ggml__add_bos_token=add)).tokenizer_json)
    text = tiny_tokenizer().encode("hi there").ids
    assert built.encode("hi there").ids == ([298, *text] if add else text)
    assert built.encode("hi there", add_special_tokens=False).ids == text


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_gguf_without_its_tables_is_refused(key: str):
    metadata = from_metadata()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(AerieError, match=rf"tokenizer\.ggml\.{key}") as caught:
        tokenizer_from_gguf(metadata)
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": ["a"] * 300}, "repeats a token"),
        ({"tokens": ["a", 5]}, "tokens"),
        ({"token_type": [1, 2]}, "token_type has 2 entries for 300 tokens"),
        ({"token_type": "x"}, "token_type"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": 5}, "merges"),
        ({"merges": ["zz yy"]}, "zz"),
        ({"bos_token_id": 300}, "bos_token_id is 300, not one of 300 tokens"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"add_bos_token": "x"}, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id"),
        ({"pre": 5}, "pre-tokenizer 5"),
        ({"pre": [1]}, r"pre-tokenizer \[1\]"),
        ({"model": ["gpt2"]}, "gpt2"),
    ],
)
def test_gguf_tables_that_contradict_themselves_are_refused_by_name(changes: dict, named: str):
    with pytest.raises(AerieError, match=named) as caught:
        tokenizer_from_gguf(from_metadata(**{f"tokenizer__ggml__{key}": value for key, value in changes.items()}))
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED
    assert "\n" not in caught.value.message


def test_gguf_template_that_is_no_text_is_refused():
    with pytest.raises(AerieError, match="chat_template is not text"):
        tokenizer_from_gguf(from_metadata(tokenizer__chat_template=5))


@pytest.mark.parametrize("bos", ["two words", "$A", "a:1"])
def test_gguf_bos_may_be_any_text(bos: str):
    """A template's text gives blanks, dollars and colons a meaning."""
    tokens = [*llama_metadata(1, 0)["tokenizer.ggml.tokens"][:298], bos, EOS]
    metadata = from_metadata(tokenizer__ggml__tokens=tokens, tokenizer__ggml__add_bos_token=True)
    built = Tokenizer.from_str(tokenizer_from_gguf(metadata).tokenizer_json)
    assert built.encode("hi").ids == [298, *tiny_tokenizer().encode("hi").ids]


def edit(folder: Path, file: str, **changes) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_tiny_llama(tmp_path, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, "absent", (7,)),
        (7, 8, (8,)),
        (7, [8, 9], (8, 9)),
        ([5, 6], "absent", (5, 6)),
        (7, None, (7,)),
        (0, "absent", (0,)),
        (7, 0, (0,)),
        ("absent", "absent", (299,)),  # by name, from the tokenizer's settings
        (None, "absent", (299,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(folder: Path, config, generation, expected: tuple[int, ...]):
    edit(folder, "config.json", eos_token_id=config)
    edit(folder, "generation_config.json", eos_token_id=generation)
    read = json.loads((folder / "config.json").read_text())
    assert tokenizer_from_folder(folder, read).eos_ids == expected


def test_eos_of_the_generation_config_reaches_the_target(folder: Path):
    edit(folder, "generation_config.json", eos_token_id=[3, 299])
    assert load_target(str(folder)).info.eos_ids == (3, 299)


def test_folder_without_any_eos_ends_nothing(folder: Path):
    edit(folder, "config.json", eos_token_id="absent")
    edit(folder, "tokenizer_config.json", eos_token="absent")
    assert tokenizer_from_folder(folder, json.loads((folder / "config.json").read_text())).eos_ids == ()


def test_folder_template_and_special_tokens_are_read(folder: Path):
    edit(folder, "tokenizer_config.json", bos_token={"content": BOS, "lstrip": False}, pad_token=None, unk_token="")
    files = tokenizer_from_folder(folder, {})
    assert files.chat_template == CHAT_TEMPLATE
    assert files.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert Tokenizer.from_str(files.tokenizer_json).encode(EOS).ids == [299]


def test_named_templates_give_the_default_one(folder: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    assert tokenizer_from_folder(folder, {}).chat_template == "d"
    edit(folder, "tokenizer_config.json", chat_template=named[:1])
    assert tokenizer_from_folder(folder, {}).chat_template is None


def test_template_file_goes_before_the_settings(folder: Path):
    (folder / "chat_template.jinja").write_text("from a file: é", encoding="utf-8")
    assert tokenizer_from_folder(folder, {}).chat_template == "from a file: é"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("tokenizer_config.json", b"[" * 200_000, "not JSON"),
        ("tokenizer_config.json", b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        ("tokenizer_config.json", b"\xff", "not text"),
        ("tokenizer_config.json", None, "not a regular file"),
        ("tokenizer_config.json", b'{"eos_token": {"x": 1}}', "eos_token"),
        ("tokenizer_config.json", b'{"bos_token": 5}', "bos_token is 5"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": {"a": 1}}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "chat_template"),
        ("chat_template.jinja", b"\xff\xfe", "not text"),
        ("chat_template.jinja", None, "not a regular file"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", b'{"eos_token_id": {"a": 1}}', "eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [null]}', "eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [[1]]}', "eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [1, 300]}', "not one of 300 tokens"),
        ("generation_config.json", b'{"eos_token_id": -1}', "eos_token_id is -1"),
        ("generation_config.json", None, "not a regular file"),
        ("tokenizer.json", None, "not a regular file"),
        ("tokenizer.json", b"[" * 200_000, "not a tokenizer"),
    ],
)
def test_spoilt_companion_is_refused_in_one_line(folder: Path, file: str, content: bytes | None, named: str):
    """None: a folder of that name."""
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(AerieError) as caught:
        tokenizer_from_folder(folder, {"vocab_size": 300})
    assert caught.value.reason is Reason.TARGET_UNSUPPORTED
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_fingerprint_follows_every_part(folder: Path):
    prints = {tokenizer_from_folder(folder, {}).fingerprint, tokenizer_from_folder(folder, {}).fingerprint}
    assert len(prints) == 1
    prints.add(tokenizer_from_folder(folder, {"eos_token_id": 3}).fingerprint)
    edit(folder, "tokenizer_config.json", chat_template="other")
    prints.add(tokenizer_from_folder(folder, {}).fingerprint)
    edit(folder, "tokenizer_config.json", pad_token=EOS)
    prints.add(tokenizer_from_folder(folder, {}).fingerprint)
    assert len(prints) == 4


@pytest.mark.real
@pytest.mark.parametrize("text", TRICKY)
def test_smollm2_round_trips(smollm2_tokenizer: Tokenizer, text: str):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.real
def test_smollm2_tokens_are_the_published_ones(smollm2_tokenizer: Tokenizer):
    """Digits one by one; special tokens whole, and only whole."""
    tokenizer = smollm2_tokenizer
    assert tokenizer.encode("<|im_start|>user\n").tokens == ["<|im_start|>", "user", "Ċ"]
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>").ids == [1, 2, 0]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert 2 not in tokenizer.encode("<| im_end |>").ids
    assert tokenizer.get_vocab_size() == 49152


@pytest.mark.real
def test_smollm2_fields(smollm2: Target):
    files = smollm2.tokenizer
    assert files.eos_ids == (2,)
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert files.special_tokens["bos_token"] == "<|im_start|>"
    assert files.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in files.chat_template
