"""Networks from modules: their options, plans, traces and building."""
