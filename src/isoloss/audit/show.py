"""Shows findings as they come: a table for people, JSON for machines."""

import json
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from isoloss.audit.runner import Finding

TABLE_WIDTH = 140
"""Columns of the table where the output is no terminal: a file has room."""


def print_findings(
    parts: Iterable[list[Finding]], *, as_json: bool, console: Console | None = None
) -> list[Finding]:
    """Print findings and return them all.

    Args:
        parts: lists of findings, each printed when it is there.
        as_json: one JSON list at the end instead of tables.
        console: where to print; None: standard output.
    """
    out = Console() if console is None else console
    if not out.is_terminal:
        out.width = max(out.width, TABLE_WIDTH)
    findings: list[Finding] = []
    for part in parts:
        findings += part
        if not as_json and part:
            out.print(_table(part))
    if as_json:
        out.print_json(json.dumps([asdict(finding) for finding in findings]))
        return findings
    failed = [finding for finding in findings if not finding.passed]
    out.print(f"{len(findings) - len(failed)} of {len(findings)} layouts agree with the reference.")
    for finding in failed:
        out.print(
            f"FAILED {finding.layout}, {finding.model}: loss off by {finding.loss_error:.2g}, gradient of "
            f"{finding.worst_parameter} by {finding.gradient_error:.2g} of its largest element, counters: "
            f"{finding.counts}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return findings


def _table(findings: list[Finding]) -> Table:
    table = Table(title=f"{findings[0].dtype}", title_justify="left")
    table.add_column("layout", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for heading in ("loss", "worst gradient", "channels", "counters", "collectives", "verdict"):
        table.add_column(heading, justify="right")
    for finding in findings:
        table.add_row(
            finding.layout,
            finding.model,
            f"{finding.loss_error:.1e}",
            f"{finding.gradient_error:.1e}",
            f"{finding.channel_error:.1e}",
            "equal" if finding.counts == "equal" else "differ",
            "-" if finding.num_collectives is None else str(finding.num_collectives),
            "pass" if finding.passed else "FAIL",
        )
    return table
