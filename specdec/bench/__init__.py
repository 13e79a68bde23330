"""Benchmarks: datasets, interleaved runs of several modes and peers, their figures, tables and plots."""
