"""The command line: a module for each command, with heavy imports inside its function."""
