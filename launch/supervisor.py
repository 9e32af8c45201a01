"""Runs a planned swarm to its end: starts peers, hands out addresses, watches, settles; no wait without a limit.

One thread, one poll: the peers' reports, the fork server's, and signals. A peer that dies is named at once and the
others go on.
"""

import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

import zmq

from launch.libraries import release_library_pages
from launch.processes import Exited, ForkServer
from launch.results import Exit, Outcome
from peer.plan import Plan
from peer.process import Run, run_peer
from transport import control
from transport.keys import make_keys

STARTUP_LIMIT_S = 300.0
STOP_LIMIT_S = 4.0
CLOSING_LIMIT_S = 15.0

Phase = Literal["starting", "ready", "learning", "done", "settled", "ended"]


@dataclass
class PeerState:
    """What the supervisor knows of a peer."""

    id: int
    phase: Phase = "starting"
    pid: int = 0
    endpoint: str = ""
    round: int = 0
    waiting_for: list[int] = field(default_factory=list)
    payload: int = 0
    stream: int = 0
    validation_accuracy: float | None = None
    global_accuracy: float | None = None
    heard_at: float = 0.0
    moved_at: float = 0.0
    status: int | None = None
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.phase != "ended"


class View:
    """What a person sees of a run. This one shows nothing."""

    def begin(self, plan: Plan, folder: Path) -> None: ...

    def show(self, peers: dict[int, PeerState]) -> None: ...

    def round(self, peer: PeerState, facts: dict[str, object]) -> None: ...

    def trouble(self, text: str) -> None: ...

    def end(self) -> None: ...


class Supervisor:
    """One run of one plan. Make it before anything else starts a thread: it forks."""

    def __init__(self, plan: Plan, folder: Path, view: View, zero: float, replay: Path | None = None) -> None:
        self._plan, self._folder, self._view = plan, folder, view
        self._sockets = _folder_for_sockets()
        self._run = Run(
            secrets.token_bytes(16), folder, f"ipc://{self._sockets}/supervisor", self._sockets, zero, replay
        )
        self._peers = {id: PeerState(id) for id in plan.peers}
        self._started_at = datetime.now().astimezone().isoformat(timespec="seconds")
        self._startup_s: float | None = None
        self._reason = ""
        self._messages_missing = 0
        self._stopping = self._impatient = False
        self._signals: list[int] = []
        if plan.topology.transport.security == "curve":
            make_keys(self._run.keys, plan.peers)
        self._server = ForkServer(self._life)

    def _life(self, peer: int, incarnation: int) -> int:
        return run_peer(self._plan, self._run, peer, incarnation)

    def run(self) -> Outcome:
        """Run to the end. Whatever happens, no process is left and there is an outcome."""
        release_library_pages()
        context = zmq.Context()
        wake_reader, wake_writer = socket.socketpair()
        for end in (wake_reader, wake_writer):
            end.setblocking(False)
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, self._on_signal)
        wake_before = signal.set_wakeup_fd(wake_writer.fileno())
        self._wake = wake_reader
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(self._run.supervisor)
        self._poller = zmq.Poller()
        for source in (self._router, self._server, wake_reader):
            self._poller.register(source, zmq.POLLIN)
        self._view.begin(self._plan, self._folder)
        try:
            self._conduct()
        finally:
            self._view.end()
            self._server.close()
            signal.set_wakeup_fd(wake_before)
            # What is left is to write down what there is; one who is impatient must not lose it.
            for kind in (signal.SIGINT, signal.SIGTERM):
                signal.signal(kind, signal.SIG_IGN)
            self._router.close()
            context.term()
            wake_reader.close()
            wake_writer.close()
            shutil.rmtree(self._sockets, ignore_errors=True)
        return self._outcome()

    def _conduct(self) -> None:
        for id in self._peers:
            self._server.start(id)
        self._wait(lambda: not self._in_phase("starting"), STARTUP_LIMIT_S, "did not get ready")
        self._order(
            lambda peer: control.Addresses(
                {j: self._peers[j].endpoint for j in self._plan.neighbors.receivers[peer.id] if self._peers[j].endpoint}
            )
        )
        self._startup_s = time.monotonic() - self._run.zero
        self._mark("ready", "learning")
        self._wait(lambda: not self._in_phase("learning"), None, "")
        self._order(lambda _: control.Settle())
        self._wait(lambda: not self._in_phase("done"), self._plan.topology.transport.drain_s + 60.0, "did not settle")
        self._order(lambda _: control.Close())
        self._wait(lambda: not any(peer.alive for peer in self._peers.values()), CLOSING_LIMIT_S, "did not end")

    def _in_phase(self, phase: Phase) -> bool:
        return any(peer.phase == phase for peer in self._peers.values())

    def _mark(self, before: Phase, after: Phase) -> None:
        for peer in self._peers.values():
            if peer.phase == before:
                peer.phase, peer.moved_at = after, time.monotonic()

    def _order(self, order: Callable[[PeerState], control.Order]) -> None:
        for peer in self._peers.values():
            if peer.alive and peer.endpoint:
                try:
                    self._router.send_multipart([f"{peer.id}.0".encode(), control.encode(order(peer))], zmq.DONTWAIT)
                except zmq.ZMQError as error:
                    self._lose(peer, f"could not be told: {error}")

    def _wait(self, reached: Callable[[], bool], limit_s: float | None, reproach: str) -> None:
        """Serve until a condition holds; peers that stand in its way at the limit are killed."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while not reached():
            self._serve()
            now = time.monotonic()
            if self._stopping and now > self._stop_by:
                asked = (
                    "was killed at the second asking" if self._impatient else f"did not stop within {STOP_LIMIT_S:g} s"
                )
                self._kill(self._peers.values(), asked)
            elif self._stopping and not any(peer.alive for peer in self._peers.values()):
                return
            elif end is not None and now > end:
                phase = min((peer.phase for peer in self._peers.values() if peer.alive), key=_ORDER.index)
                self._kill(
                    [peer for peer in self._peers.values() if peer.phase == phase], f"{reproach} within {limit_s:g} s"
                )
                end = now + CLOSING_LIMIT_S
            elif end is None:
                self._kill_stragglers(now)

    def _kill_stragglers(self, now: float) -> None:
        """When all others are done, a peer that is silent or stuck must not keep them."""
        learning = [peer for peer in self._peers.values() if peer.phase == "learning"]
        if not self._in_phase("done") or self._stopping:
            return
        silent_s = 2 * self._plan.topology.transport.dead_s
        stuck_s = silent_s + 2 * self._plan.topology.swarm.round_deadline_s
        for peer in learning:
            if now - peer.heard_at > silent_s:
                self._kill([peer], f"silent for {silent_s:g} s while all others were done")
            elif all(now - other.moved_at > stuck_s for other in learning):
                self._kill([peer], f"no progress for {stuck_s:g} s")

    def _kill(self, peers: Iterable[PeerState], reason: str) -> None:
        for peer in peers:
            if peer.alive and not peer.reason:
                self._lose(peer, reason)
                self._server.kill(peer.id)

    def _lose(self, peer: PeerState, reason: str) -> None:
        peer.reason = reason
        self._view.trouble(f"peer {peer.id} {reason}")

    def _serve(self) -> None:
        ready = {source for source, _ in self._poller.poll(200)}
        if self._wake.fileno() in ready:
            self._wake.recv(4096)
        self._obey_signals()
        if self._router in ready:
            self._read_reports()
        if self._server.fileno() in ready:
            self._read_events()
        self._view.show(self._peers)

    def _read_events(self) -> None:
        try:
            events = self._server.events()
        except ConnectionError:
            self._poller.unregister(self._server)
            self._reason = "the fork server died, and all peers with it"
            for peer in self._peers.values():
                if peer.alive:
                    peer.phase = "ended"
                    self._lose(peer, "was killed with the fork server")
            return
        for event in events:
            peer = self._peers[event.peer]
            if isinstance(event, Exited):
                self._on_exit(peer, event.status)
            else:
                peer.pid, peer.heard_at = event.pid, time.monotonic()

    def _read_reports(self) -> None:
        while True:
            try:
                routing_id, frame = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            peer = self._peers[int(routing_id.split(b".")[0])]
            peer.heard_at = time.monotonic()
            match control.decode_report(frame):
                case control.Ready(endpoint=endpoint):
                    peer.endpoint, peer.phase = endpoint, "ready"
                case control.Progress() as progress:
                    round, _ = self._plan.place(progress.round)
                    if round != peer.round:
                        peer.moved_at = peer.heard_at
                    peer.round, peer.waiting_for = round, progress.waiting_for
                    peer.payload, peer.stream = progress.payload, progress.stream
                case control.Round(facts=facts):
                    peer.moved_at = peer.heard_at
                    peer.validation_accuracy = facts["validation_accuracy"]
                    peer.global_accuracy = facts["global_accuracy"]
                    self._messages_missing += len(facts["missing"])
                    peer.round = min(facts["round"] + 1, len(self._plan.rounds))
                    self._view.round(peer, facts)
                case control.Done():
                    peer.phase = "done"
                case control.Settled():
                    peer.phase = "settled"
                case control.CoordinatorLost(reason=text):
                    self._lose_coordinator(f"peer {peer.id} gave it up: {text}")
                case control.Failed(traceback=text):
                    peer.reason = text.strip().splitlines()[-1]
                    self._view.trouble(f"peer {peer.id} failed; the others go on.\n{text}")

    def _on_exit(self, peer: PeerState, status: int) -> None:
        self._read_reports()
        expected = status == 0 and (self._stopping or peer.phase == "settled")
        peer.phase, peer.status = "ended", status
        if not expected and not peer.reason:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            log = self._run.peer_folder(peer.id) / "log.txt"
            self._lose(peer, f"{how}; its log is {log}")
            said = log.read_text(errors="replace").splitlines()[-30:] if log.exists() else []
            if said:
                self._view.trouble("\n".join(said))
        if peer.id == self._plan.coordinator and peer.reason:
            self._lose_coordinator(peer.reason)
        elif not self._stopping and self._plan.coordinator is not None and self._lost_clients():
            self._stop("every client was lost")

    def _lost_clients(self) -> bool:
        """Whether no client is left, or finished in order."""
        return all(self._peers[client].reason for client in self._plan.clients)

    def _lose_coordinator(self, how: str) -> None:
        """Without the coordinator of a coordinated method nobody can go on: all keep what they have, and stop."""
        coordinator = self._plan.coordinator
        if self._stopping or coordinator is None or not self._plan.method.coordinated:
            return
        self._stop(f"the coordinator, peer {coordinator}, is lost: {how}")
        self._kill([self._peers[coordinator]], "was lost")

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _obey_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._stopping:
                self._impatient, self._stop_by = True, time.monotonic()
                continue
            self._stop(f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}")

    def _stop(self, reason: str) -> None:
        self._stopping, self._reason = True, reason
        self._stop_by = time.monotonic() + STOP_LIMIT_S
        self._view.trouble(f"{reason}: stopping the peers")
        self._order(lambda _: control.Stop())

    def _outcome(self) -> Outcome:
        peers = self._peers.values()
        lost = [peer for peer in peers if peer.reason]
        worse = lost or self._messages_missing
        status: Literal["complete", "degraded", "failed"] = "degraded" if worse else "complete"
        reason = self._reason
        if self._stopping:
            status = "failed"
        elif self._lost_clients():
            status, reason = "failed", reason or "every peer was lost"
        return Outcome(
            status=status,
            started_at=self._started_at,
            wall_s=round(time.monotonic() - self._run.zero, 3),
            startup_s=None if self._startup_s is None else round(self._startup_s, 3),
            reason=reason,
            exits={peer.id: Exit(peer.status, peer.reason) for peer in peers},
            foretold_payload_by_round=[self._plan.payload(round) for round in self._plan.rounds],
        )


def _folder_for_sockets() -> Path:
    """A private folder with a short name: the path of a Unix socket has 107 bytes at most."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="swarm-", dir=usual if len(usual) < 60 else "/tmp"))


_ORDER: list[Phase] = ["starting", "ready", "learning", "done", "settled", "ended"]
