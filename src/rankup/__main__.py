"""`python -m rankup` is `rankup`."""

from rankup.cli import main

main()
