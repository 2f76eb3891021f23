"""The real target against a PyTorch reference in float32; tolerances are those its authors recommend."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from services.targets.ragged import SessionRows
from services.targets.target import Forward, Target

pytestmark = pytest.mark.real
GOLDEN = Path(__file__).parents[1] / "fixtures/golden.safetensors"
TAPS = (2, 15, 27)


class Document:
    """One document of the golden file, and our forward over its tokens."""

    def __init__(self, number: int, target: Target) -> None:
        with safe_open(GOLDEN, "np") as file:
            prefix = f"doc{number}."
            own = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - no mapping
            self.golden = {key.removeprefix(prefix): file.get_tensor(key) for key in own}
            self.prompt, self.answer = (file.metadata()[f"{prefix}{part}"] for part in ("prompt", "answer"))
        self.tokens = self.golden["tokens"].tolist()
        rows = SessionRows.chunk(target.new_kv(), self.tokens, "all")
        forward: Forward = target.forward([rows], frozenset([*TAPS, "final"]))
        mx.eval(forward.logits, *forward.taps.values())
        self.logits = forward.logits
        self.taps = {tap: np.array(rows) for tap, rows in forward.taps.items()}


@pytest.fixture(scope="module", params=range(4))
def document(request, smollm2: Target) -> Document:
    return Document(request.param, smollm2)


def test_greedy_tokens_equal_the_reference(document: Document):
    np.testing.assert_array_equal(np.array(mx.argmax(document.logits, -1)), document.golden["target_next"])


def test_log_probabilities_equal_the_reference(document: Document):
    start, ids = document.golden["start"], document.golden["target_top8_ids"]
    rows = document.logits[mx.array(start)]
    rows = np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True))
    got = np.take_along_axis(rows, ids, axis=1)
    np.testing.assert_allclose(got, document.golden["target_top8_logp"], atol=1e-3, rtol=0)


def test_taps_equal_the_reference(document: Document):
    for index, tap in enumerate(TAPS):
        rows = document.taps[tap]
        size = np.sqrt((rows.astype(np.float64) ** 2).mean(-1))
        np.testing.assert_allclose(size, document.golden["tap_rms"][index], rtol=1e-4)
        head, expected = rows[:, :8], document.golden["tap_head"][index]
        # Position 0 carries a massive activation.
        np.testing.assert_allclose(head[1:], expected[1:], atol=3e-3, rtol=0)
        np.testing.assert_allclose(head[0], expected[0], atol=1e-4 * size[0], rtol=0)


def test_final_hidden_states_equal_the_reference(document: Document):
    np.testing.assert_allclose(document.taps["final"][:, :8], document.golden["final_head"], atol=1e-3, rtol=0)


def test_text_is_the_reference_s(document: Document, smollm2_tokenizer: Tokenizer):
    prompt_len = int(document.golden["prompt_len"][0])
    assert smollm2_tokenizer.encode(document.prompt, add_special_tokens=False).ids == document.tokens[:prompt_len]
    assert smollm2_tokenizer.decode(document.tokens[prompt_len:], skip_special_tokens=False) == document.answer
