"""Repeats what befell the messages of another run: is its folder fit for that?"""

from pathlib import Path

from launch.journals import RunFolderError
from launch.results import load_topology
from launch.settings import differences, flatten
from topology import Topology, TopologyError
from transport.faults import verdicts_of


def check_replay(folder: Path, topology: Topology) -> Path:
    """The folder, absolute, if its verdicts are those of this very file and seed; else `TopologyError`."""
    try:
        other = load_topology(folder)
        verdicts_of(folder)
    except RunFolderError as error:
        raise TopologyError(f"--replay: {error}") from error
    except FileNotFoundError as error:
        raise TopologyError(
            f"--replay: {folder} has no faults.jsonl: it ran without a fault plan, so there is nothing to repeat"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TopologyError(
            f"--replay: {folder / 'faults.jsonl'} cannot be read ({error}): it was changed after the run"
        ) from error
    if differing := differences(flatten(other), flatten(topology)):
        key, (there, here) = next(iter(differing.items()))
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise TopologyError(
            f"--replay: {folder} ran with {key} = {there}, this file says {here}{more}. A fault befalls the same "
            "message only if all settings but swarm.name are the same: name that run's own topology.toml"
        )
    return folder.absolute()
