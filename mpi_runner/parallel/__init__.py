"""One rank's part of a distributed problem: what it can do, what crosses ranks, and in which order. No files."""
