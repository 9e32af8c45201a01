"""What a peer does to itself when the plan of faults says so: it dies, its learning stands still, it reads slowly.

Each is written down before it is brought about, and exact: bound to a point of a round and not to seconds.
"""

import os
import signal
import threading

from peer.peer import Peer
from topology.faults import Crash, SlowReader, Stall
from topology.reach import in_rounds
from transport.faultlog import FaultLog


def befall(peer: Peer, log: FaultLog) -> None:
    """Have this peer's own faults happen to it from now on."""
    of_peer = [rule for rule in peer.topology.fault if isinstance(rule, Crash | Stall | SlowReader)]
    of_peer = [rule for rule in of_peer if rule.peer == peer.id]

    def at(round: int, phase: str) -> None:
        for rule in of_peer:
            if not isinstance(rule, SlowReader) and (rule.at.round, rule.at.phase) == (round, phase):
                log.write(rule, peer=peer.id, round=round, phase=phase)
                if isinstance(rule, Crash):
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    _stand_still(rule.for_s)

    def slowly(sender: int) -> None:
        for rule in of_peer:
            if isinstance(rule, SlowReader) and in_rounds(peer.round, rule.rounds):
                log.write(rule, peer=peer.id, round=peer.round, sender=sender, receiver=peer.id)
                _stand_still(rule.delay_ms / 1e3)

    peer.at_phase.append(at)
    peer.at_release.append(slowly)


def _stand_still(seconds: float) -> None:
    threading.Event().wait(seconds)
