"""The folder of a run."""

import tempfile
from pathlib import Path

from isoloss.train.trackers import METRICS_FILE


def check_output_dir(output_dir: Path) -> None:
    """Raise ValueError where the folder of a run can neither be made nor written."""
    place = output_dir.absolute()
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
        if place.is_dir():
            # Only doing it tells: for root, permissions say yes also in /proc and on read-only disks.
            with tempfile.TemporaryDirectory(dir=place, prefix=".isoloss-"):
                return
        reason = f"{place} is there and is no folder"
    except OSError as error:
        reason = f"no folder can be made in {place} ({error.strerror})"
    raise ValueError(
        f"train.output_dir: {output_dir} cannot be written, as {reason}; name another folder, or make room "
        "for this one"
    )


def set_aside(output_dir: Path) -> Path | None:
    """Rename the folder of an earlier run, so that a new one overwrites nothing.

    Returns:
        Its new name, the old one with the first free number; None if the folder holds no run.
    """
    holds_run = (output_dir / METRICS_FILE).exists() or any(output_dir.glob("checkpoint-*"))
    if not holds_run:
        return None
    number = 1
    while (aside := output_dir.with_name(f"{output_dir.name}.{number}")).exists():
        number += 1
    output_dir.rename(aside)
    return aside
