"""Who may connect: libzmq asks here (ZAP) before a CURVE connection carries its first message, and only members pass.

The one handler of a context is a socket among the loop's own. A key that passes is named as its owner, so that a
message can be held against the key it came with. CURVE without a handler would let every key in: that is tried out.
"""

import time

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from transport.keys import Keys

SELF_TEST_S = 10.0
_DOMAIN = b"swarm"
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Gate:
    """Lets members in and nobody else; the sockets are closed by whoever opened them."""

    def __init__(self, keys: Keys, handler: zmq.Socket[bytes]) -> None:
        self._keys, self._owners = keys, {public: peer for peer, public in keys.public.items()}
        self.handler = handler
        handler.bind("inproc://zeromq.zap.01")

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Before it is bound: only whom the handler passes may speak to it."""
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)

    def unlock(self, dealer: zmq.Socket[bytes], peer: int) -> None:
        """Before it connects: it speaks to nobody but who has that peer's key."""
        _present(dealer, self._keys.public[self._keys.peer], self._keys.secret, self._keys.public[peer])

    def ban(self, frame: zmq.Frame) -> None:
        """Never again let the key in that this came with."""
        owner = frame.get("User-Id")
        self._owners = {public: peer for public, peer in self._owners.items() if str(peer) != owner}

    def answer(self) -> list[str]:
        """Answer what libzmq asks; returns the addresses that were turned away."""
        refused = []
        while int(self.handler.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            version, request, _, address, _, mechanism, *credentials = self.handler.recv_multipart()
            member = None
            if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
                member = self._owners.get(z85.encode(credentials[0]))
            if member is None:
                refused.append(address.decode(errors="backslashreplace")[:64])
                self.handler.send_multipart([version, request, b"400", b"no member of this swarm", b"", b""])
            else:
                self.handler.send_multipart([version, request, b"200", b"", str(member).encode(), b""])
        return refused

    def try_out(self, intruder: zmq.Socket[bytes], endpoint: str, accepting: zmq.Socket[bytes]) -> None:
        """Connect with a key that nobody knows, and raise `PermissionError` unless that fails."""
        _present(intruder, *zmq.curve_keypair(), self._keys.public[self._keys.peer])
        monitor = intruder.get_monitor_socket(_HANDSHAKES)
        poller = zmq.Poller()
        for socket in (self.handler, monitor, accepting):
            poller.register(socket, zmq.POLLIN)
        end = time.monotonic() + SELF_TEST_S
        failed = ended = False
        intruder.connect(endpoint)
        try:
            while not (failed and ended):  # what the monitor says of it is no business of the loop
                ready = dict(poller.poll(int(max(0.0, end - time.monotonic()) * 1e3)))
                if not ready:
                    raise PermissionError(f"no answer to a stranger's key within {SELF_TEST_S:g} s")
                self.answer()
                if monitor in ready:
                    if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        raise PermissionError("a stranger's key was let in: the allow-list is not in force")
                    failed = True
                    intruder.disconnect(endpoint)
                if accepting in ready:
                    ended = recv_monitor_message(accepting)["event"] == zmq.EVENT_DISCONNECTED or ended
        finally:
            intruder.disable_monitor()
            monitor.close(linger=0)


def _present(client: zmq.Socket[bytes], public: bytes, secret: bytes, server: bytes) -> None:
    client.setsockopt(zmq.CURVE_PUBLICKEY, public)
    client.setsockopt(zmq.CURVE_SECRETKEY, secret)
    client.setsockopt(zmq.CURVE_SERVERKEY, server)
