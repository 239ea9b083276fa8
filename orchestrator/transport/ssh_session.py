"""Runs one command on an open SSH connection: its output in pieces, and its exit code.

    with RemoteCommand(transport, "cat", b"hello") as command:
        output = b"".join(data for stream, data in command.pieces(deadline.left) if stream == STDOUT)

paramiko limits neither requests nor writes, so they run in a thread of their own and the reader keeps its deadline on a
dead link. Raises paramiko's and sockets' errors; `ssh.py` translates them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import selectors
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST

STDOUT, STDERR = 1, 2
HUNG_UP = "the host hung up during the login"
MAX_PIECE_BYTES = 1 << 20
_TICK_S = 1.0
_SEND_BYTES = 1 << 18  # paramiko copies the rest after each packet, hence slices of long inputs
_CLOSE_S = 1.0


def _on_channel_request(channel: Any, message: paramiko.Message) -> None:
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = signal.Signals.__members__.get(f"SIG{message.get_text()}")
        channel.exit_status = 128 + number if number else 255
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()  # the channel number, which paramiko had read before
    channel._handle_request(message)


class SignalAwareTransport(paramiko.Transport):
    """paramiko drops the `exit-signal` message (RFC 4254, 6.10); here it sets 128 + n, as in a shell.

    servers_offer: the server's algorithms by paramiko's kind, once known. first_keys: host key types to request first.
    goodbye: the server's message when it disconnects.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.servers_offer: dict[str, str] = {}
        self.first_keys: tuple[str, ...] = ()
        self.goodbye = ""
        super().__init__(*arguments, **options)

    def _parse_kex_init(self, message: paramiko.Message) -> None:
        parsed = self._really_parse_kex_init(paramiko.Message(message.get_remainder()))  # type: ignore[attr-defined]
        kinds = {"kex": "kex", "host key": "server_key", "cipher": "server_encrypt", "mac": "server_mac"}
        self.servers_offer = {kind: ",".join(parsed[f"{name}_algo_list"]) for kind, name in kinds.items()}
        super()._parse_kex_init(message)  # type: ignore[misc]

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """paramiko requests certificates last, so that a host presents none."""
        usual = super().preferred_keys
        first = [name for name in self.first_keys if name in usual]
        return (*first, *(name for name in usual if name not in first))

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()  # a code, less specific than the text
        self.goodbye = message.get_text()

    _channel_handler_table = {  # noqa: RUF012
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _on_channel_request,
    }


class LinkLostError(Exception):
    """The channel ended without an exit code."""


class RemoteCommand:
    """A running command. Leaving the context closes its standard input and its channel."""

    def __init__(
        self,
        transport: paramiko.Transport,
        command: str,
        stdin: bytes | Iterable[bytes],
        *,
        hold_stdin: bool = False,
        open_s: float = 60,
    ) -> None:
        """hold_stdin: keep standard input open after `stdin` is sent. open_s: time for the host to start it."""
        self._transport = transport
        self._open_s = open_s
        self._channel: concurrent.futures.Future[paramiko.Channel] = concurrent.futures.Future()
        self._left = threading.Event()
        _in_background(lambda: self._start(command, stdin, hold_stdin))

    def __enter__(self) -> RemoteCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._channel.done() and not self._channel.exception():
            # On a dead link even closing can block; the connection's end then closes the channel.
            _in_background(lambda: _close(self._channel.result())).join(_CLOSE_S)

    def pieces(self, left: Callable[[], float]) -> Iterator[tuple[int, bytes]]:
        """(STDOUT or STDERR, bytes) until both have ended; (STDOUT, b"") once a second without output.

        left: seconds until TimeoutError.
        """
        channel = self._opened(left)
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            while True:
                if not left():
                    raise TimeoutError
                selector.select(min(_TICK_S, left()))
                ended = channel.eof_received or channel.closed  # asked before reading: nothing comes after it
                got = list(_ready(channel))
                yield from got
                if ended and not got:
                    return
                if not got:
                    yield STDOUT, b""

    def exit_code(self, left: Callable[[], float]) -> int:
        """128 + n if signal n ended the command. Raises TimeoutError, LinkLostError."""
        channel = self._opened(left)
        if not channel.status_event.wait(left()):
            raise TimeoutError
        if channel.exit_status < 0:
            raise LinkLostError("the command ended without an exit code")
        return channel.exit_status

    def _opened(self, left: Callable[[], float]) -> paramiko.Channel:
        try:
            return self._channel.result(min(left(), self._open_s))
        except concurrent.futures.TimeoutError as error:  # not the builtin before Python 3.11
            raise TimeoutError from error

    def _start(self, command: str, stdin: bytes | Iterable[bytes], hold_stdin: bool) -> None:
        try:
            channel = self._transport.open_session(timeout=self._open_s)
            channel.exec_command(command)
        except Exception as error:
            self._channel.set_exception(error)
            return
        self._channel.set_result(channel)
        if self._left.is_set():
            _close(channel)
            return
        try:
            for piece in [stdin] if isinstance(stdin, bytes) else stdin:
                for position in range(0, len(piece), _SEND_BYTES):
                    channel.sendall(piece[position : position + _SEND_BYTES])
            if not hold_stdin:
                channel.shutdown_write()
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the command ended before reading everything, or the connection broke: the reader finds out


def _close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # the connection is closed or broken
        channel.close()


def _ready(channel: paramiko.Channel) -> Iterator[tuple[int, bytes]]:
    if channel.recv_ready():
        yield STDOUT, channel.recv(MAX_PIECE_BYTES)
    if channel.recv_stderr_ready():
        yield STDERR, channel.recv_stderr(MAX_PIECE_BYTES)


def _in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, name="orch-ssh", daemon=True)
    thread.start()
    return thread
