"""What a run folder has to show: tables for the terminal, plots, and one HTML page."""

from rankup.report.page import write_report
from rankup.report.runs import Run, read_run
from rankup.report.tables import comparison_table, run_table

__all__ = ["Run", "comparison_table", "read_run", "run_table", "write_report"]
