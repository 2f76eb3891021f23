"""Options of the Python API, by name or as values."""

import numpy as np
import pytest

from services.embedded import AerieError, Engine, Reason, Sampler

PROMPT = (11, 42, 7, 199, 250, 3)


def test_sampling_options_by_name_are_a_sampler(tiny_engine):
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": ((5, 1.0),)}
    request = tiny_engine.request(PROMPT, seed=3, **options)
    assert request.sampler == Sampler(**options)
    assert tiny_engine.request(PROMPT, seed=3, **options | {"logit_bias": {5: 1.0}}).sampler == request.sampler
    by_name = tiny_engine.generate(PROMPT, max_tokens=8, seed=3, **options)
    assert by_name.token_ids == tiny_engine.generate(PROMPT, max_tokens=8, seed=3, sampler=Sampler(**options)).token_ids
    assert by_name.token_ids != tiny_engine.generate(PROMPT, max_tokens=8, seed=3).token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT, {"temprature": 1.0}, "no option 'temprature'"),
        (PROMPT, {"tokens": (1,)}, "no option 'tokens'"),
        (PROMPT, {"sampler": Sampler(), "temperature": 1.0}, "not both"),
        (PROMPT, {"temperature": "hot"}, "temperature must be a number"),
        (PROMPT, {"top_k": 1.5}, "top_k must be an integer"),
        (PROMPT, {"sampler": None}, "sampler must be a Sampler"),
        (PROMPT, {"seed": 1.5}, "seed must be an integer"),
        (PROMPT, {"stop": 5}, "stop must be"),
        (PROMPT, {"stop": [5]}, "stop must be"),
        (["a"], {}, "text or token ids"),
        ([{"role": "user", "content": "hi"}], {}, "takes conversations"),
        (5, {}, "text or token ids"),
        (None, {}, "text or token ids"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(tiny_engine, prompt, options, message):
    for call in (tiny_engine.generate, tiny_engine.request, lambda *a, **o: list(tiny_engine.stream(*a, **o))):
        with pytest.raises(AerieError, match=message) as caught:
            call(prompt, **options)
        assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert not tiny_engine.verifier.sessions


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_one_stop_string_needs_no_tuple(tiny_engine, stop):
    assert tiny_engine.request(PROMPT, stop=stop).stop == ("END",)


def test_conversations_are_messages(tiny_engine):
    assert tiny_engine.chat_tokens("hi") == tiny_engine.chat_tokens([{"role": "user", "content": "hi"}])
    with pytest.raises(AerieError, match="list of messages"):
        tiny_engine.chat_tokens(["hi"])
    for other in (None, 5, iter([{"role": "user", "content": "hi"}])):
        with pytest.raises(AerieError, match="list of messages"):
            tiny_engine.chat_tokens(other)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_integers_of_numpy_count_as_python_does(tiny_engine, kind):
    result = tiny_engine.generate(PROMPT, max_tokens=kind(125), seed=kind(3), ignore_eos=True, temperature=1.0)
    assert (
        result.token_ids
        == tiny_engine.generate(PROMPT, max_tokens=125, seed=3, ignore_eos=True, temperature=1.0).token_ids
    )


@pytest.mark.parametrize(
    "options",
    [
        {"target": 5},
        {"target": None},
        {"target": ""},
        {"drafter": 5},
        {"threads": 0},
        {"threads": "x"},
        {"kv_bytes": -1},
        {"kv_bytes": "x"},
    ],
    ids=str,
)
def test_an_engine_is_loaded_by_names_and_numbers(options):
    with pytest.raises(AerieError) as caught:
        Engine.load(**options)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_an_engine_without_a_drafter_asks_for_none(tiny_folder):
    with Engine.load(str(tiny_folder), "off") as engine:
        assert engine.request(PROMPT).drafter == "off"
    with Engine.load(str(tiny_folder)) as engine:
        assert engine.request(PROMPT).drafter == "auto"
