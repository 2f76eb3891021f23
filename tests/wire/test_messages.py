"""Every message comes back as it left, through bytes; what no peer of ours sends is refused by name."""

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from aerie.drafter.v1 import drafter_pb2
from aerie.types.v1 import types_pb2
from aerie.verifier.v1 import verifier_pb2

from services.speculation.errors import AerieError, Reason
from services.speculation.growth import Budget
from services.speculation.messages import (
    Attach,
    Draft,
    Drafted,
    DrafterInfo,
    DrafterStatus,
    Features,
    History,
    NeedFeatures,
    Observe,
    Open,
    OpenDraft,
    PortError,
    Prefilled,
    SessionSummary,
    TargetInfo,
    TokenLogProbs,
    Truncate,
    Verdict,
    Verify,
)
from services.speculation.trees import DraftTree
from services.speculation.warpers import Sampler
from services.wire import drafter, values, verifier

SAMPLER = Sampler(0.7, 40, 0.9, 0.05, 1.1, 0.2, -0.3, ((5, -100.0), (0, 1.5)))
TREE = DraftTree.build([7, 0, 49151], [-1, 0, 0], [0.0, -0.25, -3.5])
# bits of bfloat16
ROWS = Features(3, {2: np.arange(6, dtype=np.uint16).reshape(2, 3), "final": np.full((2, 3), 0x3F80, np.uint16)})
LOG_PROBS = (TokenLogProbs(5, -0.5, ((5, -0.5), (0, -1.25))), TokenLogProbs(0, 0.0, ()))
OPEN = Open(
    session="s",
    tokens=(1, 2, 3),
    prompt_len=2,
    max_tokens=9,
    sampler=SAMPLER,
    seed=2**64 - 1,
    epoch=4,
    eos_ids=(0, 2),
    ignore_eos=True,
    top_logprobs=0,
    taps=(0, 30, "final"),
)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key, value in a.items():
            assert_same(value, b[key])
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@pytest.mark.parametrize(
    "message",
    [
        OPEN,
        Open("", (), 0, 0, Sampler(), 0),
        Verify("s", 1, 2, 3, TREE),
        Truncate("s", 1, 20),
        Attach("s", 1, 3, (0, "final")),
        Attach("s", 1, 4, ()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_requests_to_the_verifier(message):
    sent = verifier.write_request(message).SerializeToString()
    assert_same(verifier.read_request(verifier_pb2.SessionRequest.FromString(sent)), message)


@pytest.mark.parametrize(
    "message",
    [
        Prefilled("s", 1, 5, None, 0.25),
        Prefilled("s", 1, 0, "stop", 0.25, LOG_PROBS),
        Verdict("s", 1, 2, 3, (0, 2), (49151, 8), "length", ROWS, 0.125, LOG_PROBS, 0.5),
        Verdict("s", 1, 0, 3, (0,), (8,), None, Features(3, {}), 0.125),
        PortError("s", Reason.STALE_ROUND, "expected round 2", (1, 2, 3)),
        PortError("s", Reason.INTERNAL, "incident 1"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_answers_of_the_verifier(message):
    sent = verifier.write_response(message).SerializeToString()
    assert_same(verifier.read_response(verifier_pb2.SessionResponse.FromString(sent)), message)


@pytest.mark.parametrize(
    "message",
    [
        OpenDraft("s", 1, SAMPLER, 5),
        Observe("s", 1, ROWS, (4, 5)),
        Draft("s", 1, 2, 3, Budget(64, 8, 10)),
        Draft("s", 1, 2, 3, Budget(12, 6, 3, -1.5)),
        Draft("s", 1, 2, 3, Budget(12, 6, 3), Observe("s", 1, ROWS, (4, 5))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_requests_to_the_drafter(message):
    sent = drafter.write_request(message).SerializeToString()
    assert_same(drafter.read_request(drafter_pb2.SessionRequest.FromString(sent)), message)


@pytest.mark.parametrize(
    "message",
    [
        Drafted("s", 1, 2, 3, TREE, 0.5, 0.25),
        NeedFeatures("s", 1, 2, ((0, 4), (10, 12))),
        PortError("s", Reason.FEATURE_GAP, "a gap"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_answers_of_the_drafter(message):
    sent = drafter.write_response(message).SerializeToString()
    assert_same(drafter.read_response(drafter_pb2.SessionResponse.FromString(sent)), message)


def test_history_and_its_credit():
    history = History("s", 1, ROWS, (4, 5), 7)
    sent = verifier.write_history(history).SerializeToString()
    assert_same(verifier.read_history("s", 1, verifier_pb2.FeaturesResponse.FromString(sent)), history)
    assert verifier.read_features_request(verifier.write_subscribe("s", 3)) == ("s", 3)
    assert verifier.read_features_request(verifier.write_acknowledge(2**40)) == 2**40
    with pytest.raises(AerieError, match="this version"):
        verifier.read_features_request(verifier_pb2.FeaturesRequest())


@pytest.mark.parametrize(("hidden", "taps"), [(32, 1), (5120, 3), (200_000, 1)])
def test_history_travels_in_slices_of_256_kib(hidden, taps):
    """Of one row where a row is larger; together they are what they were."""
    rows = {tap: np.arange(50 * hidden, dtype=np.uint32).astype(np.uint16).reshape(50, hidden) for tap in range(taps)}
    whole = History("s", 1, Features(9, rows), tuple(range(50)), 2)
    parts = list(verifier.split_history(whole))
    assert [part.features.base for part in parts] == list(np.cumsum([9] + [len(p.tokens) for p in parts])[:-1])
    assert sum((part.tokens for part in parts), ()) == whole.tokens
    for tap, array in rows.items():
        np.testing.assert_array_equal(np.concatenate([part.features.rows[tap] for part in parts]), array)
    for part in parts:
        assert len(part.tokens) == 1 or verifier.write_history(part).ByteSize() <= 256 * 2**10 + 200
    row = 2 * hidden * taps
    assert len(parts) == -(-50 // max(1, 256 * 2**10 // row))


def test_sessions_as_they_are_listed():
    sessions = [SessionSummary("a", 1, 2, 3, 2**40, 5, 0.5, state) for state in ("prefill", "idle", "verifying")]
    sent = verifier.write_sessions(sessions).SerializeToString()
    assert verifier.read_sessions(verifier_pb2.ListSessionsResponse.FromString(sent)) == sessions


def test_features_travel_as_bfloat16():
    """Ties to even, as hardware rounds; the values are worked out by hand from the formats."""
    given = np.array(
        [[0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, np.inf, -np.inf]], np.float32
    )
    wanted = [0, 0x8000, 0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80, 0xFF80]
    assert values.to_bfloat16(given).tolist() == [wanted]
    assert values.to_bfloat16(np.array([[1.5]], np.float16)).tolist() == [[0x3FC0]]
    (nan,) = values.to_bfloat16(np.array([0x7FFFFFFF], np.uint32).view(np.float32))
    assert nan & 0x7F80 == 0x7F80
    assert nan & 0x7F
    bits = np.array([[1, 2]], np.uint16)
    assert values.to_bfloat16(bits) is bits


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_features_keep_their_bits(dtype):
    rows = np.random.default_rng(0).integers(0, 2**16, (3, 8)).astype(np.uint16)
    array = rows.view(np.float16) if dtype == np.float16 else rows.astype(dtype)
    back = values.read_tensor(types_pb2.Tensor.FromString(values.write_tensor(array).SerializeToString()))
    assert back.dtype == dtype
    assert back.tobytes() == array.tobytes()


def test_what_services_say_of_themselves():
    target = TargetInfo("smollm2", "w", "t", 30, 576, 49152, 8192, (0, 2), "bfloat16", "gpu", 64)
    sent = verifier.write_info(target).SerializeToString()
    assert verifier.read_info(verifier_pb2.GetInfoResponse.FromString(sent)) == target
    for fingerprint in (None, "w"):
        info = DrafterInfo("d", "eagle3", (2, 15, "final"), fingerprint, 14_000_000)
        status = DrafterStatus(info, 3, 0.25)
        sent = drafter.write_status(status).SerializeToString()
        assert drafter.read_status(drafter_pb2.GetInfoResponse.FromString(sent)) == status


def broken_tree(**changes):
    tree = values.write_tree(TREE)
    for name, value in changes.items():
        tree.ClearField(name)
        if name == "log_probs":
            tree.log_probs = value
        else:
            getattr(tree, name).extend(value)
    return tree


@pytest.mark.parametrize(
    "changes",
    [
        {"parents": [-1, 0, 2]},
        {"parents": [-1, 0]},
        {"parents": [0, 0, 0]},
        {"log_probs": b"\x00" * 11},
        {"tokens": [2**31, 1, 1]},
        {"tokens": [], "parents": [], "log_probs": b""},
    ],
    ids=str,
)
def test_broken_trees_are_refused(changes):
    with pytest.raises(AerieError) as refused:
        values.read_tree(broken_tree(**changes))
    assert refused.value.reason is Reason.INVALID_TREE


@pytest.mark.parametrize(
    "tensor",
    [
        types_pb2.Tensor(shape=[1], data=b"abcd"),
        types_pb2.Tensor(element_type=99, shape=[1], data=b"abcd"),
        types_pb2.Tensor(element_type=types_pb2.ELEMENT_TYPE_FLOAT32, shape=[2], data=b"abcd"),
        types_pb2.Tensor(element_type=types_pb2.ELEMENT_TYPE_FLOAT32, shape=[2**31, 2**31, 4], data=b"abcd"),
        types_pb2.Tensor(element_type=types_pb2.ELEMENT_TYPE_FLOAT32, shape=[0, 2**32 - 1, 2**32 - 1, 2**32 - 1]),
    ],
)
def test_broken_tensors_are_refused(tensor):
    with pytest.raises(AerieError) as refused:
        values.read_tensor(tensor)
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_features_of_unequal_taps_are_refused():
    one, two = (values.write_tensor(np.zeros((rows, 3), np.float32)) for rows in (1, 2))
    tap = types_pb2.Tap(layers=2)
    for entries in (
        [types_pb2.TapRows(tap=tap, rows=one), types_pb2.TapRows(tap=types_pb2.Tap(final=True), rows=two)],
        [types_pb2.TapRows(tap=tap, rows=one), types_pb2.TapRows(tap=tap, rows=one)],
        [types_pb2.TapRows(tap=types_pb2.Tap(), rows=one)],
        [types_pb2.TapRows(tap=tap, rows=values.write_tensor(np.zeros(3, np.float32)))],
    ):
        with pytest.raises(AerieError) as refused:
            values.read_features(types_pb2.Features(taps=entries))
        assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_messages_of_other_versions():
    for read, empty in (
        (verifier.read_request, verifier_pb2.SessionRequest(session="s")),
        (verifier.read_response, verifier_pb2.SessionResponse(session="s")),
        (drafter.read_request, drafter_pb2.SessionRequest(session="s")),
        (drafter.read_response, drafter_pb2.SessionResponse(session="s")),
    ):
        with pytest.raises(AerieError, match="this version"):
            read(empty)
    unknown = types_pb2.SessionError(reason="FROM_THE_FUTURE", message="m")
    assert values.read_error("s", unknown) == PortError("s", Reason.INTERNAL, "m")
    with pytest.raises(AerieError, match="finish reason 9"):
        values.read_finish(9)


def test_bad_samplers_are_refused_as_in_one_process():
    with pytest.raises(AerieError, match="temperature"):
        values.read_sampler(types_pb2.Sampler(temperature=-1.0))
    with pytest.raises(AerieError, match="top_p"):
        values.read_sampler(types_pb2.Sampler(top_p=0.0))
    assert values.read_sampler(types_pb2.Sampler()) == Sampler()
