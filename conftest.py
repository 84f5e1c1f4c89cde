"""What pytest must not import to look for examples in it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/rankup/kernels/*"]
