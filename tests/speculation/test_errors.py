import pytest

from services.speculation.errors import AerieError, Reason
from services.speculation.messages import Features


def test_reasons_travel_as_their_own_names():
    assert all(reason.value == reason.name for reason in Reason)


def test_errors_carry_a_reason_for_programs_and_a_sentence_for_people():
    with pytest.raises(AerieError, match=r"^PROMPT_EMPTY: the prompt has no tokens$") as caught:
        raise AerieError(Reason.PROMPT_EMPTY, "the prompt has no tokens")
    assert (caught.value.reason, caught.value.message) == (Reason.PROMPT_EMPTY, "the prompt has no tokens")


def test_features_without_taps_have_no_rows():
    assert len(Features(3, {})) == 0
    assert len(Features(3, {1: [[0.0]] * 5, "final": [[0.0]] * 5})) == 5
