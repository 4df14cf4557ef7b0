"""One HTTP exchange with a server, within one deadline and a limit of bytes.

HTTP clients limit the time of each read, so a server that drips headers, informational answers, chunk sizes or trailers
holds them forever. Here every call of the socket gets what is left of one deadline, and every received byte counts.
"""

import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpcore

_PIECE = 2**16


class ExpiredError(Exception):
    """The deadline of an exchange is over."""


class TooLargeError(Exception):
    """An answer has too many bytes."""


class Deadline:
    """The end of everything that belongs to one answer.

    Args:
        seconds: The time until then.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def count_seconds(self) -> float:
        """Return the seconds left, more than 0.

        Raises:
            ExpiredError: None are left.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise ExpiredError
        return seconds


@dataclass(frozen=True)
class Response:
    """An answer.

    Attributes:
        status: The HTTP status.
        headers: The headers, with names in lower case.
        body: The body as it was sent: no content encoding is decoded.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Address:
    """The place of a server.

    Attributes:
        scheme: "http" or "https".
        host: A name or an IP address, without brackets.
        port: The port.
        context: The certificates for https.
    """

    scheme: str
    host: str
    port: int
    context: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def exchange(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes, *, deadline: Deadline, most: int
    ) -> Response:
        """Send a request over a new connection, and return the answer.

        Args:
            method: GET or POST.
            path: The absolute path.
            headers: The headers, without the host.
            content: The body.
            deadline: When the last byte of the answer must have arrived.
            most: Largest number of bytes of the answer, headers included.

        Raises:
            ExpiredError: The deadline is over.
            TooLargeError: The answer is larger.
            OSError: The server cannot be reached, or closes the connection.
            ValueError: The answer is not HTTP.
        """
        scheme, host = self.scheme.encode(), self.host.encode()
        connection = httpcore.HTTPConnection(
            httpcore.Origin(scheme, host, self.port),
            ssl_context=self.context,
            network_backend=_Backend(deadline, most),
        )
        url = httpcore.URL(scheme=scheme, host=host, port=self.port, target=path.encode())
        headers = {"Host": str(self), "Connection": "close", **headers}
        try:
            with (
                connection,
                connection.stream(method, url, headers=[*headers.items()], content=content or None) as response,
            ):
                body = bytearray()
                for piece in response.iter_stream():
                    body += piece
                    deadline.count_seconds()
        except httpcore.ProtocolError as error:
            raise ValueError(str(error)) from error
        except httpcore.NetworkError as error:
            raise OSError(str(error)) from error
        received = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        return Response(response.status, received, bytes(body))


class _Backend(httpcore.NetworkBackend):
    """Connections with a deadline."""

    def __init__(self, deadline: Deadline, most: int) -> None:
        self._deadline, self._most = deadline, most

    def connect_tcp(self, host: str, port: int, *_args: Any, **_more: Any) -> "_Stream":
        """Connect to the first address of a host that accepts."""
        failure = OSError(f'"{host}" has no address')
        for family, address in _resolve(host, port, self._deadline):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.settimeout(self._deadline.count_seconds())
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except TimeoutError as error:
                connection.close()
                raise ExpiredError from error
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
            else:
                return _Stream(connection, self._deadline, self._most)
        raise httpcore.ConnectError(str(failure)) from failure


def _resolve(host: str, port: int, deadline: Deadline) -> Sequence[tuple[socket.AddressFamily, Any]]:
    """Return the addresses of a host. The system's call has no time limit, so it runs in a separate thread."""
    results: list[Any] = []

    def look_up() -> None:
        try:
            results.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            results.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(deadline.count_seconds())
    if not results:
        raise ExpiredError
    if isinstance(results[0], Exception):
        raise httpcore.ConnectError(str(results[0])) from results[0]
    return [(entry[0], entry[4]) for entry in results[0]]


class _Stream(httpcore.NetworkStream):
    """A connection with the remaining time for every call and a limit of received bytes."""

    def __init__(self, connection: socket.socket, deadline: Deadline, most: int) -> None:
        self._connection, self._deadline, self._left = connection, deadline, most

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes; none at the end."""
        self._connection.settimeout(self._deadline.count_seconds())
        try:
            received = self._connection.recv(min(max_bytes, _PIECE))
        except TimeoutError as error:
            raise ExpiredError from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error
        self._left -= len(received)
        if self._left < 0:
            raise TooLargeError
        return received

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes."""
        self._connection.settimeout(self._deadline.count_seconds())
        try:
            self._connection.sendall(buffer)
        except TimeoutError as error:
            raise ExpiredError from error
        except OSError as error:
            # After it, httpcore reads the answer: some servers refuse a prompt before they have read it.
            raise httpcore.WriteError(str(error)) from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> "_Stream":
        """Return the encrypted connection."""
        self._connection.settimeout(self._deadline.count_seconds())
        try:
            encrypted = ssl_context.wrap_socket(self._connection, server_hostname=server_hostname)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, TimeoutError):
                raise ExpiredError from error
            if isinstance(error, OSError):
                raise httpcore.ConnectError(str(error)) from error
            raise
        return _Stream(encrypted, self._deadline, self._left)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def get_extra_info(self, info: str) -> Any:
        """Return nothing about a connection that serves one request."""
