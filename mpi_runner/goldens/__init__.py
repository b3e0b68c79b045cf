"""The work behind `golden`: making goldens, judging results by them, telling people and CI systems."""
