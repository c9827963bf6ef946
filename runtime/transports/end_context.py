"""Close a context's sockets without waiting for ever.

`zmq_ctx_term` waits until every socket has been taken apart, and was seen to wait though nothing was left to
send: a job that was done did not end.
"""

from threading import Thread

import zmq

from partc.runtime.log import log

PATIENCE_S = 5.0  # beyond what messages may still take


def end_context(context: "zmq.Context[zmq.Socket[bytes]]", linger_ms: int) -> None:
    """Close all sockets, whose messages have `linger_ms` left, and leave what does not end by then."""
    ending = Thread(target=context.destroy, args=(linger_ms,), daemon=True)
    ending.start()
    ending.join(linger_ms / 1000 + PATIENCE_S)
    if ending.is_alive():
        log.warning("sockets did not end within %.1f s, and are left to the end of this process", PATIENCE_S)
