"""What a run leaves behind when its processes have ended: summary, report, and a last line that tells the truth."""

from pathlib import Path

from rich.console import Console

from launch.report import write_report
from launch.results import Outcome, summarize, write_summary
from launch.units import fraction, megabytes


def finish(folder: Path, outcome: Outcome, console: Console) -> None:
    """Write summary.json and report.html, and print how it ended."""
    summary = summarize(folder, outcome)
    write_summary(folder, summary)
    report = write_report(folder)
    for rule, times in summary["faults"].items():
        if not times:
            console.print(f"! fault {rule!r} never fired", style="red", highlight=False, markup=False, soft_wrap=True)
    bytes_ = summary["bytes"]
    console.print(
        f"{outcome.status}{': ' + outcome.reason if outcome.reason else ''}. "
        f"global accuracy {fraction(summary['global_accuracy'])}, local {fraction(summary['local_accuracy'])} "
        f"at round {summary['selected_round']}; payload {megabytes(bytes_['payload'])}, "
        f"stream {megabytes(bytes_['stream'])}; {outcome.wall_s:.1f} s\n{report}",
        highlight=False,
        soft_wrap=True,
    )
