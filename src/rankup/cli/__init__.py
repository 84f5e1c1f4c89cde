"""What each command of the command line does with what was typed."""
