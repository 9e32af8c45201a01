"""The talk between supervisor and peers: who is where, how far it is, when to stop. It carries no learning data.

Each peer opens one DEALER to the supervisor's ROUTER, over a Unix socket in a private folder.
"""

from typing import Any

import msgspec
from msgspec import Struct


class Ready(Struct, tag=True, forbid_unknown_fields=True):
    """This peer is bound and waits for the addresses of its neighbors."""

    endpoint: str


class Progress(Struct, tag=True, forbid_unknown_fields=True):
    """Where a peer is: its round, whom it waits for, and the bytes so far."""

    round: int
    waiting_for: list[int]
    payload: int
    stream: int


class Round(Struct, tag=True, forbid_unknown_fields=True):
    """A peer finished a round; the facts are those of its journal."""

    facts: dict[str, Any]


class Done(Struct, tag=True, forbid_unknown_fields=True):
    """This peer has learnt all it will; its neighbors have got, or given up, everything it offered."""


class Settled(Struct, tag=True, forbid_unknown_fields=True):
    """This peer has compared its books with the kernel's."""


class Failed(Struct, tag=True, forbid_unknown_fields=True):
    """This peer cannot go on."""

    traceback: str


class CoordinatorLost(Struct, tag=True, forbid_unknown_fields=True):
    """This peer gave the coordinator up, and waits for the order to stop."""

    reason: str


class Addresses(Struct, tag=True, forbid_unknown_fields=True):
    """Where each neighbor is bound. Every peer is bound by now."""

    endpoints: dict[int, str]


class Stop(Struct, tag=True, forbid_unknown_fields=True):
    """Stop learning at once, keep what there is, and leave."""


class Settle(Struct, tag=True, forbid_unknown_fields=True):
    """All peers are done: fall silent, compare your books with the kernel's."""


class Close(Struct, tag=True, forbid_unknown_fields=True):
    """All books are compared: close the sockets and end."""


Report = Ready | Progress | Round | Done | Settled | Failed | CoordinatorLost
Order = Addresses | Stop | Settle | Close

encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
