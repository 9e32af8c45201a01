"""A run that is stopped from outside: nothing of it is left, and what can still be said is said."""

import os
import signal
import stat
import time

STOPPED_S = 5.0  # after Ctrl-C no process is left to work
LONG = {"rounds": 100_000}


def learning(start, **sections):
    """A run in which every peer has completed a round."""
    running = start(swarm=LONG, **sections)
    for peer in running.peers:
        running.wait_for(lambda peer=peer: running.events("round", peer))
    return running


def test_sigterm_stops_every_peer_in_order(start):
    running = learning(start)
    running.process.terminate()
    running.vanish(STOPPED_S)
    ended = running.end()
    assert ended.status == 1, ended.output
    assert ended.summary["status"] == "failed"
    assert "SIGTERM" in ended.summary["reason"]
    assert ended.summary["peers_lost"] == []
    assert [event["status"] for event in ended.events("finished")] == ["stopped"] * 4


def test_ctrl_c_stops_all_and_kills_who_does_not_answer(start):
    running = learning(start)
    os.kill(running.pid(3), signal.SIGSTOP)
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does it
    running.vanish(STOPPED_S)
    ended = running.end()
    assert ended.status == 1, ended.output
    assert ended.summary["status"] == "failed"
    assert "Ctrl-C" in ended.summary["reason"]
    assert "stopped by Ctrl-C" in ended.output
    assert "Traceback" not in ended.output
    (lost,) = ended.summary["peers_lost"]
    assert lost["peer"] == 3
    assert "did not stop" in lost["reason"]
    assert [event["status"] for event in ended.events("finished")] == ["stopped"] * 3
    assert ended.summary["rounds_completed"] >= 1
    assert (ended.folder / "report.html").is_file()


def test_impatience_does_not_cost_the_summary(start):
    running = learning(start)
    while running.process.poll() is None and not (running.folder / "summary.json").exists():
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.02)  # as fast as a hand can
    ended = running.end()
    assert ended.status == 1, ended.output
    assert ended.summary["status"] == "failed"
    assert "Ctrl-C" in ended.summary["reason"]
    assert "did not stop within" not in ended.output, "they were not given the time"
    assert "Traceback" not in ended.output


def test_no_peer_outlives_a_supervisor_that_is_killed(start):
    running = learning(start)
    assert len(running.processes()) == 1 + 1 + 4  # supervisor, fork server, peers
    (sockets,) = running.temporary.iterdir()
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    os.kill(running.pid(0), signal.SIGSTOP)
    running.process.kill()
    running.vanish()
    assert running.process.wait(10) == -signal.SIGKILL


def test_a_run_that_loses_its_fork_server_failed_and_says_so(start):
    running = learning(start)
    peers = {running.pid(peer) for peer in running.peers}
    (server,) = running.processes() - {running.process.pid} - peers
    os.kill(server, signal.SIGKILL)
    ended = running.end()
    assert ended.status == 1, ended.output
    assert "Traceback" not in ended.output
    assert ended.summary["status"] == "failed"
    assert "fork server" in ended.summary["reason"]


def test_sockets_find_a_place_where_temporary_paths_are_long(start, tmp_path):
    """A socket's path may have 107 bytes."""
    place = tmp_path / ("long" * 25)
    place.mkdir()
    ended = start(environment={"TMPDIR": str(place)}, swarm={"rounds": 1}, transport={"kind": "ipc"}).end()
    assert ended.status == 0, ended.output
    assert list(place.iterdir()) == []
