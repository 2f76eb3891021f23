import pytest

from services.runtime.addresses import check_exposure, parse_address
from services.speculation.errors import AerieError, Reason


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, True),
        ("127.3.2.1:1", "127.3.2.1", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "[::1]", 80, True),
        ("unix:/tmp/s", "", 0, True),
        ("unix:s", "", 0, True),
        ("0.0.0.0:50051", "0.0.0.0", 50051, False),
        ("[::]:50051", "[::]", 50051, False),
        ("verifier:50051", "verifier", 50051, False),
        ("localhost.example:1", "localhost.example", 1, False),
        ("192.168.1.5:65535", "192.168.1.5", 65535, False),
    ],
)
def test_addresses_are_read(text, host, port, loopback):
    address = parse_address(text)
    assert (address.text, address.host, address.port, address.is_loopback) == (text, host, port, loopback)


@pytest.mark.parametrize(
    "text",
    [
        *("", "50051", ":50051", "host", "host:", "host:x", "host:65536", "host:-1", "host:1_0", "host:１"),
        *("::1:80", "[::1:80", "a b:1", "unix:", "unix:/" + "x" * 100, "unix:/a\0b"),
    ],
)
def test_what_is_no_address_is_refused_by_name(text):
    with pytest.raises(AerieError) as refused:
        parse_address(text, "--listen")
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert refused.value.message.startswith("--listen is ")


@pytest.mark.parametrize(
    ("text", "keys", "insecure", "fine"),
    [
        ("127.0.0.1:1", (), False, True),
        ("unix:/s", (), False, True),
        ("0.0.0.0:1", (), False, False),
        ("host:1", (), False, False),
        ("0.0.0.0:1", ("k",), False, True),
        ("0.0.0.0:1", (), True, True),
    ],
)
def test_listening_beyond_the_machine_needs_a_key_or_a_word(text, keys, insecure, fine):
    if fine:
        check_exposure(parse_address(text), keys, insecure)
        return
    with pytest.raises(AerieError, match="--insecure"):
        check_exposure(parse_address(text), keys, insecure)
