"""Paths that pytest must not import to look for doctests in them."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/rankup/kernels/*"]
