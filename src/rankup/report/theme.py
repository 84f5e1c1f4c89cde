"""The colours of plots and page, light and dark, in one place: a plot has the page's background and
so no visible edge. Runs can be told apart without colours too: each has a marker, and where colours
repeat, lines are dashed and markers hollow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    name: str
    page: str
    surface: str  # of boxes and plots
    text: str
    muted: str
    line: str
    runs: tuple[str, ...]

    @property
    def suffix(self) -> str:
        """The end of a plot's file name, before the extension."""
        return "" if self is LIGHT else f"-{self.name}"


# The runs' colours are Okabe and Ito's, safe for colour-blind eyes, brightened for dark mode.
LIGHT = Theme(
    name="light",
    page="#f4f5f7",
    surface="#ffffff",
    text="#1c2128",
    muted="#5b6573",
    line="#dfe3e8",
    runs=("#0072b2", "#d55e00", "#009e73", "#b8508f", "#c98a00", "#3f9fd8", "#7a5230"),
)
DARK = Theme(
    name="dark",
    page="#0e1116",
    surface="#171b22",
    text="#e4e8ee",
    muted="#98a2b0",
    line="#2c333d",
    runs=("#4fa9e3", "#f08046", "#2fbf95", "#e08fc0", "#edb232", "#8fd0f7", "#c39b77"),
)
THEMES = (LIGHT, DARK)

_MARKERS = "os^DvPX<>phd*8"


def colour(theme: Theme, index: int) -> str:
    return theme.runs[index % len(theme.runs)]


def marker(index: int) -> str:
    return _MARKERS[index % len(_MARKERS)]


def line_style(theme: Theme, index: int) -> str:
    return ("-", "--", ":")[index // len(theme.runs) % 3]


def is_hollow(theme: Theme, index: int) -> bool:
    return line_style(theme, index) != "-"
