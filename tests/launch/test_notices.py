"""Notices that a host is about to go: by a file, and by a provider's metadata service."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.launch.command.flag_values import PROVIDERS
from phalanx.launch.nodes import notices
from phalanx.launch.nodes.notices import SERVICES, Notices, Service, asks_to_go


@pytest.fixture
def serve():
    """``serve(answers)`` starts a service that answers by path, and returns its address and what it was asked."""
    with contextlib.ExitStack() as stack:

        def start(answers):
            asked = []

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self):
                    asked.append((self.command, self.path, dict(self.headers)))
                    status, text = answers.get(self.path, (404, ""))
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())

                do_PUT = do_GET

                def log_message(self, *_):
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            server.daemon_threads = False
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}", asked

        yield start


def test_the_providers_of_the_flag_are_those_that_are_known():
    assert tuple(SERVICES) == PROVIDERS


@pytest.mark.parametrize(
    ("provider", "status", "text", "is_notice"),
    [
        ("aws", 404, "", False),
        ("aws", 200, '{"action": "terminate", "time": "2026-11-24T08:22:00Z"}', True),
        ("gcp", 200, "FALSE", False),
        ("gcp", 200, "TRUE\n", True),
        ("azure", 200, '{"DocumentIncarnation": 1, "Events": []}', False),
        ("azure", 200, '{"Events": [{"EventType": "Freeze"}]}', False),
        ("azure", 200, '{"Events": [{"EventType": "Preempt", "Resources": ["vm"]}]}', True),
        ("azure", 200, "[]", False),
        ("azure", 200, "nonsense", False),
        ("azure", 200, '{"Events": 5}', False),
        ("azure", 200, "[" * 60_000, False),
        ("azure", 500, "", False),
    ],
)
def test_each_providers_answer_is_understood(serve, provider, status, text, is_notice):
    address, asked = serve({"/notice": (status, text), "/token": (200, "secret")})
    known = SERVICES[provider]
    token_url = f"{address}/token" if known.token_url else ""
    service = Service(f"{address}/notice", known.headers, token_url, known.is_notice)
    assert asks_to_go(service) is is_notice
    headers = {name.lower(): value for name, value in asked[-1][2].items()}
    if provider == "aws":
        assert [one[0] for one in asked] == ["PUT", "GET"]
        assert headers["x-aws-ec2-metadata-token"] == "secret"
    else:
        assert all(headers[name.lower()] == value for name, value in known.headers.items())


def test_a_service_that_nobody_runs_gives_no_notice():
    assert not asks_to_go(Service("http://127.0.0.1:9/"))


@pytest.mark.parametrize("by", ["file", "url", "both"])
def test_a_notice_is_told_once(serve, tmp_path, monkeypatch, by):
    monkeypatch.setattr(notices, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(notices, "ASK_EVERY_S", 0.01)
    answers = {}
    address, asked = serve(answers)
    told = queue.Queue()
    file = tmp_path / "go"
    Notices(str(file) if by != "url" else "", f"{address}/go" if by != "file" else "", told.put, told.put)
    while by != "file" and not asked:
        pass
    assert told.empty()
    if by != "url":
        file.touch()
    answers["/go"] = (200, "")
    assert told.get(timeout=20) in (f"{file} is there", f"{address}/go says that this host will be taken away")
    for thread in threading.enumerate():
        if thread.name == "phalanx-notices":
            thread.join(20)
            assert not thread.is_alive()
    assert told.empty()


@pytest.mark.parametrize("how", ["touched", "made anew"])
def test_a_file_that_is_left_over_is_named_and_no_notice_until_it_changes(tmp_path, monkeypatch, how):
    monkeypatch.setattr(notices, "LOOK_EVERY_S", 0.01)
    file, told, left_over = tmp_path / "go", queue.Queue(), queue.Queue()
    file.touch()
    os.utime(file, (1, 1))
    Notices(str(file), "", told.put, left_over.put)
    assert left_over.get(timeout=20) == str(file)
    with pytest.raises(queue.Empty):
        told.get(timeout=0.1)
    if how == "made anew":
        file.unlink()
    file.touch()
    assert told.get(timeout=20) == f"{file} is there"
    assert left_over.empty()
