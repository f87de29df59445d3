"""Writes the tables of docs/MEASURED.md from `bench/results/`; the page's prose is edited in the page itself."""
