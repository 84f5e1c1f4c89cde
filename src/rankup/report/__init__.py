"""Reports on run folders: tables for the terminal, plots, and one HTML page."""

from rankup.report.comparison import Comparison, is_comparison, read_comparison
from rankup.report.comparison_page import write_comparison
from rankup.report.page import write_report
from rankup.report.runs import Run, read_run
from rankup.report.tables import comparison_table, methods_table, run_table

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
