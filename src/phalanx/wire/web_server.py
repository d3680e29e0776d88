"""The HTTP server of the metrics and of the live page: waitress, from the extra ``web``.

waitress needs no further package, and limits what a stranger can do: the number of connections, the size of headers and
bodies, the time that a connection may idle. ``ThreadingHTTPServer`` of the standard library has none of these limits:
each connection takes a thread for as long as it likes. uvicorn and starlette would bring five packages.

**DNS rebinding.** The page of a stranger may make a browser call a server on loopback under a name of the stranger's.
So a request to such a server must name it as ``localhost`` or by a loopback address.
"""

from __future__ import annotations

import importlib.util
import socket
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

App = Callable[[dict[str, Any], Any], Iterable[bytes]]

LOOPBACK = "127.0.0.1"
_PACKAGES = ("prometheus_client", "waitress")
_MOST_CONNECTIONS, _MOST_HEADER_BYTES, _MOST_BODY_BYTES, _IDLE_S = 100, 16384, 4096, 30


def missing_packages() -> str:
    """Return what to install if packages of the extra ``web`` are missing; "" if none is."""
    missing = [name.replace("_", "-") for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {verb} not installed: pip install 'phalanx-torch[web]'"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``[HOST:]PORT``; without a host, that is loopback.

    Raises:
        ValueError: The text has another form.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535) or not (host or text == port):
        raise ValueError("must be PORT or HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def is_loopback(host: str) -> bool:
    """Return whether a name or address reaches only this host."""
    import ipaddress  # not at the top: phalanx run imports this module

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket, path: str) -> str:
    """Return the address at which a browser finds `path` on a server."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def serve(app: App, listener: socket.socket, num_threads: int) -> None:
    """Answer requests until this process ends.

    Args:
        listener: Socket on which the server listens.
        num_threads: Number of requests that are answered at the same time; others wait.
    """
    import logging

    import waitress

    logging.getLogger("waitress").addHandler(logging.NullHandler())  # otherwise its warnings reach the terminal
    is_local = is_loopback(listener.getsockname()[0])
    waitress.serve(
        _guarded(app) if is_local else app,
        sockets=[listener],
        threads=num_threads,
        ident=None,
        connection_limit=_MOST_CONNECTIONS,
        max_request_header_size=_MOST_HEADER_BYTES,
        max_request_body_size=_MOST_BODY_BYTES,
        channel_timeout=_IDLE_S,
        clear_untrusted_proxy_headers=True,
        _quiet=True,
    )


def _guarded(app: App) -> App:
    """Return an app that refuses requests under a name that does not mean this host alone."""

    def guarded(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        try:
            name = urllib.parse.urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname or ""
        except ValueError:
            name = ""
        if is_loopback(name):
            return app(environ, start)
        start("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"This server answers to localhost and 127.0.0.1.\n"]

    return guarded
