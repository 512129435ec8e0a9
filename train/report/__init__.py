"""What a person reads: tables for the terminal, and one self-contained HTML page of a run or of several drafts.

The page needs no network: drawings are inline SVG, the style is in the page. It is made of plain values, so the
quickstart, `draft-jax eval`, `draft-jax report` and any notebook can use it.
"""

from train.report.page import render_report, write_report
from train.report.tables import terminal_table

__all__ = ["render_report", "terminal_table", "write_report"]
