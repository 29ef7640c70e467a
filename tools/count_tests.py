"""Adds up the results of Bazel's test targets: count_tests.py TESTLOGS SECONDS LABEL...

Prints what was not run, and last one line as pytest's: "812 passed, 2 skipped in 401.00s". Exit code 1 where a test
failed or a target left no result.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def results(report: Path) -> Counter[str]:
    """Passed, failed and skipped tests of one target's test.xml."""
    found: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            found["failed"] += 1
        else:
            found["skipped" if "skipped" in outcomes else "passed"] += 1
    return found


def main(testlogs: Path, seconds: str, labels: list[str]) -> int:
    total: Counter[str] = Counter()
    for label in labels:
        report = testlogs / label.removeprefix("//").replace(":", "/") / "test.xml"
        if report.exists():
            total += results(report)
        else:
            print(f"no result: {label}")
            total["failed"] += 1
    counts = [f"{total[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped") if total[outcome]]
    print(f"{', '.join(counts) or '0 passed'} in {float(seconds):.2f}s")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
