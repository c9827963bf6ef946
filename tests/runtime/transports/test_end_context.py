"""Sockets are closed in time, or left: a job that is done ends."""

import logging

import pytest
import zmq

from partc.runtime.transports import end_context as module
from partc.runtime.transports.end_context import end_context


def test_sockets_that_are_done_are_closed() -> None:
    context = zmq.Context()
    sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER)]

    end_context(context, linger_ms=10)

    assert context.closed
    assert all(opened.closed for opened in sockets)


def test_one_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    context = zmq.Context()
    stuck = zmq.Context.shadow(context).socket(zmq.DEALER)  # which the context does not know, but waits for

    with caplog.at_level(logging.WARNING, logger="partc"):
        end_context(context, linger_ms=0)

    assert "sockets did not end" in caplog.text
    stuck.close()
