"""mlx-lm as it is: the same weights, type and BLAS, without any seam of ours."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx_lm
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.targets.loader import load_checkpoint
from services.targets.tokenizer import TokenizerFiles


@dataclass(frozen=True)
class BaselineRun:
    """Tokens and times of one ``mlx_lm.stream_generate``; seconds from the call to the first and last token."""

    tokens: tuple[int, ...]
    first_seconds: float
    last_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / (self.last_seconds - self.first_seconds) if len(self.tokens) > 1 else 0.0


class MlxLmBaseline:
    """A second, untouched copy of a target, run by ``mlx_lm.stream_generate``. On the device thread.

    Args:
        target: As ``load_target`` takes it.
    """

    def __init__(self, target: str) -> None:
        checkpoint = load_checkpoint(target)
        self._model = checkpoint.model
        self._files = checkpoint.tokenizer

    def run(self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> BaselineRun:
        """Greedy decoding of a prompt."""
        tokenizer = _wrap(self._files, set() if ignore_eos else set(self._files.eos_ids))
        start = time.perf_counter()
        marks: list[float] = []
        tokens: list[int] = []
        for response in mlx_lm.stream_generate(self._model, tokenizer, list(prompt), max_tokens=max_tokens):
            marks.append(time.perf_counter() - start)
            tokens.append(response.token)
        return BaselineRun(tuple(tokens), marks[0], marks[-1])


def _wrap(files: TokenizerFiles, eos_ids: set[int]) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(files.tokenizer_json), **files.special_tokens)
    # The detokenizer that mlx_lm.load picks for byte-level BPE; its generic one is slower.
    wrapper = TokenizerWrapper(fast, BPEStreamingDetokenizer)
    wrapper.eos_token_ids = eos_ids
    return wrapper
