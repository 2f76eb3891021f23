"""What a caller may ask for, and what is refused before anything is sent."""

import numpy as np
import pytest

from services.client import AerieError, Client, Options, Reason, Sampler
from services.client.requests import check_deadline, write_request
from services.wire.orchestrator import Generate, read_generate

TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("hi", {}, Generate(TURN)),
        ("hi", {"raw": True}, Generate("hi")),
        ("hi", {"raw": False, "max_tokens": None, "seed": None, "stop": (), "deadline": 1}, Generate(TURN)),
        ((1, 2), {}, Generate((1, 2))),
        (np.array([1, 2]), {}, Generate((1, 2))),
        ([np.uint32(7)], {"max_tokens": np.int64(3)}, Generate((7,), max_tokens=3)),
        (TURN, {"stop": "x"}, Generate(TURN, stop=("x",))),
        (TURN, {"stop": ["x", "y"]}, Generate(TURN, stop=("x", "y"))),
        ("hi", {"temperature": 0.5, "top_k": 4}, Generate(TURN, sampler=Sampler(temperature=0.5, top_k=4))),
        ("hi", {"sampler": Sampler(min_p=0.1)}, Generate(TURN, sampler=Sampler(min_p=0.1))),
        ("hi", {"logit_bias": {5: -1.0}}, Generate(TURN, sampler=Sampler(logit_bias=((5, -1.0),)))),
        ("hi", {"logit_bias": [(5, -1.0)]}, Generate(TURN, sampler=Sampler(logit_bias=((5, -1.0),)))),
        ("hi", {"tree_nodes": 3, "tree_depth": 0, "tree_top_k": 2}, Generate(TURN, nodes=3, depth=0, top_k=2)),
        ("hi", {"drafter": "off", "ignore_eos": True}, Generate(TURN, drafter="off", ignore_eos=True)),
        ("hi", {"seed": 2**64 - 1, "top_logprobs": 0}, Generate(TURN, seed=2**64 - 1, top_logprobs=0)),
    ],
)
def test_requests_say_what_was_asked_for(prompt, options, expected):
    assert read_generate(write_request(prompt, options)) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (None, {}, "prompt"),
        (5, {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([{"role": "user"}], {}, "prompt"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}, "prompt"),
        ([-1], {}, "cannot be sent"),
        ([2**32], {}, "cannot be sent"),
        ("\ud800", {}, "cannot be sent"),
        ([1], {"raw": True}, "raw"),
        ("hi", {"raw": 1}, "raw"),
        ("hi", {"no_such": 1}, "'no_such'"),
        ("hi", {"no_such": None}, "'no_such'"),
        ("hi", {"max_tokens": -1}, "max_tokens"),
        ("hi", {"max_tokens": 2**32}, "max_tokens"),
        ("hi", {"max_tokens": 1.5}, "max_tokens"),
        ("hi", {"max_tokens": True}, "max_tokens"),
        ("hi", {"seed": 2**64}, "seed"),
        ("hi", {"seed": "7"}, "seed"),
        ("hi", {"tree_depth": -1}, "tree_depth"),
        ("hi", {"stop": 5}, "stop"),
        ("hi", {"stop": b"x"}, "stop"),
        ("hi", {"stop": [5]}, "stop"),
        ("hi", {"drafter": 5}, "drafter"),
        ("hi", {"ignore_eos": 1}, "ignore_eos"),
        ("hi", {"sampler": {}}, "sampler"),
        ("hi", {"sampler": Sampler(), "top_p": 0.5}, "top_p, not both"),
        ("hi", {"temperature": -1}, "temperature"),
        ("hi", {"temperature": "warm"}, "temperature"),
        ("hi", {"logit_bias": "5"}, "logit_bias"),
        ("hi", {"logit_bias": {-1: 2.0}}, "cannot be sent"),
    ],
)
def test_wrong_requests_are_refused_by_name(prompt, options, says):
    with pytest.raises(AerieError, match=says) as caught:
        write_request(prompt, options)
    assert caught.value.reason == Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), True, "1"])
def test_deadlines_are_positive_seconds(deadline):
    with pytest.raises(AerieError, match="deadline"):
        check_deadline(deadline)
    with Client("unix:/nobody") as client, pytest.raises(AerieError, match="deadline"):
        client.generate("hi", deadline=deadline)


def test_every_sampling_option_can_be_given_by_itself():
    assert Sampler.__dataclass_fields__.keys() <= Options.__optional_keys__
