"""No kernel lands unverified: the code that can be launched is what the recorded GPU run tested, and that run passed."""

import json

from gpu_record import RECORD, SANITIZERS, digests


def test_the_recorded_run_tested_these_sources():
    tested = json.loads(RECORD.read_text())["files"]
    now = digests()
    changed = sorted(name for name in tested.keys() | now.keys() if tested.get(name) != now.get(name))
    assert not changed, "changed since the last GPU run (renew with `python -m tests.gpu_record`): " + ", ".join(changed)


def test_the_recorded_run_passed():
    record = json.loads(RECORD.read_text())
    assert record["tests"]["passed"] == record["tests"]["run"] > 0
    assert record["tests"]["skipped"] == 0
    assert record["sanitizers"] == dict.fromkeys(SANITIZERS, "clean")
