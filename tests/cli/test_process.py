"""The command as a process: closed and full streams, terminals, Ctrl-C."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "services.cli.main"]


def shell(script: str, tiny: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script in which $A is the command and $T a tiny target with its options."""
    environment = {**os.environ, "A": " ".join(COMMAND), "T": f"--target {tiny} --drafter off --max-tokens 4"}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=120)


def restore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a runner in the background ignores it, and so would its children


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("$A generate hi $T > /dev/full", 1, b"aerie: cannot write to standard output: No space left on device\n"),
        ("$A --help > /dev/full", 1, b"aerie: cannot write to standard output: No space left on device\n"),
        ("$A generate hi $T >&-", 1, b"aerie: standard output is closed\n"),
        ("$A generate - $T <&-", 2, b"aerie: standard input is closed\n"),
        ("$A chat $T <&-", 2, b"aerie: standard input is closed\n"),
        ("$A chat $T 0> /dev/null", 2, b"aerie: cannot read standard input: Bad file descriptor\n"),
        (
            "AERIE_LOG=/dev/full $A generate hi $T --drafter auto > /dev/null",
            0,
            b"aerie: no drafter fits the target: decoding plainly\n",
        ),
        ("$A generate $'\\xff' $T", 2, b"aerie: an argument is not UTF-8: '\\udcff'\n"),
        ("$A generate hi $T --stop $'\\xff'", 2, b"aerie: an argument is not UTF-8: '\\udcff'\n"),
        ("$A generate hi $T 2>&- | grep -q .", 0, b""),
        ("set -o pipefail; $A generate hi $T | true", 1, b""),
    ],
)
def test_streams_that_fail_are_one_line(tiny, script, code, error):
    done = shell(script, tiny)
    assert (done.returncode, done.stderr, done.stdout) == (code, error, b"")


def test_a_terminal_that_is_not_utf8_gets_question_marks(tiny):
    done = shell("PYTHONIOENCODING=ascii $A generate hi $T", tiny)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


@pytest.mark.parametrize("delay", [0.3, 0.8, 1.5])
def test_two_interrupts_end_loading_quietly_with_130(delay):
    process = subprocess.Popen(
        [*COMMAND, "generate", "hi", "--max-tokens", "2000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=restore_interrupts,
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, b"aerie: interrupted\n")


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.seen = b""
        pid, self._fd = pty.fork()
        if pid == 0:
            restore_interrupts()
            os.execv(sys.executable, [*COMMAND, *arguments])
        self._pid = pid

    def expect(self, text: bytes) -> bytes:
        """Read up to ``text``, or to the end when it is empty."""
        while not text or text not in self.seen:
            if not self.read(4096):
                assert not text, self.seen
                break
        before, _, self.seen = self.seen.partition(text) if text else (self.seen, b"", b"")
        return before

    def read(self, count: int) -> bytes:
        """What comes next; nothing at the end."""
        ready, _, _ = select.select([self._fd], [], [], 30)
        assert ready, self.seen
        try:
            data = os.read(self._fd, count)
        except OSError:  # the other side is gone
            return b""
        self.seen += data
        return data

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_chat_on_a_terminal_has_a_banner_prompts_and_stops_answers(tiny):
    terminal = Terminal("chat", "--target", tiny, "--drafter", "off", "--max-tokens", "900", "--ignore-eos")
    banner = terminal.expect(b"> ")
    assert banner.count(b"\n") == 1
    assert banner.startswith(b"aerie chat: target")
    terminal.type(b"hi\n")
    terminal.expect(b"hi\r\n")
    time.sleep(0.5)
    terminal.type(b"\x03")
    terminal.expect(b"\r\n[stopped]\r\n> ")
    terminal.type(b"\xff\n")
    terminal.expect(b"not UTF-8")
    terminal.expect(b"> ")
    terminal.type(b"/exit\n")
    terminal.expect(b"")
    assert terminal.wait() == 0


def test_interrupt_on_a_terminal_puts_its_message_on_a_line_of_its_own(tiny):
    terminal = Terminal("generate", "hi", "--target", tiny, "--drafter", "off", "--max-tokens", "900", "--ignore-eos")
    while len(terminal.seen) < 20:
        assert terminal.read(20)
    terminal.type(b"\x03")
    assert terminal.expect(b"").endswith(b"\r\naerie: interrupted\r\n")
    assert terminal.wait() == 130
