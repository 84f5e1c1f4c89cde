"""`python -m rankup` is `rankup`."""

from rankup.cli.main import main

main()
