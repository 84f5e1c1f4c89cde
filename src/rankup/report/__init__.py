"""Reports on run folders: tables for the terminal, plots, and one HTML page."""

from rankup.report.comparison.page import write_comparison
from rankup.report.page import write_report
from rankup.report.tables import comparison_table, methods_table, run_table
from rankup.runs.comparison import Comparison, is_comparison, read_comparison
from rankup.runs.read import Run, read_run

__all__ = [
    "Comparison",
    "Run",
    "comparison_table",
    "is_comparison",
    "methods_table",
    "read_comparison",
    "read_run",
    "run_table",
    "write_comparison",
    "write_report",
]
