"""Benchmarks of the engine on one device: timing, roofline, peers, reports."""
