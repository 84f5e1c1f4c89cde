"""Tables, plots and pages that compare methods."""
