"""The page is whole and tells the worst first; its figures show the numbers, nothing on top of another."""

import base64
import re
from html.parser import HTMLParser
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from launch import units
from launch.figures import DRAWINGS, STYLE, draw_accuracy, draw_edge_bytes, draw_latency, draw_round_time
from launch.report import list_troubles, write_report
from launch.results import Exit, load


class Reader(HTMLParser):
    """Collects tags, attributes and the text a person would read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(run) -> Reader:
    reader = Reader(write_report(run.path).read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


RING = '[graph]\nkind = "ring"\n'


def test_the_page_needs_nothing_from_outside_and_holds_every_figure(make_run, play_ring):
    run = make_run(peers=4, rounds=3, extra=RING)
    play_ring(run)
    reader = read(run)
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]|@import|url\(|<script|<link", re.sub(r"base64,[^\"]+", "", page), re.I)
    sources = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    assert not [attributes for _, attributes in reader.tags if "href" in attributes]
    pictures = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in sources]
    names = ["accuracy", "edge-bytes", "latency", "round-time"]
    assert pictures == [(run.path / "figures" / f"{name}.png").read_bytes() for name in names]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert all(attributes["alt"] for tag, attributes in reader.tags if tag == "img")
    assert not list(run.path.glob("*.part"))


def test_a_clean_run_says_so_and_gives_its_numbers_with_units(make_run):
    run = make_run(peers=2, rounds=1, seed=9)
    for peer in range(2):
        run.start(peer)
        run.deliver(peer, 1, 1 - peer, payload=2_500_000, parts_ms=(1.0, 10.0, 1.0, 0.0, 0.5))
        run.round(peer, 1, validation=0.5, local=0.25, overall=0.75 if peer else 0.5)
        run.book(peer, (1 - peer, 1, 2_500_000, 2_525_000, 1000))
        run.connect(peer, 1 - peer)
        run.finish(peer, peak_rss_mb=321.4)
    run.close(startup_s=1.5, wall_s=75.0, foretold_payload_by_round=[5_000_000], exits={0: Exit(0), 1: Exit(0)})
    assert list_troubles(load(run.path)) == []
    text = read(run).text
    for fact in (
        "Complete: 2 peers, 1 of 1 rounds.",
        "Global accuracy 0.6250 selected: round 1, mean over 2 peers",
        "Local accuracy 0.2500",
        "Payload 5.00 MB 5,000,000 B, 2 messages",
        "Stream 5.05 MB +1.00% on the payload",
        "Sent again 0.00 MB 2,000 B retransmitted",
        "Latency, median 12.5 ms p95 12.5 ms, p99 12.5 ms",
        "Wall time 1 min 15 s start to first round 1.5 s",
        "Largest peer 321 MiB",
        f"swarm run {run.path}/topology.toml",
        "equal to the byte: 5,000,000 B against 5,000,000 B",
        "equal on 2 of 2 edges",
        "2 equal to the byte; 0 different; 0 without kernel counters; 0 never checked",
        # peer, model, device, samples, accuracies, payload in and out, stream out, peak, wait 0.5 of 2 s, end
        "1 mlp cpu 81 / 10 / 11 0.7500 0.2500 2.50 2.50 2.52 321 25% complete",
        "seed 9",
    ):
        assert fact in text
    for absent in ("Messages that never came", "Tracebacks", "Refused", "Links in trouble"):
        assert absent not in text


def test_a_degraded_run_says_first_who_was_lost_where_and_why(make_run, play_ring):
    run = make_run(peers=5, rounds=4, extra=RING)
    play_ring(run, killed=3)
    troubles = list_troubles(load(run.path))
    assert troubles == [
        "Peer 3 was lost after round 2: killed by SIGKILL.",
        "4 messages never came (rounds 3–4): see “Messages that never came”.",
    ]
    text = read(run).text
    headline = "Degraded: 4 of 5 peers finished, 4 of 4 rounds done by all of them."
    assert text.index(headline) < text.index(troubles[0]) < text.index("Global accuracy")
    assert "3 2 2 3–4 dead" in text  # sender, receiver, messages, rounds, reason
    assert "not comparable: the run is not whole" in text
    assert "without the peers that left no books" in text


def test_books_that_differ_are_told_with_their_difference(make_run):
    run = make_run(peers=2, rounds=1)
    for peer in range(2):
        run.deliver(peer, 1, 1 - peer, payload=1000)
        run.round(peer, 1, overall=0.5)
        run.book(peer, (1 - peer, 1, 1000 + 8 * peer, 1100, 0))
        run.finish(peer)
    run.connect(0, 1, verified=False, stream=(1100, 52), kernel=(1112, 52))
    run.write(1, "refused", source="127.0.0.1:4444", reason="another run's id")
    run.close(foretold_payload_by_round=[2100])
    assert list_troubles(load(run.path)) == [
        "Peer 0, connection out with peer 1: ledger against kernel, sent 1,100 B against 1,112 B (-12 B), "
        "received 52 B against 52 B.",
        "Edge 1 → 0: the sender's books say 1,008 B of payload, the receiver's journal 1,000 B.",
        "Payload differs from what was foretold: 2,000 B against 2,100 B (-100 B).",
        "1 message or connection refused: see “Refused”.",
    ]
    text = read(run).text
    assert "DIFFERENT: 2,000 B against 2,100 B (-100 B)" in text
    assert "equal on 1 of 2 edges" in text
    assert "0 equal to the byte; 1 different; 0 without kernel counters; 1 never checked" in text
    assert "127.0.0.1:4444 another run's id" in text


def test_many_losses_are_counted_not_all_listed_at_the_top(make_run):
    run = make_run(peers=13)
    run.close(status="failed", reason="the machine ran out of memory")
    troubles = list_troubles(load(run.path))
    assert troubles[0] == "the machine ran out of memory"
    assert len(troubles) == 12
    assert troubles[-1] == "… and 3 more peers lost."


def test_what_peers_say_cannot_become_markup(make_run):
    run = make_run(peers=1, rounds=1)
    evil = "<script>alert(1)</script><img src=x onerror='a'>\"&"
    run.start(0, model=evil)
    run.round(0, 1, overall=0.5)
    run.deliver(0, 1, 0)
    run.write(0, "refused", source=evil, reason=evil)
    run.write(0, "missing", round=1, sender=0, reason=evil)
    run.write(0, "undelivered", round=1, receiver=0, reason=evil)
    run.write(0, "link", neighbor=0, state="dead", reason=evil)
    run.write(0, "error", traceback=evil)
    run.close(status="failed", reason=evil, exits={0: Exit(1, evil)})
    reader = read(run)
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "iframe", "object", "link"})
    assert len([1 for tag, _ in reader.tags if tag == "img"]) == 4
    assert reader.text.count(evil) >= 8


def test_a_run_in_which_nothing_happened_has_a_page_without_figures(make_run):
    run = make_run(peers=2)
    run.write(0, "error", traceback="Traceback …\nImportError: no module named nothing")
    run.close(status="failed", startup_s=None, exits={0: Exit(1), 1: Exit(-15)})
    reader = read(run)
    assert not [1 for tag, _ in reader.tags if tag == "img"]
    assert "Failed after 0 of 2 rounds. Peer 0 was lost after round 0: ImportError: no module named nothing." in (
        reader.text
    )
    assert "Latency, median –" in reader.text
    assert "never started" in reader.text


def test_a_run_without_messages_has_only_the_figures_it_can_have(make_run):
    run = make_run(peers=1, rounds=1)
    run.round(0, 1, overall=0.5)
    run.finish(0)
    run.close()
    read(run)
    assert sorted(path.stem for path in (run.path / "figures").iterdir()) == ["accuracy", "round-time"]


def test_a_second_report_replaces_the_first(make_run):
    run = make_run(peers=1, rounds=1)
    run.round(0, 1, overall=0.5)
    run.finish(0)
    run.close()
    first = write_report(run.path).read_bytes()
    assert write_report(run.path).read_bytes() == first


def test_drawing_leaves_matplotlibs_settings_alone(make_run, play_ring):
    run = make_run(peers=3, rounds=2)
    play_ring(run)
    before = dict(matplotlib.rcParams)
    write_report(run.path)
    assert dict(matplotlib.rcParams) == before


def test_edge_bytes_are_megabytes_by_sender_and_receiver(make_run):
    run = make_run(peers=3)
    run.deliver(2, 1, 0, payload=1_500_000)
    run.deliver(2, 2, 0, payload=500_000)
    run.deliver(0, 1, 1, payload=250_000)
    run.close()
    figure = draw_edge_bytes(load(run.path))
    cells = figure.axes[0].images[0].get_array()
    assert cells.filled(0.0).tolist() == [[0.0, 0.0, 2.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert cells.mask.sum() == 7
    assert "MB" in figure.axes[1].get_ylabel()


def test_accuracy_shows_tested_rounds_each_peer_the_means_and_the_selection(make_run):
    run = make_run(peers=2, rounds=4)
    for number, validation, overall in ((1, 0.3, None), (2, 0.6, 0.4), (3, 0.9, None), (4, 0.5, 0.6)):
        for peer in range(2):
            run.round(peer, number, validation=validation, local=0.7, overall=overall and overall + 0.2 * peer)
    run.finish(0)
    run.finish(1)
    run.close()
    lines = draw_accuracy(load(run.path)).axes[0].lines
    drawn = {line.get_label(): np.column_stack(line.get_data()).tolist() for line in lines}
    assert drawn["global, each peer"] == [[2, 0.4], [4, 0.6]]
    assert drawn["global, mean"] == [[2, pytest.approx(0.5)], [4, pytest.approx(0.7)]]
    assert drawn["validation, mean"] == [[1, 0.3], [2, 0.6], [3, 0.9], [4, 0.5]]
    assert drawn["selected round 2"] == [[2, pytest.approx(0.5)]]
    assert any(np.allclose(line.get_ydata(), [0.6, 0.8]) for line in lines if len(line.get_ydata()) == 2)


def test_the_parts_of_the_latency_bar_add_up_to_the_mean_observed_time(make_run):
    run = make_run(peers=2)
    run.start(0, model="small")
    run.start(1, model="big")
    run.deliver(1, 1, 0, parts_ms=(1.0, 2.0, 3.0, 0.0, 4.0))
    run.deliver(1, 2, 0, parts_ms=(3.0, 4.0, 5.0, 0.0, 6.0))
    run.deliver(0, 1, 1, parts_ms=(10.0, 200.0, 30.0, 7.0, 3.0))
    run.close()
    top, bottom = draw_latency(load(run.path)).axes
    assert [label.get_text() for label in bottom.get_yticklabels()] == ["big", "small"]
    widths = np.array([[bar.get_width() for bar in bars] for bars in bottom.containers])
    assert widths.sum(axis=0).tolist() == [250.0, 14.0]
    assert widths[:, 1].tolist() == [2.0, 3.0, 4.0, 0.0, 5.0]
    assert top.get_xscale() == "log"
    assert sum(bar.get_height() for bar in top.patches) == 3


def test_the_time_of_a_round_is_its_parts_and_what_is_left_over(make_run):
    run = make_run(peers=2, rounds=2)
    spent = {"statistics": 0.0, "send": 0.0, "teachers": 1.0, "train": 2.0, "evaluate": 0.0, "wait": 0.5}
    run.round(0, 1, seconds=spent | {"total": 4.0})
    run.round(0, 2, seconds=spent | {"train": 4.0, "total": 6.0})
    run.round(1, 1, seconds=spent | {"total": 3.5})
    run.round(1, 2, seconds=dict.fromkeys((*spent, "total"), 0.0), participates=False)
    run.close()
    axes = draw_round_time(load(run.path)).axes[0]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"teachers": [1.0, 1.0], "train": [3.0, 2.0], "wait": [0.5, 0.5], "other": [0.5, 0.0]}


@pytest.mark.parametrize(
    ("peers", "rounds", "hops", "killed"),
    [(10, 20, 1, 3), (100, 12, 3, 42), (2, 1, 1, None), (12, 300, 1, None)],
)
def test_nothing_in_a_figure_overlaps_or_is_cut(make_run, play_ring, peers, rounds, hops, killed):
    run = make_run(peers=peers, rounds=rounds, extra=RING)
    play_ring(run, hops=hops, killed=killed)
    loaded = load(run.path)
    for drawing in DRAWINGS:
        with matplotlib.rc_context(STYLE):
            figure = drawing.draw(loaded)
            FigureCanvasAgg(figure).draw()
        page = figure.bbox.padded(1.0)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                labels = _tick_labels(axis)
                clashes = [1 for one, other in combinations(labels, 2) if one.overlaps(other)]
                assert not clashes, (drawing.name, axis)
                assert _within(page, axis.label.get_window_extent()), (drawing.name, axis.label)
            if axes.get_legend():
                box = axes.get_legend().get_window_extent()
                assert _within(page, box), drawing.name
                assert not [1 for other in figure.axes if other.get_window_extent().overlaps(box)], drawing.name
            if axes.get_label() != "<colorbar>":
                assert axes.get_xlabel() and axes.get_ylabel()
                assert len(_tick_labels(axes.xaxis)) >= 1 and len(_tick_labels(axes.yaxis)) >= 1


def _tick_labels(axis):
    """The boxes of the labels that are drawn: those whose tick lies within view and that say something."""
    low, high = sorted(axis.get_view_interval())
    boxes = []
    for minor in (False, True):
        ticks = zip(axis.get_ticklocs(minor=minor), axis.get_ticklabels(minor=minor), strict=True)
        shown = [label for spot, label in ticks if low <= spot <= high and label.get_text()]
        boxes += [label.get_window_extent() for label in shown if label.get_visible()]
    return boxes


def _within(outer, inner) -> bool:
    return outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (0.01234, "0.012"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (999.7, "1,000"),
    ],
)
def test_short_numbers_have_no_exponent(value, words):
    assert units.short(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (119.7, "2 min 0 s"), (3700.0, "1 h 1 min")],
)
def test_durations_carry_over(seconds, words):
    assert units.duration(seconds) == words


def test_ranges_of_rounds():
    assert units.ranges({5}) == "5"
    assert units.ranges({7, 1, 2, 3, 9, 10}) == "1–3, 7, 9–10"


def test_the_telling_end_of_a_long_name_is_kept():
    assert units.shorten("cnn6") == "cnn6"
    assert units.shorten("package.module:my_little_network") == "…ule:my_little_network"
    assert len(units.shorten("package.module:my_little_network")) == 22
