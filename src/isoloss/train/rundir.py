"""The folder of a run."""

from pathlib import Path

from isoloss.train.trackers import METRICS_FILE


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
